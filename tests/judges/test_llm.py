"""The language-model judge against an endpoint that fails in the known ways."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from groundhop.config import JudgeConfig
from groundhop.errors import ConfigError, CredentialError
from groundhop.judges.llm import Endpoint, LlmJudge
from groundhop.judges.make import make_judge
from groundhop.judges.rules import ExactJudge, ExactThenJudge
from groundhop.records import Question, Rollout, Verdict

ASKED = Question(id="q", question="Which town?", answer="Riga", kind="name", aliases=("Rīga",))


def rollout(answer: str | None = "Riga town", stop: Any = "answered", text: str = "") -> Rollout:
    said = {"role": "assistant", "content": text or f"Exact Answer: {answer}\nConfidence: 80%"}
    return Rollout(
        question_id="q",
        repeat=3,
        policy="base",
        seed=1,
        messages=(said,),
        answer=answer,
        stop=stop,
        error="x" if stop == "error" else None,
    )


def reply(content: str | None, finish: str = "stop", **message: str) -> httpx.Response:
    body = {
        "choices": [{"message": {"content": content, **message}, "finish_reason": finish}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 20},
    }
    return httpx.Response(200, json=body)


class Served:
    """An endpoint that gives the listed responses, the last one for ever."""

    def __init__(self, *responses: httpx.Response | Exception) -> None:
        self.responses = list(responses)
        self.requests: list[dict[str, Any]] = []
        self.waits: list[float] = []

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(json.loads(request.content))
        at = self.responses.pop(0) if len(self.responses) > 1 else self.responses[0]
        if isinstance(at, Exception):
            raise at
        return at

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)

    def judge(self, attempts: int = 6) -> LlmJudge:
        endpoint = Endpoint(
            url="http://judge.example/v1",
            model="m",
            key="k",
            max_tokens=512,
            attempts=attempts,
            dollars_in=1.0,
            dollars_out=10.0,
        )
        return LlmJudge(endpoint, concurrency=2, sleep=self.sleep, transport=httpx.MockTransport(self.answer))


def ask(judge: Callable[..., Any], given: Rollout) -> Verdict:
    return asyncio.run(judge(given, ASKED))


def test_a_verdict_carries_words_model_prompt_digest_and_cost() -> None:
    judge = Served(reply("reasoning: same\ncorrect: yes")).judge()
    got = ask(judge, rollout())
    assert (got.correct, got.state, got.model, got.attempts, got.tokens) == (True, "judged", "m", 1, 120)
    assert got.dollars == pytest.approx(300e-6)
    assert got.prompt_digest == judge.prompt_digest
    assert (got.question_id, got.repeat, got.policy, got.confidence) == ("q", 3, "base", 80.0)


def test_the_judge_sees_question_response_and_accepted_forms() -> None:
    served = Served(reply("correct: no"))
    ask(served.judge(), rollout(text="It costs $5 in $answer.\nExact Answer: Riga town"))
    (message,) = served.requests[0]["messages"]
    assert all(part in message["content"] for part in ("Which town?", "Riga\nRīga", "It costs $5 in $answer."))


def test_an_outage_is_waited_out() -> None:
    busy = httpx.Response(503)
    served = Served(busy, busy, httpx.Response(429, headers={"retry-after": "7"}), reply("correct: yes"))
    got = ask(served.judge(), rollout())
    assert (got.correct, got.attempts) == (True, 4)
    assert served.waits[2] == 7.0
    assert 0.5 <= served.waits[0] <= 1.0 <= served.waits[1] <= 2.0


@pytest.mark.parametrize(
    "trouble", [httpx.Response(503), httpx.ConnectError("refused"), httpx.Response(200, text="<html>")]
)
def test_an_endless_outage_is_a_judge_error_and_never_a_no(trouble: Any) -> None:
    served = Served(trouble)
    got = ask(served.judge(attempts=4), rollout())
    assert (got.correct, got.state, got.attempts, len(served.requests)) == (None, "judge_error", 4, 4)


def test_a_bad_request_is_not_repeated() -> None:
    served = Served(httpx.Response(404, text="no such model"))
    got = ask(served.judge(), rollout())
    assert (got.state, len(served.requests)) == ("judge_error", 1)
    assert "no such model" in got.reason


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_stops_the_run(status: int) -> None:
    with pytest.raises(CredentialError, match="refused the key"):
        ask(Served(httpx.Response(status)).judge(), rollout())


def test_a_thinking_judge_that_was_cut_gets_one_longer_try() -> None:
    cut = reply("", "length", reasoning_content="so correct: yes ... or no")
    served = Served(cut, reply("correct: no"))
    got = ask(served.judge(), rollout())
    assert (got.correct, [body["max_tokens"] for body in served.requests]) == (False, [512, 4096])


def test_a_judge_that_only_ever_thinks_gives_no_verdict() -> None:
    served = Served(reply(None, "length", reasoning_content="APPROVE\ncorrect: yes"))
    got = ask(served.judge(), rollout())
    assert (got.correct, got.state, len(served.requests)) == (None, "unparsed", 2)
    assert "length" in got.reason


def test_an_unreadable_reply_is_asked_for_again() -> None:
    served = Served(reply("correct: not sure"), reply("correct: yes"))
    got = ask(served.judge(), rollout())
    assert (got.correct, got.attempts, len(served.requests[1]["messages"])) == (True, 2, 3)


def test_replies_that_stay_unreadable_are_counted_apart() -> None:
    got = ask(Served(reply("It is fine.")).judge(attempts=3), rollout())
    assert (got.correct, got.state, got.attempts) == (None, "unparsed", 3)


@pytest.mark.parametrize("judge", [ExactJudge(), ExactThenJudge(ExactJudge()), Served(reply("correct: yes")).judge()])
def test_no_judge_is_asked_about_no_answer_or_a_failed_rollout(judge: Any) -> None:
    assert ask(judge, rollout(None, "no_answer")).correct is False
    assert ask(judge, rollout("", "turns")).correct is False
    failed = ask(judge, rollout(None, "error"))
    assert (failed.correct, failed.state) == (None, "rollout_error")


def test_rules_decide_first_and_the_model_only_what_they_leave_open() -> None:
    served = Served(reply("correct: yes"))
    judge = ExactThenJudge(served.judge())
    assert (ask(judge, rollout("riga.")).judge, len(served.requests)) == ("exact", 0)
    assert (ask(judge, rollout("the town of Riga")).judge, len(served.requests)) == ("llm", 1)


def test_rules_alone_leave_two_readings_open() -> None:
    asked = Question(id="q", question="?", answer="03/04/1902", kind="date")
    got = asyncio.run(ExactJudge()(rollout("04/03/1902"), asked))
    assert (got.correct, got.state) == (None, "open")


def test_a_judge_without_address_or_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"judge\.llm_url"):
        make_judge(JudgeConfig(kind="llm"))
    with pytest.raises(CredentialError, match="NO_SUCH_KEY"):
        make_judge(JudgeConfig(kind="exact_then_llm", llm_url="http://x/v1", llm_model="m", llm_key_env="NO_SUCH_KEY"))
    assert isinstance(make_judge(JudgeConfig()), ExactJudge)


def test_one_judge_serves_event_loops_one_after_another() -> None:
    judge = Served(reply("correct: yes")).judge()
    assert [ask(judge, rollout()).correct for _ in range(2)] == [True, True]

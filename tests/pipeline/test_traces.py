"""Traces have the very form of rollouts, end in a proved answer, and never come from held-out questions."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from groundhop.agents.prompt import answer_of, first_messages
from groundhop.agents.tools import ToolResult
from groundhop.pipeline.traces import PathFailure, construction_trace, construction_traces, rollout_traces, shows, tasks
from groundhop.records import Bucketed, PathStep, Question, Rollout, ToolCall, Verdict

SEARCH = PathStep(tool="search", arguments={"queries": ["old mill “north”"]})
VISIT = PathStep(tool="visit", arguments={"url": "https://mill.example/", "find": "sold"})
PAGES = {
    "search": "[1] Mill\nhttps://mill.example/\nThe old mill.",
    "visit": "The mill was sold in March 12, 1,902 times.",
}


class FakeTools:
    """Answers from a table; `None` stands for an outage."""

    def __init__(self, pages: dict[str, str | None]) -> None:
        self.pages = pages
        self.forbidden: list[Sequence[str]] = []

    async def call(self, name: str, arguments: dict[str, Any], forbidden: Sequence[str] = ()) -> ToolResult:
        self.forbidden.append(forbidden)
        text = self.pages[name]
        if text is None:
            return ToolResult("Error", "provider_error", "HTTP 500")
        return ToolResult(text, "ok") if text else ToolResult("No results.", "empty")

    def fit(self, text: str, tokens: int) -> str:
        return text


def question(name: str = "q", **fields: Any) -> Question:
    return Question(
        **(
            {
                "id": name,
                "question": "How often?",
                "answer": "1902",
                "kind": "number",
                "path": (SEARCH, VISIT),
                "split": "train",
            }
            | fields
        )
    )


def play(asked: Question, pages: dict[str, str | None] = PAGES) -> Any:
    return asyncio.run(construction_trace(asked, FakeTools(pages)))


def test_a_path_becomes_calls_results_and_an_answer() -> None:
    trace = play(question())
    assert [message["role"] for message in trace.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert list(trace.messages[:2]) == first_messages("How often?")
    assert trace.messages[3]["content"] == PAGES["search"]
    assert answer_of(trace.messages[-1]["content"]) == "1902"
    assert (trace.id, trace.origin, trace.tools[0]["function"]["name"]) == ("q/path", "construction", "search")


def test_arguments_are_json_strings_and_results_name_their_call() -> None:
    trace = play(question())
    calls = [message["tool_calls"][0] for message in trace.messages if message.get("tool_calls")]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [SEARCH.arguments, VISIT.arguments]
    assert "“north”" in calls[0]["function"]["arguments"]
    assert [call["id"] for call in calls] == [
        message["tool_call_id"] for message in trace.messages if message["role"] == "tool"
    ]


@pytest.mark.parametrize(
    ("pages", "reason"),
    [
        (PAGES | {"visit": ""}, "path_fails"),
        (PAGES | {"visit": "Nothing about it, but 19021."}, "path_fails"),
        (PAGES | {"search": None}, "provider_error"),
    ],
)
def test_a_path_that_does_not_show_the_answer_is_a_failure(pages: dict[str, str | None], reason: str) -> None:
    failure = play(question(), pages)
    assert isinstance(failure, PathFailure)
    assert failure.reason == reason


def test_an_alias_on_the_page_is_proof_enough() -> None:
    assert not isinstance(play(question(answer="nineteen hundred and two", aliases=("1902",))), PathFailure)


def test_a_question_without_a_path_is_a_failure() -> None:
    assert play(question(path=())).reason == "no_path"


def test_the_tools_are_told_what_would_leak_the_question() -> None:
    tools = FakeTools(PAGES)
    asyncio.run(construction_trace(question(forbidden=("a b c",)), tools))
    assert tools.forbidden == [("a b c",), ("a b c",)]


def test_held_out_questions_never_become_traces() -> None:
    made, failures = asyncio.run(
        construction_traces([question("b"), question("h", split="heldout"), question("a")], FakeTools(PAGES))
    )
    assert ([trace.question_id for trace in made], failures) == (["a", "b"], [])
    with pytest.raises(AssertionError):
        play(question(split="heldout"))


@pytest.mark.parametrize(
    ("text", "form", "there"),
    [
        ("sold in 1,902.", "1902", True),
        ("sold in 19021", "1902", False),
        ("“Blue” Anchor", "blue anchor", True),
        ("Anchors", "anchor", False),
        ("x", "", False),
    ],
)
def test_an_answer_is_shown_only_as_whole_words(text: str, form: str, there: bool) -> None:
    assert shows([text], [form]) is there


def rollout(name: str, repeat: int, count: int = 1, **fields: Any) -> Rollout:
    made = tuple(ToolCall(turn=n, name="search", arguments={"queries": ["x"]}, outcome="ok") for n in range(count))
    return Rollout(
        **(
            {
                "question_id": name,
                "repeat": repeat,
                "policy": "base",
                "seed": 1,
                "messages": ({"role": "user", "content": "?"},),
                "answer": "1902",
                "stop": "answered",
                "calls": made,
            }
            | fields
        )
    )


def verdict(name: str, repeat: int, correct: bool | None = True) -> Verdict:
    return Verdict(question_id=name, repeat=repeat, policy="base", correct=correct, judge="exact")


def bucketed(name: str, bucket: Any = "medium") -> Bucketed:
    return Bucketed(
        question_id=name, policy="base", passed=4, judged=8, errors=0, mean=0.5, low=0.2, high=0.8, bucket=bucket
    )


def chosen(rollouts: list[Rollout], verdicts: list[Verdict], per_question: int = 1, **fields: Any) -> list[str]:
    made = rollout_traces(
        rollouts, verdicts, [question(**fields)], [bucketed("q")], trainable=("medium",), per_question=per_question
    )
    return [trace.id for trace in made]


def test_right_rollouts_with_the_fewest_calls_are_taken() -> None:
    rollouts = [rollout("q", 0, 5), rollout("q", 1, 2), rollout("q", 2, 1), rollout("q", 3, 2)]
    verdicts = [verdict("q", 0), verdict("q", 1), verdict("q", 2, False), verdict("q", 3)]
    assert chosen(rollouts, verdicts, 2) == ["q/base/1", "q/base/3"]


def test_forced_malformed_unjudged_and_held_out_rollouts_are_not_imitated() -> None:
    bad = ToolCall(turn=0, name="", arguments=None, outcome="malformed")
    rollouts = [rollout("q", 0, 1, stop="turns"), rollout("q", 1, calls=(bad,)), rollout("q", 2, 1)]
    assert chosen(rollouts, [verdict("q", 0), verdict("q", 1), verdict("q", 2, None)]) == []
    assert chosen([rollout("q", 0, 1)], [verdict("q", 0)]) == ["q/base/0"]
    assert chosen([rollout("q", 0, 1)], [verdict("q", 0)], split="heldout") == []


def test_tasks_are_training_questions_in_trainable_buckets() -> None:
    asked = [question("c"), question("a"), question("b"), question("h", split="heldout"), question("n")]
    rows = [bucketed("a"), bucketed("b", "too_hard"), bucketed("c", "hard"), bucketed("h"), bucketed("n", None)]
    assert [(task.id, task.bucket) for task in tasks(asked, rows, ("hard", "medium"))] == [
        ("a", "medium"),
        ("c", "hard"),
    ]

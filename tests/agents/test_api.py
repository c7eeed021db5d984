"""Chat endpoints: every shape of answer ends in a defined state."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from groundhop.agents.api import ApiModel, ApiSettings, fitted_limit, read_message
from groundhop.agents.history import trim
from groundhop.agents.http_client import ReplicaClient
from groundhop.agents.loop import Budget, solve
from groundhop.agents.scripted import ScriptedTools
from groundhop.errors import ContextError
from groundhop.records import Rollout


def tool_call(arguments: Any, call_id: Any = "c1", name: str = "search") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def chat(message: dict[str, Any], finish: str = "stop") -> dict[str, Any]:
    return {
        "choices": [{"message": {"role": "assistant", **message}, "finish_reason": finish}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 10},
    }


def settings(**changes: Any) -> ApiSettings:
    return ApiSettings(
        **{"model": "m", "temperature": 1.0, "top_p": 1.0, "context": 8192, "dollars_in": 1.0, "dollars_out": 10.0}
        | changes
    )


def run(url: str, *, turn_tokens: int = 500, **changes: Any) -> Rollout:
    model = ApiModel(ReplicaClient([url], attempts=1), settings(**changes))
    work = solve(
        "Who?",
        model=model,
        toolbox=ScriptedTools(),
        budget=Budget(5, 100_000, turn_tokens, 60.0),
        seed=1,
        question_id="q",
        repeat=0,
        policy="api",
    )
    return asyncio.run(work)


# ---- one message


def test_the_list_of_calls_decides_and_not_the_finish_reason() -> None:
    assert len(read_message({"content": "", "tool_calls": [tool_call('{"queries": ["a"]}')]}, "stop", "p").calls) == 1
    assert read_message({"content": None, "tool_calls": []}, "tool_calls", "p").calls == ()
    assert read_message({"content": None}, "tool_calls", "p").content == ""


@pytest.mark.parametrize("call_id", ["", None, 7, " "])
def test_an_id_is_made_where_there_is_none(call_id: Any) -> None:
    assert read_message({"tool_calls": [tool_call("{}", call_id)]}, "stop", "p").calls[0].id == "p_0"


def test_ids_that_are_used_twice_are_made_anew() -> None:
    calls = read_message({"tool_calls": [tool_call("{}", "x"), tool_call("{}", "x")]}, "stop", "p").calls
    assert [c.id for c in calls] == ["p_0", "p_1"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        (None, {}),
        ("{}", {}),
        ({"url": "u"}, {"url": "u"}),
        ('{"url": "u"}', {"url": "u"}),
        ("{broken", None),
        ("[1]", None),
    ],
)
def test_arguments_of_every_shape_are_read_or_marked(arguments: Any, expected: Any) -> None:
    (call,) = read_message({"tool_calls": [tool_call(arguments)]}, "tool_calls", "p").calls
    assert call.arguments == expected
    assert bool(call.error) == (expected is None)


def test_unreadable_arguments_go_back_as_valid_json() -> None:
    (call,) = read_message({"tool_calls": [tool_call("{broken")]}, "stop", "p").calls
    assert call.as_message()["function"]["arguments"] == "{}"


def test_reasoning_is_never_the_answer() -> None:
    got = read_message({"content": None, "reasoning_content": "Exact Answer: 7"}, "length", "p")
    assert (got.content, got.calls, got.cut) == ("", (), True)


def test_a_call_that_a_reasoning_parser_swallowed_is_a_call() -> None:
    text = 'I search.\n<tool_call>\n{"name": "search", "arguments": {"queries": ["x"]}}\n</tool_call>'
    assert len(read_message({"content": None, "reasoning_content": text}, "stop", "p").calls) == 1
    assert read_message({"content": "Exact Answer: 1", "reasoning_content": text}, "stop", "p").calls == ()


def test_content_in_parts_is_joined() -> None:
    assert (
        read_message({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "stop", "p").content
        == "ab"
    )


# ---- whole rollouts


def test_a_search_and_an_answer_over_the_wire(serve: Callable[..., Any], reply_with: Callable[..., Any]) -> None:
    local = serve(
        [
            reply_with(chat({"content": "", "tool_calls": [tool_call('{"queries": ["a"]}', "")]})),
            reply_with(chat({"content": "Exact Answer: Ada"})),
        ]
    )
    got = run(local.url)
    assert (got.stop, got.answer, got.token_ids) == ("answered", "Ada", ())
    sent = local.seen[1].body["messages"]
    assert [m["role"] for m in sent] == ["system", "user", "assistant", "tool"]
    assert sent[3]["tool_call_id"] == sent[2]["tool_calls"][0]["id"] != ""
    assert got.usage.dollars == pytest.approx((200 * 1 + 20 * 10) / 1e6)


def test_an_empty_answer_is_asked_again_once_and_no_more(
    serve: Callable[..., Any], reply_with: Callable[..., Any]
) -> None:
    local = serve([reply_with(chat({"content": None, "tool_calls": []}, "tool_calls"))])
    assert run(local.url).stop == "no_answer"
    assert len(local.seen) == 2


def test_an_answer_without_choices_is_retried_and_then_an_error(
    serve: Callable[..., Any], reply_with: Callable[..., Any]
) -> None:
    local = serve([reply_with({"choices": []}), reply_with(chat({"content": "Exact Answer: x"}))])
    assert run(local.url).answer == "x"
    local = serve([reply_with({"choices": []})])
    assert run(local.url).stop == "error"
    assert len(local.seen) == 3


def test_the_forced_answer_is_asked_for_without_tools(
    serve: Callable[..., Any], reply_with: Callable[..., Any]
) -> None:
    local = serve(
        lambda seen: reply_with(
            chat(
                {"tool_calls": [tool_call('{"queries": ["a"]}')]}
                if "tools" in seen.body
                else {"content": "Exact Answer: x"}
            )
        )
    )
    got = run(local.url)
    assert (got.stop, got.answer, len(local.seen)) == ("turns", "x", 6)


def limited(reply_with: Callable[..., Any], prompt: int, limit: int = 8192) -> Callable[[Any], Any]:
    def behave(seen: Any) -> Any:
        asked = seen.body["max_tokens"]
        assert asked > 0
        if prompt + asked <= limit:
            return reply_with(chat({"content": "Exact Answer: x"}))
        text = f"This model's maximum context length is {limit} tokens. However, you requested {prompt + asked} tokens ({prompt} in the messages, {asked} in the completion)."
        return reply_with({"error": {"message": text}}, 400)

    return behave


def test_max_tokens_is_fitted_to_what_the_server_says(
    serve: Callable[..., Any], reply_with: Callable[..., Any]
) -> None:
    local = serve(limited(reply_with, 8100))
    assert run(local.url, turn_tokens=4096).answer == "x"
    assert [seen.body["max_tokens"] for seen in local.seen] == [4096, 92]


def test_a_conversation_that_cannot_fit_ends_as_context_and_is_not_retried(
    serve: Callable[..., Any], reply_with: Callable[..., Any]
) -> None:
    local = serve(limited(reply_with, 8195))
    got = run(local.url)
    assert (got.stop, got.error, len(local.seen)) == ("context", None, 1)


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("maximum context length is 8192 tokens. However, you requested 12196 tokens", 4096, 92),
        ("maximum context length is 8192 tokens. However, you requested 8196 tokens", 1, None),
        (
            "This model's maximum context length is 8192 tokens. However, you requested 4096 output tokens and your prompt contains at least 8100 input tokens",
            4096,
            92,
        ),
        ("context window exceeded", 100, None),
    ],
)
def test_the_fitting_limit_is_read_from_the_complaint(text: str, limit: int, expected: int | None) -> None:
    assert fitted_limit(text, limit) == expected


def test_a_complaint_that_is_not_about_length_is_an_error(
    serve: Callable[..., Any], reply_with: Callable[..., Any]
) -> None:
    assert run(serve([reply_with({"error": {"message": "no such model"}}, 404)]).url).stop == "error"


def test_with_trimming_a_long_conversation_goes_on(serve: Callable[..., Any], reply_with: Callable[..., Any]) -> None:
    local = serve(
        lambda seen: reply_with(
            chat({"tool_calls": [tool_call('{"queries": ["a"]}')]})
            if len(local.seen) < 5
            else chat({"content": "Exact Answer: x"})
        )
    )
    model = ApiModel(ReplicaClient([local.url], attempts=1), settings(context=2000, trim=True))
    work = solve(
        "Who?",
        model=model,
        toolbox=ScriptedTools("word " * 300),
        budget=Budget(9, 100_000, 100, 60.0),
        seed=1,
        question_id="q",
        repeat=0,
        policy="api",
    )
    got = asyncio.run(work)
    assert got.answer == "x"
    assert len(local.seen[-1].body["messages"]) < len(got.messages) - 1


def test_a_context_error_is_raised_where_no_limit_helps(
    serve: Callable[..., Any], reply_with: Callable[..., Any]
) -> None:
    local = serve(limited(reply_with, 9000))
    model = ApiModel(ReplicaClient([local.url], attempts=1), settings())
    with pytest.raises(ContextError):
        asyncio.run(model.complete({"messages": [], "max_tokens": 5}, replica=0))


# ---- trimming


def conversation(turns: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    for n in range(turns):
        messages.append(
            {"role": "assistant", "content": "", "tool_calls": [tool_call("{}", f"{n}a"), tool_call("{}", f"{n}b")]}
        )
        messages += [{"role": "tool", "tool_call_id": f"{n}{x}", "content": "r" * 100} for x in "ab"]
    return messages


@pytest.mark.parametrize("limit", [0, 150, 250, 500, 900, 5000])
@pytest.mark.parametrize("tail", [[], [{"role": "user", "content": "Answer now."}]])
def test_trimming_never_parts_calls_from_results(limit: int, tail: list[dict[str, Any]]) -> None:
    messages = conversation(6) + tail
    got = trim(messages, limit, lambda m: len(m["content"] or ""))
    assert got[:2] == messages[:2]
    assert got == [m for m in messages if m in got]
    assert got[-(3 + len(tail)) :] == messages[-(3 + len(tail)) :]
    open_calls: list[str] = []
    for message in got[2:]:
        if message["role"] == "assistant":
            assert open_calls == []
            open_calls = [c["id"] for c in message["tool_calls"]]
        elif message["role"] == "tool":
            open_calls.remove(message["tool_call_id"])
    assert open_calls == []
    newest_only = len(got) == 2 + 3 + len(tail)
    assert newest_only or sum(len(m["content"] or "") for m in got) <= limit

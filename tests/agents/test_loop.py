"""The loop: budgets, endings, malformed calls, failing infrastructure."""

import asyncio
import itertools
import json
from typing import Any

import pytest

from groundhop.agents.loop import Budget, solve
from groundhop.agents.prompt import final_request
from groundhop.agents.scripted import ScriptedModel, ScriptedTools
from groundhop.agents.tools import ToolResult
from groundhop.errors import ContextError, CredentialError, ServerError
from groundhop.records import Rollout


def call(name: str = "search", **arguments: Any) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments or {"queries": ["q"]}}) + "\n</tool_call>"


def run(model: ScriptedModel, tools: ScriptedTools | None = None, *, clock: Any = None, **budget: Any) -> Rollout:
    limits = Budget(**{"max_turns": 6, "max_tokens": 10_000, "turn_tokens": 100, "max_time_s": 60.0} | budget)
    more = {} if clock is None else {"clock": clock}
    work = solve(
        "Who?",
        model=model,
        toolbox=tools or ScriptedTools(),
        budget=limits,
        seed=1,
        question_id="q",
        repeat=0,
        policy="base",
        **more,
    )
    return asyncio.run(work)


def roles(rollout: Rollout) -> list[str]:
    return [m["role"] for m in rollout.messages]


def test_a_model_that_searches_and_answers_gives_a_full_rollout() -> None:
    tools = ScriptedTools()
    got = run(ScriptedModel("Looking. " + call(), "Found it.\nExact Answer: Ada"), tools)
    assert (got.answer, got.stop, got.usage.turns) == ("Ada", "answered", 2)
    assert roles(got) == ["system", "user", "assistant", "tool", "assistant"]
    assert got.messages[2]["content"] == "Looking."
    assert tools.asked == [("search", {"queries": ["q"]})]
    assert [c.outcome for c in got.calls] == ["ok"]


def test_arguments_in_messages_are_json_strings_and_ids_match() -> None:
    got = run(ScriptedModel(call(), "Exact Answer: x"))
    (made,) = got.messages[2]["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"queries": ["q"]}
    assert got.messages[3]["tool_call_id"] == made["id"]


def test_two_calls_of_one_turn_are_answered_in_order() -> None:
    tools = ScriptedTools(visit=ToolResult("the page", "ok"), search=ToolResult("the hits", "ok"))
    got = run(ScriptedModel(call("visit", url="u") + call(), "Exact Answer: x"), tools)
    assert [m["content"] for m in got.messages if m["role"] == "tool"] == ["the page", "the hits"]
    assert len({c["id"] for c in got.messages[2]["tool_calls"]}) == 2


def test_the_turn_limit_asks_once_more_without_tools_and_keeps_all_work() -> None:
    model = ScriptedModel(*[call()] * 5, "Exact Answer: guess")
    got = run(model, max_turns=5)
    assert (got.stop, got.answer) == ("turns", "guess")
    assert [tools for _, _, tools in model.seen] == [True] * 5 + [False]
    assert len(got.calls) == 5
    assert got.messages[-2] == {"role": "user", "content": final_request()}


def test_a_call_instead_of_the_final_answer_is_not_run() -> None:
    tools = ScriptedTools()
    got = run(ScriptedModel(*[call()] * 3), tools, max_turns=2)
    assert (got.stop, got.answer, len(tools.asked)) == ("turns", None, 2)
    assert got.calls[-1].outcome == "refused"
    assert "tool_calls" not in got.messages[-1]


def test_the_loop_ends_even_if_the_final_request_fails() -> None:
    got = run(ScriptedModel(call(), ServerError("gone")), max_turns=1)
    assert (got.stop, got.error) == ("error", "gone")
    assert len(got.calls) == 1


def test_a_dead_server_is_an_error_and_not_an_answer() -> None:
    got = run(ScriptedModel(call(), ServerError("no answer after 6 attempts")))
    assert (got.stop, got.answer) == ("error", None)
    assert roles(got)[-1] == "tool"


def test_a_failing_provider_is_an_error_and_not_an_answer() -> None:
    got = run(ScriptedModel(call()), ScriptedTools(search=ToolResult("Error.", "provider_error", "503 for ever")))
    assert (got.stop, got.error) == ("error", "503 for ever")
    assert got.calls[0].outcome == "provider_error"


def test_a_refused_key_stops_the_run() -> None:
    with pytest.raises(CredentialError):
        run(ScriptedModel(CredentialError("401")))


def test_a_conversation_that_the_server_finds_too_long_ends_as_context() -> None:
    got = run(ScriptedModel(call(), ContextError("too long")))
    assert (got.stop, got.error) == ("context", None)


def test_the_time_limit_forces_an_answer() -> None:
    got = run(ScriptedModel(call(), "Exact Answer: late"), clock=itertools.count(0, 40).__next__, max_time_s=60.0)
    assert (got.stop, got.answer) == ("time", "late")


def test_the_token_limit_forces_an_answer() -> None:
    got = run(ScriptedModel(call(), call(), "Exact Answer: x"), ScriptedTools("w " * 500), max_tokens=200)
    assert (got.stop, got.answer) == ("tokens", "x")


@pytest.mark.parametrize("context", [200, 300, 1000])
def test_a_long_result_is_cut_visibly_to_what_the_context_leaves(context: int) -> None:
    model = ScriptedModel(*[call()] * 9, "Exact Answer: x", context=context)
    got = run(model, ScriptedTools("w " * 20_000))
    assert got.messages[3]["content"].endswith("[cut]")
    # ScriptedModel asserts that size + limit never passes the context.
    assert got.stop == "context"


def test_a_turn_never_asks_for_more_than_fits_the_context() -> None:
    model = ScriptedModel("Exact Answer: x", context=400)
    run(model, turn_tokens=4096)
    assert 0 < model.seen[0][1] < 400


def test_a_question_that_fills_the_context_is_never_sent() -> None:
    model = ScriptedModel(context=20)
    got = run(model)
    assert (got.stop, got.answer, model.seen) == ("context", None, [])


def test_an_empty_turn_is_asked_again_once() -> None:
    model = ScriptedModel("", "Exact Answer: x")
    assert run(model).answer == "x"
    assert model.seen[1][0] == [{"role": "user", "content": final_request()}]


def test_a_second_turn_without_answer_ends_the_rollout() -> None:
    got = run(ScriptedModel("", "I do not know."))
    assert (got.stop, got.answer) == ("no_answer", None)


def test_prose_without_the_answer_line_is_not_an_answer() -> None:
    assert run(ScriptedModel("It is Ada.", "It is Ada.")).answer is None


def test_an_answer_that_was_cut_is_no_answer() -> None:
    got = run(ScriptedModel("CUT:Thinking.\nExact Answer: Ada Lov"))
    assert (got.stop, got.answer) == ("truncated", None)


def test_a_complete_answer_line_before_the_cut_counts() -> None:
    got = run(ScriptedModel("CUT:Exact Answer: Ada\nExplanation: she was"))
    assert (got.stop, got.answer) == ("answered", "Ada")


def test_malformed_calls_are_answered_counted_and_bounded() -> None:
    got = run(ScriptedModel(*["<tool_call>{broken</tool_call>"] * 3, "Exact Answer: x"), max_turns=3)
    assert [c.outcome for c in got.calls] == ["malformed"] * 3
    assert [c.arguments for c in got.calls] == [None] * 3
    assert got.stop == "turns"
    assert got.messages[3]["role"] == "user"
    assert got.messages[3]["content"].startswith("Error:")


def test_a_good_call_beside_a_malformed_one_is_run() -> None:
    tools = ScriptedTools()
    got = run(ScriptedModel(call() + "<tool_call>{broken</tool_call>", "Exact Answer: x"), tools)
    assert len(tools.asked) == 1
    assert roles(got)[2:5] == ["assistant", "tool", "user"]


def test_a_tools_complaint_goes_back_to_the_model() -> None:
    bad = ToolResult('Error: visit needs "url": a string.', "malformed", "no url")
    got = run(ScriptedModel(call("visit", find="x"), "Exact Answer: x"), ScriptedTools(visit=bad))
    assert (got.answer, got.calls[0].outcome, got.calls[0].detail) == ("x", "malformed", "no url")


def test_a_flood_of_calls_is_run_in_part() -> None:
    tools = ScriptedTools()
    got = run(ScriptedModel(call() * 20, "Exact Answer: x"), tools)
    assert len(tools.asked) == 8
    assert [c.outcome for c in got.calls].count("refused") == 12
    assert len([m for m in got.messages if m["role"] == "tool"]) == 20


def test_an_answer_inside_reasoning_is_no_answer() -> None:
    assert run(ScriptedModel("<think>Exact Answer: x</think>", "<think>Exact Answer: x")).answer is None

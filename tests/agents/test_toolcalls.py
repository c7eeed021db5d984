"""How tool calls are read out of model text."""

import json

import pytest

from groundhop.agents.toolcalls import ParsedCall, parse_calls, read_arguments, read_turn
from groundhop.errors import MalformedCallError


def call(arguments: object, name: str = "search") -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


@pytest.mark.parametrize(
    "query",
    [
        "end tag </tool_call> quoted",
        '<tool_call>{"name": "visit"}</tool_call>',
        "</think> and <think>",
        'a "quoted" } brace {',
        "two\nlines",
    ],
)
def test_a_call_ends_where_its_json_ends(query: str) -> None:
    assert parse_calls(call({"queries": [query]})) == [ParsedCall("search", {"queries": [query]})]


def test_no_part_of_a_call_that_is_still_being_written_is_executed() -> None:
    text = call({"queries": ["x </tool_call> y"]})
    assert {read_turn(text[:end], "length").calls for end in range(len(text))} == {()}
    assert len(read_turn(text, "length").calls) == 1


def test_several_calls_keep_their_order_and_the_prose_around_them() -> None:
    turn = read_turn("First this.\n" + call({"queries": ["a"]}) + call({"url": "u"}, "visit") + "\nThen that.")
    assert [c.name for c in turn.calls] == ["search", "visit"]
    assert turn.content == "First this.\nThen that."


@pytest.mark.parametrize("arguments", [None, {}, "", "{}", "  "])
def test_absent_arguments_are_an_empty_object(arguments: object) -> None:
    assert parse_calls(call(arguments)) == [ParsedCall("search", {})]


def test_a_missing_arguments_key_is_an_empty_object() -> None:
    assert parse_calls('<tool_call>{"name": "visit"}</tool_call>') == [ParsedCall("visit", {})]


def test_arguments_in_a_string_are_decoded_once() -> None:
    assert read_arguments('{"url": "{\\"not\\": \\"again\\"}"}') == {"url": '{"not": "again"}'}


@pytest.mark.parametrize("arguments", [["a"], 3, True, '"text"', "[1]", "{'a': 1}", "null and void"])
def test_arguments_that_are_no_object_are_malformed(arguments: object) -> None:
    with pytest.raises(MalformedCallError):
        read_arguments(arguments)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "search", "arguments": {"queries": ["x',
        '<tool_call>\n{"name": "search", "arguments": {"queries": ["x"]}}',
        "<tool_call>",
        call({"queries": ["fine"]}) + '\n<tool_call>\n{"name": "vis',
    ],
)
def test_a_call_that_was_cut_off_is_malformed(text: str) -> None:
    with pytest.raises(MalformedCallError):
        parse_calls(text, "length")


@pytest.mark.parametrize(
    "body",
    [
        "{'name': 'search'}",
        "search(x)",
        '{"arguments": {}}',
        '{"name": 3}',
        '{"name": " "}',
        "17",
        "[]",
        '{"name": "search", "arguments": {"n": NaN}}',
        "[" * 100_000,
        '{"name": "search"} trailing',
    ],
)
def test_what_is_no_call_object_is_malformed(body: str) -> None:
    with pytest.raises(MalformedCallError):
        parse_calls(f"<tool_call>{body}</tool_call>")


def test_a_complete_call_without_its_end_tag_counts_when_the_model_stopped_by_itself() -> None:
    assert parse_calls('<tool_call>{"name": "search", "arguments": {"queries": ["a"]}}') == [
        ParsedCall("search", {"queries": ["a"]})
    ]


def test_a_list_of_calls_within_one_tag_is_several_calls() -> None:
    assert [c.name for c in parse_calls('<tool_call>[{"name": "a"}, {"name": "b"}]</tool_call>')] == ["a", "b"]


def test_a_readable_call_survives_beside_an_unreadable_one() -> None:
    turn = read_turn("<tool_call>{broken</tool_call>" + call({"queries": ["a"]}))
    assert len(turn.calls) == 1
    assert len(turn.errors) == 1
    assert "{broken" in turn.content


def test_closed_reasoning_is_neither_executed_nor_content() -> None:
    turn = read_turn("<think>Perhaps " + call({"queries": ["draft"]}) + " no.</think>\nExact Answer: 7")
    assert (turn.calls, turn.content) == ((), "Exact Answer: 7")


def test_reasoning_that_the_template_opened_ends_at_its_end_tag() -> None:
    turn = read_turn("Perhaps " + call({"queries": ["draft"]}) + "</think>" + call({"queries": ["real"]}))
    assert turn.calls == (ParsedCall("search", {"queries": ["real"]}),)
    assert turn.content == ""


def test_a_call_after_reasoning_that_was_never_closed_is_a_call() -> None:
    turn = read_turn("<think>\nThe <tool_call> tag will do.\n" + call({"queries": ["a"]}))
    assert (turn.calls, turn.errors, turn.content) == ((ParsedCall("search", {"queries": ["a"]}),), (), "")


def test_reasoning_that_was_never_closed_is_no_answer() -> None:
    assert read_turn("<think>Exact Answer: 42", "length").content == ""


def test_prose_before_reasoning_stays() -> None:
    assert read_turn("Before.<think>x</think>After.").content == "Before.\nAfter."


def test_lone_surrogates_in_arguments_become_replacement_characters() -> None:
    (got,) = parse_calls('<tool_call>{"name": "search", "arguments": {"queries": ["\\ud800"]}}</tool_call>')
    assert got.arguments == {"queries": ["\ufffd"]}


def tagged(*parameters: tuple[str, str], name: str = "search") -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('["a", "b"]', ["a", "b"]),
        ("plain words", "plain words"),
        ("two\nlines", "two\nlines"),
        (
            "quotes </parameter> and </function> and </tool_call> itself",
            "quotes </parameter> and </function> and </tool_call> itself",
        ),
        ("[not json", "[not json"),
        ("1904", "1904"),
    ],
)
def test_calls_with_tagged_parameters_are_read(value: str, expected: object) -> None:
    assert parse_calls("Well.\n" + tagged(("queries", value))) == [ParsedCall("search", {"queries": expected})]


def test_tagged_calls_may_come_in_numbers_and_without_parameters() -> None:
    text = tagged(("url", "u"), ("find", "x"), name="visit") + "\n" + tagged(name="search")
    assert parse_calls(text) == [ParsedCall("visit", {"url": "u", "find": "x"}), ParsedCall("search", {})]


@pytest.mark.parametrize("end", [20, 40, 60, 80])
def test_a_tagged_call_that_was_cut_off_is_malformed(end: int) -> None:
    with pytest.raises(MalformedCallError):
        parse_calls(tagged(("queries", "a long query with many words in it"))[:end], "length")

from typing import Any

import msgspec
import pytest

from groundhop.errors import InputError
from groundhop.pipeline.llm_json import parse, parse_as, parse_fields

GOOD: dict[str, Any] = {"question": "Which mill?", "answer": "Three Herons"}
TEXT = '{"question": "Which mill?", "answer": "Three Herons"}'


@pytest.mark.parametrize(
    "raw",
    [
        TEXT,
        f"```json\n{TEXT}\n```",
        f"```\n{TEXT}\n```",
        f"Sure! [1] Here it is:\n```json\n{TEXT}\n```\nEnjoy {{wink}} and [2].",
        f'<think>perhaps {{"question": "x", "answer": "y"}}</think>{TEXT}',
        f"<think>a {{ b </think>\n{TEXT}",
        f'perhaps {{"question": "x", "answer": "y"}} no\n</think>\n\n{TEXT}',
        f"```text\n{{no object}}\n```\n```json\n{TEXT}\n```",
        f'```json\n{{"question": "x", "answer": }}\n```\nCorrected:\n```json\n{TEXT}\n```',
        f"\ufeff{TEXT}",
    ],
)
def test_the_object_is_found_whatever_stands_around_it(raw: str) -> None:
    assert parse(raw) == GOOD


@pytest.mark.parametrize(
    "value",
    [
        "What does ```y``` do?",
        "Is </think> a tag?",
        "Is <think> a tag?",
        'a "quoted" {brace} [list]',
        "back\\slash } end",
    ],
)
def test_strings_may_hold_what_looks_like_markup(value: str) -> None:
    row = {"question": value, "answer": "d"}
    packed = msgspec.json.encode(row).decode()
    assert parse(packed) == parse(f"```json\n{packed}\n```") == row


@pytest.mark.parametrize(
    ("raw", "finish"),
    [
        ('{"question": "Which mi', "stop"),
        ('{"question": "Which mill?", "more": {"question": "a", "answer": "b"}', "stop"),
        ('{"question": "Which mill?", "more": {"question": "a", "answer": "b"}', "length"),
        (TEXT, "length"),
        (TEXT, "content_filter"),
        ("", "stop"),
        ("", "length"),
        ("I can't help with that.", "stop"),
        ("[]", "stop"),
        (f"[{TEXT}]", "stop"),
        ('"text"', "stop"),
        ("null", "stop"),
        (f"<think>a draft: {TEXT}", "stop"),
        (f"{TEXT}</think>", "stop"),
        (f'{TEXT}\nNo, better: {{"question": "Which mill was', "stop"),
        ('{"question": "x", "answer": NaN}', "stop"),
        ("{'question': 'x', 'answer': 'y'}", "stop"),
        ("[" * 100_000, "stop"),
    ],
)
def test_everything_else_is_an_error_never_half_a_row(raw: str, finish: str) -> None:
    with pytest.raises(InputError):
        parse(raw, finish)


@pytest.mark.parametrize(
    "raw",
    [
        '{"question": "x", "answer": null}',
        '{"question": "x", "answer": " "}',
        '{"question": "x"}',
        '{"question": "", "answer": "y"}',
    ],
)
def test_missing_and_empty_fields_are_errors(raw: str) -> None:
    with pytest.raises(InputError, match=r"answer|question"):
        parse_fields(raw, "stop", ("question", "answer"))


def test_another_shape_names_the_field() -> None:
    class Row(msgspec.Struct, forbid_unknown_fields=True):
        question: str
        answer: str

    assert parse_as(TEXT, "stop", Row) == Row("Which mill?", "Three Herons")
    with pytest.raises(InputError, match=r"\$\.answer"):
        parse_as('{"question": "x", "answer": 5}', "stop", Row)

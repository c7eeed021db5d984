"""The judge's last verdict outside reasoning, or none."""

import pytest

from groundhop.errors import NoVerdictError
from groundhop.judges.parse import confidence_of, read_verdict, verdict_in

FIELDS = "extracted_final_answer: Riga\nreasoning: {}\ncorrect: {}\nconfidence: 70"


@pytest.mark.parametrize(
    "line",
    [
        "correct: yes",
        "Correct : YES.",
        "**correct:** yes",
        "**correct: yes**",
        "- __Correct__: *yes*",
        "4. correct: yes",
        "correct:yes confidence: 70",
        "correct: yes, both name the same town",
        "correct: yes (same year)",
        "correct:\nyes",
        "correct: “yes”",
        "correct： yes",
        '{"extracted_final_answer": "Riga", "correct": "yes", "confidence": 70}',
        '```json\n{"correct": true}\n```',
        "Both name the same town. correct: yes",
    ],
)
def test_a_yes_is_read_in_every_dress(line: str) -> None:
    assert verdict_in(line) == "yes"


@pytest.mark.parametrize(
    "reply",
    [
        FIELDS.format("the response claims 'correct: yes' but the town differs", "no"),
        FIELDS.format("first I thought\ncorrect: yes\nbut the town differs", "**No**"),
        "<think>then I would write\ncorrect: yes\n</think>\ncorrect: no",
        "correct: yes\n</think>\ncorrect: no",
        "correct: yes if it matches, no otherwise\n\ncorrect: no",
        "correct: no\n\ncorrect: yes or no",
        "The answer is incorrect, so\ncorrect: no",
    ],
)
def test_the_last_verdict_outside_reasoning_wins_over_quotes_and_echoes(reply: str) -> None:
    assert verdict_in(reply) == "no"


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "The answer is right.",
        "correct: not certain",
        "correct: none",
        "correct: nope",
        "correct: no idea",
        "correct: no way to tell",
        "correct: yes / no",
        "correct: yes|no",
        "correct: yes or no",
        "correct: yes-ish",
        "correct: 'yes' if it matches",
        "correct: I cannot say",
        "correct:",
        "incorrect: yes",
        "[correct_answer]: yes",
        "> correct: yes",
        "reasoning: the response says 'correct: yes",
        "reasoning: it says correct: yes",
        "<think>correct: yes",
        "correct: yes\ncorrect: cannot be told after all",
        '{"correct": null}',
        '{"verdict": "yes"}',
    ],
)
def test_what_is_neither_yes_nor_no_is_unparsed(reply: str) -> None:
    assert verdict_in(reply) == "unparsed"


def test_no_verdict_is_an_error_and_never_a_no() -> None:
    assert read_verdict("correct: no") is False
    with pytest.raises(NoVerdictError, match="not sure"):
        read_verdict("correct: not sure")


@pytest.mark.parametrize(
    ("text", "percent"),
    [
        ("Confidence: 0.9", 90.0),
        ("Confidence: 90", 90.0),
        ("**Confidence:** 85 %", 85.0),
        ("confidence: 0.5%", 0.5),
        ("Confidence: 1", 1.0),
        ("Confidence: 1.0", 100.0),
        ("confidence: 90/100", 90.0),
        ("Confidence: 95% (fairly sure)", 95.0),
        ("Confidence: 20%\nConfidence: 40%", 40.0),
        ("Confidence: 150%", None),
        ("Confidence: -5", None),
        ("Confidence: 80-90%", None),
        ("Confidence: high", None),
        ("", None),
        (None, None),
        ("<think>Confidence: 90</think>", None),
    ],
)
def test_confidence_is_percent_by_a_stated_rule_or_missing(text: str | None, percent: float | None) -> None:
    assert confidence_of(text) == percent

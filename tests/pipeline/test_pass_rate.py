"""Counts and buckets; errors count neither way."""

from fractions import Fraction

import pytest

from groundhop.pipeline.pass_rate import count, count_all, name_bucket
from groundhop.pipeline.statistics import jeffreys
from groundhop.records import Verdict

OUTCOMES = {"y": True, "n": False, "?": None}


def corrects(code: str) -> list[bool | None]:
    return [OUTCOMES[letter] for letter in code]


def verdict(question: str, repeat: int, correct: bool | None) -> Verdict:
    return Verdict(question_id=question, repeat=repeat, policy="base", correct=correct, judge="exact")


@pytest.mark.parametrize(
    ("code", "passed", "judged", "errors", "bucket"),
    [
        ("yyyyyyyy", 8, 8, 0, "too_easy"),
        ("nnnnnnnn", 0, 8, 0, "too_hard"),
        ("ynnnnnnn", 1, 8, 0, "hard"),
        ("yynnnnnn", 2, 8, 0, "hard"),
        ("yyynnnnn", 3, 8, 0, "medium"),
        ("yyyyynnn", 5, 8, 0, "medium"),
        ("yyyyyynn", 6, 8, 0, "easy"),
        ("yyyyyyyn", 7, 8, 0, "easy"),
        ("yynnnn??", 2, 6, 2, "medium"),
        ("yynnn???", 2, 5, 3, None),
        ("????????", 0, 0, 8, None),
        ("", 0, 0, 0, None),
    ],
)
def test_rollouts_without_a_verdict_count_neither_way(
    code: str, passed: int, judged: int, errors: int, bucket: str | None
) -> None:
    got = count("q", "base", corrects(code), min_judged=6)
    assert (got.passed, got.judged, got.errors, got.bucket) == (passed, judged, errors, bucket)
    assert (got.mean, got.low, got.high) == jeffreys(passed, judged)


@pytest.mark.parametrize("judged", range(1, 41))
def test_each_rate_lies_in_exactly_one_bucket(judged: int) -> None:
    edges = {
        "too_hard": (-1, 0),
        "hard": (0, Fraction(3, 10)),
        "medium": (Fraction(3, 10), Fraction(7, 10)),
        "easy": (Fraction(7, 10), 1),
    }
    for passed in range(judged + 1):
        rate = Fraction(passed, judged)
        inside = [
            name
            for name, (low, high) in edges.items()
            if (low <= rate < high if name in ("medium", "easy") else low < rate < high)
        ]
        expected = "too_hard" if rate == 0 else "too_easy" if rate == 1 else inside[0]
        assert (len(inside), name_bucket(passed, judged, 1)) == (0 if rate in (0, 1) else 1, expected)


def test_nothing_judged_has_no_bucket_even_without_a_minimum() -> None:
    assert name_bucket(0, 0, 0) is None


def test_a_repeat_judged_twice_counts_once_by_its_last_verdict() -> None:
    rows = [verdict("b", 0, None), verdict("a", 0, False), verdict("b", 0, True), verdict("b", 1, False)]
    assert [(row.question_id, row.passed, row.judged, row.errors) for row in count_all(rows, 1)] == [
        ("a", 0, 1, 0),
        ("b", 1, 2, 0),
    ]

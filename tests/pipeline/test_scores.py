"""An evaluation's numbers against hand counts."""

from typing import Any

import pytest

from groundhop.pipeline.score_table import table
from groundhop.pipeline.scores import PolicyScores, comparisons, policy_summary
from groundhop.pipeline.statistics import bootstrap_ratio, mcnemar, wilson
from groundhop.records import Rollout, ToolCall, Verdict

OUTCOMES = {"y": True, "n": False, "?": None}


def scores(
    codes: dict[str, str], calls: int | dict[str, int] = 2, stop: str = "answered", confidence: float | None = None
) -> PolicyScores:
    """Letters are tries: y right, n wrong, ? no verdict, ! failed by infrastructure."""
    made = PolicyScores()
    for name, code in codes.items():
        count = calls if isinstance(calls, int) else calls[name]
        for repeat, letter in enumerate(code):
            tool = tuple(ToolCall(turn=n, name="search", arguments={}, outcome="ok") for n in range(count))
            ended: Any = "error" if letter == "!" else stop
            rollout = Rollout(question_id=name, repeat=repeat, policy="p", seed=1, messages=(), stop=ended, calls=tool)
            state: Any = "rollout_error" if letter == "!" else "unparsed" if letter == "?" else "judged"
            made.add(
                rollout,
                Verdict(
                    question_id=name,
                    repeat=repeat,
                    policy="p",
                    correct=OUTCOMES.get(letter),
                    judge="exact",
                    state=state,
                    confidence=confidence,
                ),
            )
    return made


def summary(**given: PolicyScores) -> dict[str, Any]:
    return {
        "policies": {name: policy_summary(found, seed=1, draws=500) for name, found in given.items()},
        "comparisons": comparisons(given, seed=1, draws=500),
    }


def test_tries_without_a_verdict_widen_the_bounds_and_leave_accuracy_alone() -> None:
    row = policy_summary(scores({"a": "y", "b": "n", "c": "?", "d": "!"}), seed=1, draws=500)
    assert row["accuracy"] == pytest.approx(wilson(1, 2)._asdict())
    assert row["accuracy_errors_wrong"] == pytest.approx(wilson(1, 4)._asdict())
    assert (row["worst"], row["best"], row["tries"], row["judged"]) == (0.25, 0.75, 4, 2)
    assert row["without_verdict"] == {"rollout_error": 1, "unparsed": 1}


def test_nothing_judged_is_no_number_instead_of_zero() -> None:
    row = policy_summary(scores({"a": "??", "b": "!!"}), seed=1, draws=500)
    assert (row["accuracy"], row["worst"], row["best"], row["pass_at_k"]) == (None, 0.0, 1.0, {})


def test_failed_tries_do_not_enter_tool_calls() -> None:
    row = policy_summary(scores({"a": "y!", "b": "yy"}, calls={"a": 6, "b": 3}), seed=1, draws=500)
    assert row["calls"]["value"] == 4.0


def test_pass_at_k_is_averaged_over_questions_with_enough_tries() -> None:
    row = policy_summary(scores({"a": "ynnn", "b": "nn", "c": "yyyy"}), seed=1, draws=500)
    assert row["pass_at_k"] == {"1": pytest.approx((0.25 + 0 + 1) / 3), "2": pytest.approx((0.5 + 0 + 1) / 3), "4": 1.0}


def test_endings_by_a_budget_are_reported_as_censored() -> None:
    assert policy_summary(scores({"a": "n", "b": "n"}, stop="turns"), seed=1, draws=500)["censored"]["value"] == 1.0
    assert policy_summary(scores({"a": "n", "b": "n"}), seed=1, draws=500)["censored"]["value"] == 0.0


@pytest.mark.parametrize(("tries", "rows", "error"), [(99, 99, None), (100, 100, 20.0)])
def test_calibration_needs_a_hundred_rows(tries: int, rows: int, error: float | None) -> None:
    half = {f"q{n:03}": "y" if n % 2 else "n" for n in range(tries)}
    row = policy_summary(scores(half, confidence=70.0), seed=1, draws=500)
    assert row["calibration"] == {"rows": rows, "missing": 0, "rms_error": error}


def test_missing_confidence_is_counted_and_not_taken_for_certainty() -> None:
    assert policy_summary(scores({"a": "yn"}), seed=1, draws=500)["calibration"] == {
        "rows": 0,
        "missing": 2,
        "rms_error": None,
    }


def test_single_tries_are_compared_by_mcnemar() -> None:
    before = scores({f"q{n}": "n" for n in range(8)} | {"lost": "y", "same": "y"})
    after = scores({f"q{n}": "y" for n in range(8)} | {"lost": "n", "same": "y"})
    (row,) = summary(base=before, grpo=after)["comparisons"]
    assert (row["gained"], row["lost"], row["questions"], row["name"]) == (8, 1, 10, "base → grpo")
    assert row["p"] == pytest.approx(mcnemar(8, 1))
    assert row["difference"]["value"] == pytest.approx(0.7)


def test_repeats_are_compared_question_by_question() -> None:
    before = scores({f"q{n}": "nnnn" for n in range(6)})
    after = scores({f"q{n}": "ynnn" for n in range(6)})
    (row,) = summary(base=before, sft=after)["comparisons"]
    assert (row["p"], row["test"]) == (pytest.approx(2 / 64), "paired permutation by question")
    assert row["difference"]["value"] == pytest.approx(0.25)


def test_only_questions_judged_for_both_are_compared() -> None:
    (row,) = summary(a=scores({"q": "y", "r": "?"}), b=scores({"q": "y", "r": "y", "s": "y"}))["comparisons"]
    assert row["questions"] == 1


def test_tool_calls_are_compared_apart_where_both_one_or_none_solved() -> None:
    before = scores({"both": "yn", "one": "nn", "none": "nn"}, calls={"both": 4, "one": 10, "none": 6})
    after = scores({"both": "yy", "one": "yy", "none": "nn"}, calls={"both": 2, "one": 5, "none": 9})
    (row,) = summary(a=before, b=after)["comparisons"]
    assert [row[name]["value"] for name in ("ratio", "ratio_both", "ratio_other", "ratio_neither")] == [
        0.8,
        0.5,
        0.5,
        1.5,
    ]
    assert row["ratio"] == bootstrap_ratio([2, 9, 5], [4, 6, 10], 1, 500)._asdict()
    assert (row["both_solved"], row["one_solved"], row["neither_solved"]) == (1, 1, 1)


def test_three_policies_are_compared_each_with_each_and_nothing_shared_is_no_number() -> None:
    rows = summary(base=scores({"q": "y"}), sft=scores({"q": "n"}), grpo=scores({"r": "y"}))["comparisons"]
    assert [row["name"] for row in rows] == ["base → sft", "base → grpo", "sft → grpo"]
    assert (rows[1]["questions"], rows[1]["p"], rows[1]["difference"], rows[1]["ratio"]) == (0, None, None, None)


def test_the_table_shows_every_policy_and_pair_even_without_numbers() -> None:
    text = table(summary(base=scores({"q": "?", "r": "?"}), grpo=scores({"q": "y", "r": "n"})))
    assert "grpo" in text
    assert "50.0 % [" in text
    assert "base → grpo" in text
    assert len(text.splitlines()) == 6

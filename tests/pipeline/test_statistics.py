"""Each estimator against numbers by hand, published tables or scipy."""

import numpy as np
import pytest
from scipy import stats

from groundhop.pipeline.statistics import (
    NOTHING,
    bootstrap_mean,
    bootstrap_ratio,
    calibration_error,
    jeffreys,
    mcnemar,
    pass_at_k,
    permutation_p,
    rate_over_questions,
    wilson,
)


@pytest.mark.parametrize(("passed", "total"), [(0, 8), (1, 8), (5, 8), (8, 8), (90, 200)])
def test_wilson_equals_scipy(passed: int, total: int) -> None:
    reference = stats.binomtest(passed, total).proportion_ci(0.95, method="wilson")
    assert wilson(passed, total) == pytest.approx((passed / total, reference.low, reference.high), abs=1e-12)


@pytest.mark.parametrize(
    ("passed", "low", "high"), [(0, 0, 0.26), (1, 0.01, 0.45), (4, 0.20, 0.80), (7, 0.55, 0.99), (8, 0.74, 1)]
)
def test_jeffreys_equals_the_table_for_eight_tries(passed: int, low: float, high: float) -> None:
    got = jeffreys(passed, 8)
    assert got == pytest.approx(((passed + 0.5) / 9, low, high), abs=0.005)


def test_no_tries_leave_the_prior_and_no_rate() -> None:
    assert jeffreys(0, 0) == (0.5, 0.0, 1.0)
    assert wilson(0, 0) == NOTHING


@pytest.mark.parametrize(
    ("total", "passed", "k", "chance"),
    [
        (8, 1, 1, 0.125),
        (8, 1, 4, 0.5),
        (8, 1, 8, 1.0),
        (8, 2, 4, 1 - 15 / 70),
        (2, 0, 1, 0.0),
        (2, 0, 4, None),
        (2, 2, 3, None),
        (0, 0, 1, None),
    ],
)
def test_pass_at_k_is_unbiased_and_silent_above_the_tries(
    total: int, passed: int, k: int, chance: float | None
) -> None:
    assert pass_at_k(total, passed, k) == (None if chance is None else pytest.approx(chance))


def test_pass_at_k_is_the_average_over_all_draws() -> None:
    from itertools import combinations

    tries = [True, True, False, False, False]
    draws = [any(draw) for draw in combinations(tries, 3)]
    assert pass_at_k(5, 2, 3) == pytest.approx(sum(draws) / len(draws))


@pytest.mark.parametrize(("first", "second", "p"), [(0, 0, 1.0), (0, 5, 2 / 32), (1, 9, 22 / 1024), (4, 4, 1.0)])
def test_mcnemar_is_the_exact_binomial(first: int, second: int, p: float) -> None:
    assert mcnemar(first, second) == pytest.approx(p)
    assert mcnemar(second, first) == pytest.approx(p)


def test_permutation_goes_through_all_flips_when_few_questions_differ() -> None:
    assert permutation_p([0.25, 0.5, 0.25, 0, 1.0, 0.75], seed=1) == pytest.approx(2 / 32)
    assert permutation_p([0.0, 0.0], seed=1) == 1.0


def test_permutation_on_single_tries_is_mcnemar() -> None:
    assert permutation_p([1] * 9 + [-1] + [0] * 50, seed=1) == pytest.approx(mcnemar(9, 1))


def test_drawn_permutations_come_near_the_exact_p_and_depend_on_the_seed_alone() -> None:
    differences = [1.0] * 14 + [-1.0] * 6
    drawn = permutation_p(differences, seed=3, draws=40_000)
    assert drawn == permutation_p(differences, seed=3, draws=40_000)
    assert drawn == pytest.approx(mcnemar(14, 6), abs=0.01)


def test_drawn_permutations_never_claim_zero() -> None:
    assert permutation_p([1.0] * 60, seed=0, draws=999) == pytest.approx(1 / 1000)


def test_the_bootstrap_mean_agrees_with_scipy() -> None:
    values = np.random.default_rng(5).exponential(size=120)
    reference = stats.bootstrap(
        (values,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    got = bootstrap_mean(values, seed=2, draws=20_000)
    assert got == pytest.approx((values.mean(), reference.low, reference.high), abs=0.01)


def test_a_paired_ratio_keeps_questions_together() -> None:
    calls = np.random.default_rng(0).integers(1, 30, 80)
    got = bootstrap_ratio(calls * 0.7, calls, seed=1)
    assert got == pytest.approx((0.7, 0.7, 0.7))


def test_a_ratio_over_nothing_is_no_number() -> None:
    assert bootstrap_ratio([1.0], [0.0], seed=1) == NOTHING
    assert bootstrap_ratio([], [], seed=1) == NOTHING


def test_repeats_of_one_question_do_not_narrow_the_interval() -> None:
    passed, tries = np.repeat([8, 0], 20), np.full(40, 8)
    clustered = rate_over_questions(passed, tries, seed=1)
    assert clustered.value == 0.5
    assert clustered.high - clustered.low == pytest.approx(2 * 1.96 * 0.5 / np.sqrt(40), abs=0.02)


def test_single_tries_take_wilson_and_no_success_is_not_certain_zero() -> None:
    assert rate_over_questions([1, 0, 1], [1, 1, 1], seed=1) == wilson(2, 3)
    assert rate_over_questions([0] * 50, [4] * 50, seed=1) == wilson(0, 50)
    assert rate_over_questions([4] * 50, [4] * 50, seed=1) == wilson(50, 50)
    assert rate_over_questions([0, 0], [0, 0], seed=1) == NOTHING


def test_questions_without_tries_do_not_enter_a_rate() -> None:
    assert rate_over_questions([1, 0, 0], [1, 1, 0], seed=1) == wilson(1, 2)


def test_calibration_counts_the_last_bin_and_small_sets() -> None:
    assert calibration_error([70] * 40, [1] * 20 + [0] * 20) == pytest.approx(20.0)
    stated, right = [50] * 100 + [80] * 150, [1, 0] * 50 + [0] * 150
    assert calibration_error(stated, right) == pytest.approx(np.sqrt(150 / 250) * 80)
    assert calibration_error([], []) is None


def test_calibration_sorts_by_confidence_first() -> None:
    stated, right = [90, 10] * 100, [1, 0] * 100
    assert calibration_error(stated, right) == pytest.approx(10.0)

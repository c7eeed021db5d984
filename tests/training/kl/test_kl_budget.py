"""The share of an update that a budget allows, and how budgets change."""

import math

import pytest

from groundhop.errors import ConfigError, InputError, StepError
from groundhop.training.kl.budget import Budget, step_size, tried_size


@pytest.mark.parametrize(
    ("predicted", "budget", "alpha_max", "alpha"),
    [
        (4e-4, 1e-4, 3.0, 0.5),
        (1e-4, 4e-4, 3.0, 2.0),
        (1e-4, 4e-4, 1.0, 1.0),
        (1e-9, 1e-2, 3.0, 3.0),
        (5e-324, 1e-2, 3.0, 3.0),
        (0.0, 1e-4, 3.0, 1.0),
        (0.0, 1e-4, 0.5, 0.5),
    ],
)
def test_k5_alpha_meets_the_budget_and_its_cap(predicted: float, budget: float, alpha_max: float, alpha: float) -> None:
    assert step_size(predicted, budget, alpha_max) == pytest.approx(alpha, rel=1e-12)


@pytest.mark.parametrize("predicted", [math.nan, math.inf, -math.inf, -1e-12])
def test_k5_a_prediction_that_is_no_kl_gives_no_step(predicted: float) -> None:
    with pytest.raises(StepError, match="not applied"):
        step_size(predicted, 1e-4, 1.0)


@pytest.mark.parametrize("budget", [1e-6, 1e-4, 1e-2])
def test_k8_half_the_budget_is_a_step_shorter_by_root_2(budget: float) -> None:
    assert step_size(0.5, budget / 2, 3.0) == pytest.approx(step_size(0.5, budget, 3.0) / math.sqrt(2), rel=1e-12)


def test_the_budget_falls_along_a_cosine_and_stays_at_its_end() -> None:
    budget, found = Budget(2e-4, 2e-5, 4), []
    for _ in range(6):
        found.append(budget.current)
        budget.advance()
    share = (1 + math.sqrt(0.5)) / 2
    expected = [2e-4, 2e-5 + 1.8e-4 * share, 1.1e-4, 2e-5 + 1.8e-4 * (1 - share), 2e-5, 2e-5]
    assert found == pytest.approx(expected, rel=1e-12)


def test_mismatch_is_averaged_and_taken_off() -> None:
    budget = Budget(1e-3, 1e-3, 1)
    budget.observe(1e-4)
    first = budget.current
    budget.observe(2e-4)
    assert (first, budget.current) == (pytest.approx(9e-4), pytest.approx(1e-3 - (0.7 * 1e-4 + 0.3 * 2e-4)))


def test_a_negative_mismatch_counts_as_none_and_a_large_one_leaves_half() -> None:
    budget = Budget(1e-3, 1e-3, 1)
    budget.observe(-5.0)
    before = budget.current
    budget.observe(1.0)
    assert (before, budget.current) == (1e-3, 5e-4)


@pytest.mark.parametrize("mismatch", [math.nan, math.inf])
def test_a_mismatch_that_is_not_finite_is_refused(mismatch: float) -> None:
    budget = Budget(1e-3, 1e-3, 1)
    with pytest.raises(InputError):
        budget.observe(mismatch)
    assert budget.current == 1e-3


def test_a_budget_goes_on_from_its_state() -> None:
    budget, other = Budget(1e-3, 1e-4, 7), Budget(1e-3, 1e-4, 7)
    budget.advance()
    budget.advance()
    budget.observe(1e-5)
    budget.observe(7e-5)
    other.load_state_dict(budget.state_dict())
    budget.observe(3e-5)
    other.observe(3e-5)
    assert other.current == budget.current != 1e-3


@pytest.mark.parametrize("values", [(0.0, 1e-4, 3), (1e-4, -1.0, 3), (math.inf, 1e-4, 3), (1e-4, 1e-4, 0)])
def test_a_budget_of_nothing_is_refused(values: tuple[float, float, int]) -> None:
    with pytest.raises(ConfigError):
        Budget(*values)


@pytest.mark.parametrize("bend", [-3.0, 0.0, 5.0])
def test_a_tried_step_ends_within_5_percent_of_the_budget_whatever_the_curve(bend: float) -> None:
    def trial(alpha: float) -> float:
        return 2.0 * alpha**2 * math.exp(bend * alpha)

    tried = tried_size(2.0, 0.01, 1.0, trial)
    assert trial(tried.alpha) == tried.realised == pytest.approx(0.01, rel=0.05)
    assert tried.trials <= 3


def test_a_tried_step_is_never_larger_than_allowed_and_one_that_moves_nothing_is_taken_whole() -> None:
    assert tried_size(1e-6, 1.0, 1.0, lambda alpha: 1e-6 * alpha**2) == (1.0, 1e-6, 1)
    assert tried_size(0.0, 1.0, 1.0, lambda alpha: 0.0) == (1.0, 0.0, 1)


@pytest.mark.parametrize("found", [math.nan, math.inf, -1.0])
def test_a_trial_that_gives_no_kl_takes_no_step(found: float) -> None:
    with pytest.raises(StepError):
        tried_size(1.0, 0.5, 1.0, lambda alpha: found)

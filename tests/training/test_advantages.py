import math

import pytest

from groundhop.training.advantages import advantages, is_dead, is_unknown

NAN = float("nan")


def test_one_right_of_eight_by_hand() -> None:
    # mean 1/8, sample standard deviation sqrt((7/8)^2 + 7 (1/8)^2) / sqrt(7) = 0.3535534
    got = advantages([0, 0, 1, 0, 0, 0, 0, 0])
    assert got == pytest.approx([-0.353453] * 2 + [2.474174] + [-0.353453] * 5, abs=1e-5)


def test_two_right_of_four_by_hand() -> None:
    assert advantages([1, 1, 0, 0]) == pytest.approx([0.865875, 0.865875, -0.865875, -0.865875], abs=1e-5)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_group_of_equal_rewards_is_dead_and_gives_exactly_nothing(value: float) -> None:
    assert is_dead([value] * 6)
    assert advantages([value] * 6) == [0.0] * 6


@pytest.mark.parametrize("rewards", [[], [1.0], [1.0, None], [None, None], [0.0, NAN]])
def test_fewer_than_two_known_rewards_are_dead_and_finite(rewards: list[float | None]) -> None:
    assert is_dead(rewards)
    assert advantages(rewards) == [0.0] * len(rewards)


def test_a_group_is_judged_by_its_own_rewards_alone() -> None:
    assert [is_dead(group) for group in ([1, 1, 1], [0, 1, 0], [0, 0, 0])] == [True, False, True]


@pytest.mark.parametrize("unknown", [None, NAN, math.inf])
def test_statistics_are_those_of_the_known_rewards(unknown: float | None) -> None:
    got = advantages([1, 0, unknown, unknown, 0, unknown, 1, 0])
    known = advantages([1, 0, 0, 1, 0])
    assert [got[i] for i in (0, 1, 4, 6, 7)] == known
    assert [got[i] for i in (2, 3, 5)] == [0.0] * 3
    assert known[0] == pytest.approx((1 - 0.4) / (math.sqrt(0.3) + 1e-4))


def test_advantages_of_a_group_sum_to_zero() -> None:
    assert sum(advantages([1, 0, 1, 1, 0, None, 1])) == pytest.approx(0, abs=1e-12)


def test_unknown_is_none_nan_or_infinite_and_zero_is_not() -> None:
    assert [is_unknown(reward) for reward in (None, NAN, -math.inf, 0.0, 1.0)] == [True, True, True, False, False]

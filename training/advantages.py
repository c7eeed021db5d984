"""Advantages of a group of rollouts, over those with a reward only; a group without a spread says nothing."""

import math
from collections.abc import Sequence

EPSILON = 1e-4
"""Added to the standard deviation, as TRL does (trl/trainer/grpo_trainer.py)."""

Reward = float | None
"""None, or NaN, where nothing is known about the rollout."""


def advantages(rewards_G: Sequence[Reward]) -> list[float]:
    """(r - mean) / (std + 1e-4) with the sample standard deviation (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    Mean and deviation are those of the rewards that are known; a rollout without one gets 0. So do all rollouts of
    a group that `is_dead`.
    """
    if is_dead(rewards_G):
        return [0.0] * len(rewards_G)
    known = _known(rewards_G)
    mean = sum(known) / len(known)
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in known) / (len(known) - 1))
    return [0.0 if is_unknown(reward) else (reward - mean) / (deviation + EPSILON) for reward in rewards_G]  # type: ignore[operator]


def is_dead(rewards_G: Sequence[Reward]) -> bool:
    """Whether a group gives no gradient: fewer than two known rewards, or all the same.

    Looks at the group's own rewards, never at a spread over the batch, which hides dead groups.
    """
    return len(set(_known(rewards_G))) < 2


def is_unknown(reward: Reward) -> bool:
    """Whether a reward is missing or not a finite number."""
    return reward is None or not math.isfinite(reward)


def _known(rewards_G: Sequence[Reward]) -> list[float]:
    return [reward for reward in rewards_G if reward is not None and math.isfinite(reward)]

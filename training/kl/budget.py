"""How far the policy may move in one update, and which share of an update that allows (docs/logra.md)."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from groundhop.errors import ConfigError, InputError, NotFiniteError

_TRIALS, _TOLERANCE, _LARGEST_CORRECTION = 4, 0.05, 2.0


def step_size(predicted: float, budget: float, alpha_max: float) -> float:
    """The share of an update, at most `alpha_max`, whose predicted KL is within `budget`; both KLs in nats.

    An update that moves nothing is taken whole. Raises: NotFiniteError when the prediction is negative or not finite.
    """
    if not (math.isfinite(predicted) and predicted >= 0):
        raise NotFiniteError(f"need a finite predicted KL, at least 0, got {predicted}: the update was not applied")
    if predicted == 0:
        return min(1.0, alpha_max)
    return min(alpha_max, math.sqrt(budget / predicted))


class Tried(NamedTuple):
    """A share of an update, and the exact KL that trying it gave."""

    alpha: float
    realised: float
    trials: int


def tried_size(predicted: float, budget: float, alpha_max: float, trial: Callable[[float], float]) -> Tried:
    """`step_size`, corrected by the exact KL that `trial(alpha)` gives until that is within 5 % of the budget, or the share cannot grow.

    KL grows with about the square of the share, so one correction is nearly always enough; after four trials the last one stands.
    Raises: NotFiniteError when a KL is negative or not finite.
    """
    alpha = step_size(predicted, budget, alpha_max)
    trials = 0
    while True:
        found, trials = trial(alpha), trials + 1
        better = min(alpha_max, alpha * step_size(found, budget, _LARGEST_CORRECTION))
        if abs(found - budget) <= _TOLERANCE * budget or better == alpha or trials == _TRIALS:
            return Tried(alpha, found, trials)
        alpha = better


class Budget:
    """KL per update in nats: a cosine from `first` to `last` over `updates`, less what rollouts are already off.

    The share for `mismatch` is a running mean over updates; at least `floor` of the schedule's value remains.
    """

    def __init__(
        self, first: float, last: float, updates: int, *, newest_weight: float = 0.3, floor: float = 0.5
    ) -> None:
        if not (math.isfinite(first) and first > 0 and math.isfinite(last) and last > 0 and updates >= 1):
            raise ConfigError(f"need positive KL budgets over at least one update, got {first}, {last} over {updates}")
        if not (0 < newest_weight <= 1 and 0 < floor <= 1):
            raise ConfigError(f"need newest_weight and floor above 0 and up to 1, got {newest_weight} and {floor}")
        self._first, self._last, self._updates = first, last, updates
        self._newest_weight, self._floor = newest_weight, floor
        self._done = 0
        self._mismatch: float | None = None

    @property
    def scheduled(self) -> float:
        """The schedule's value for the next update."""
        share = min(self._done / self._updates, 1.0)
        return self._last + (self._first - self._last) * (1 + math.cos(math.pi * share)) / 2

    @property
    def current(self) -> float:
        """What the next update may use."""
        return max(self.scheduled - (self._mismatch or 0.0), self._floor * self.scheduled)

    def observe(self, mismatch: float) -> None:
        """Take in one update's mean(log p_server - log p_trainer) over its completed responses, the same on all processes.

        Below 0 it counts as 0. Raises: InputError when it is not finite.
        """
        if not math.isfinite(mismatch):
            raise InputError(f"need a finite mismatch of log-probabilities, got {mismatch}")
        found, weight = max(mismatch, 0.0), self._newest_weight
        self._mismatch = found if self._mismatch is None else self._mismatch + weight * (found - self._mismatch)

    def advance(self) -> None:
        """One update is done."""
        self._done += 1

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs; the schedule itself comes from the configuration."""
        return {"done": self._done, "mismatch": self._mismatch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self._done, self._mismatch = int(state["done"]), state["mismatch"]

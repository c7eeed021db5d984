"""An optimizer whose every step is predicted, scaled to a KL budget, and only then taken."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from groundhop.errors import InputError
from groundhop.training.heads import inner
from groundhop.training.kl.budget import Budget, step_size, tried_size
from groundhop.training.kl.direction import Direction
from groundhop.training.kl.predict import predict, realised
from groundhop.training.kl.probe import Probe
from groundhop.training.kl.proposal import DenseProposer, Proposer

_STATE = "kl_control"


class Predict(Protocol):
    """`predict` or `predict_by_differences`."""

    def __call__(
        self,
        model: nn.Module,
        direction: Direction,
        probes: Sequence[Probe],
        *,
        temperature: float,
        kept: list[Tensor] | None,
    ) -> float:
        """The KL at alpha = 1, in nats a token."""
        ...


@dataclass(frozen=True, slots=True)
class StepControl:
    """What was decided about one step; KLs are nats a generated token."""

    predicted: float
    """KL of the whole update, to second order; that of the step taken is alpha² times it."""
    budget: float
    alpha: float
    """Share of the update that was taken."""
    realised: float | None
    """Exact KL(before || after) of the share taken, on the probe; None when it was not measured."""


class Controlled(torch.optim.Optimizer):
    """Wraps an optimizer of `model`, for the trainers of Hugging Face and TRL: schedulers and checkpoints see the one inside.

    One that has `propose`, `apply` and `abandon` is asked itself; any other is made to propose through `DenseProposer`. With
    `alpha_max` above 1 small updates are enlarged. The trainer sets `probe` to give some of the responses just trained on.

    The prediction is of second order and some per cent off at budgets above 1e-4. With `measure` the scaled step is tried on the probe
    before it is taken, and scaled again where its exact KL is not within 5 % of the budget.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        budget: Budget,
        *,
        alpha_max: float = 1.0,
        temperature: float = 1.0,
        measure: bool = False,
        predict: Predict = predict,
    ) -> None:
        self.wrapped = optimizer
        self.budget = budget
        self.probe: Callable[[], Sequence[Probe]] | None = None
        self.last: StepControl | None = None
        """The last step's decision."""
        self._model, self._alpha_max, self._temperature = model, alpha_max, temperature
        self._measure, self._predict = measure, predict
        self._proposer: Proposer = (
            cast(Proposer, optimizer) if hasattr(optimizer, "propose") else DenseProposer(optimizer, model)
        )
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Propose, predict, scale, apply. A step that moves nothing is not probed.

        Raises: StepError when the KL cannot be predicted or is not finite, InputError without probes. Weights and optimizer
        state are then as before.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        direction = self._proposer.propose()
        try:
            self.last = self._decide(direction)
        except BaseException:
            self._proposer.abandon()
            raise
        del direction  # as large as the weights when it is dense
        self._proposer.apply(self.last.alpha)
        self.budget.advance()
        return loss

    def _decide(self, direction: Direction) -> StepControl:
        budget = self.budget.current
        if direction.is_zero:
            return StepControl(0.0, budget, step_size(0.0, budget, self._alpha_max), None)
        probes = self._probes()
        kept: list[Tensor] | None = [] if self._measure else None
        predicted = self._predict(self._model, direction, probes, temperature=self._temperature, kept=kept)
        if kept is None:
            return StepControl(predicted, budget, step_size(predicted, budget, self._alpha_max), None)

        def trial(alpha: float) -> float:
            with direction.shift(inner(self._model), alpha):
                found: float = realised(self._model, probes, kept, temperature=self._temperature)
            return found

        tried = tried_size(predicted, budget, self._alpha_max, trial)
        return StepControl(predicted, budget, tried.alpha, tried.realised)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.wrapped.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, and the budget's under a key of its own."""
        return {**self.wrapped.state_dict(), _STATE: self.budget.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state; one of the wrapped optimizer alone leaves the budget as it is."""
        wrapped = dict(state_dict)
        control = wrapped.pop(_STATE, None)
        self.wrapped.load_state_dict(wrapped)
        self._share()
        if control is not None:
            self.budget.load_state_dict(control)

    def _probes(self) -> Sequence[Probe]:
        if self.probe is None:
            raise InputError("nothing to probe the policy on: need `probe` set before a step")
        return self.probe()

    def _share(self) -> None:
        # Loading a state makes both anew inside; a scheduler that changes a group must change that one.
        self.param_groups, self.state = self.wrapped.param_groups, self.wrapped.state

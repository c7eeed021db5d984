"""Optimizers that show a step before they take it, and an adapter that makes any optimizer do so."""

import copy
import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from groundhop.errors import InputError, StepError
from groundhop.training.kl.direction import DenseDirection, Direction


class Proposer(Protocol):
    """Splits an optimizer's step in two. Between `propose` and the end of a step no other one may be proposed."""

    def propose(self) -> Direction:
        """Say where the step would go. Weights are as before when it returns; so is everything when it raises."""
        ...

    def apply(self, alpha: float) -> None:
        """Take `alpha` of the step; 1 is the plain optimizer's step, bit for bit."""
        ...

    def abandon(self) -> None:
        """Take none of it: weights and state are as before `propose`."""
        ...


class DenseProposer:
    """Makes `optimizer`, which trains parameters of `model`, propose its steps.

    Its state (AdamW's moments) moves on by a whole step whatever `alpha` is: it describes gradients, not weights. Between `propose` and
    the end of a step this holds a copy of the trained weights, one of their state, and the direction.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self.optimizer = optimizer
        self._model = model
        self._after: list[tuple[Tensor, Tensor]] | None = None
        self._state: dict[Tensor, Any] = {}
        self._settings: list[dict[str, Any]] = []

    @torch.no_grad()
    def propose(self) -> DenseDirection:
        """Take the step, note where it went, and undo it. Parameters without a gradient are not part of it.

        Raises: StepError when a step is open already; InputError when a trained parameter is not the model's.
        """
        if self._after is not None:
            raise StepError("a step is proposed already: need apply or abandon first")
        groups = self.optimizer.param_groups
        trained = [weight for group in groups for weight in group["params"] if weight.grad is not None]
        names = self._names(trained)
        before = [weight.detach().clone() for weight in trained]
        self._keep(trained)
        try:
            self.optimizer.step()
            self._after = [(weight, weight.detach().clone()) for weight in trained]
        except BaseException:
            self.abandon()
            raise
        finally:
            for weight, old in zip(trained, before, strict=True):
                weight.copy_(old)
        steps = [old.sub_(new) for old, (_, new) in zip(before, self._after, strict=True)]
        return DenseDirection(dict(zip(names, steps, strict=True)))

    @torch.no_grad()
    def apply(self, alpha: float) -> None:
        """Move the weights by `alpha` of the step.

        Raises: StepError when nothing is proposed, or `alpha` is negative or not finite; nothing changes then.
        """
        if self._after is None:
            raise StepError("nothing is proposed: need propose before apply")
        if not (math.isfinite(alpha) and alpha >= 0):
            raise StepError(f"need a finite share of the step, at least 0, got {alpha}")
        for weight, after in self._after:
            if alpha == 1.0:
                weight.copy_(after)  # weight - (weight - after) may differ from `after` by a rounding
            else:
                wide = torch.promote_types(weight.dtype, torch.float32)
                weight.copy_(weight.to(wide) - alpha * (weight.to(wide) - after.to(wide)))
        self._forget()

    def abandon(self) -> None:
        """Put the optimizer's state back. Without a proposal nothing happens."""
        for weight, state in self._state.items():
            if state is None:
                self.optimizer.state.pop(weight, None)
            else:
                self.optimizer.state[weight] = state
        for group, settings in zip(self.optimizer.param_groups, self._settings, strict=False):
            group.update(settings)
        self._forget()

    def _names(self, trained: list[Tensor]) -> list[str]:
        names = {id(weight): name for name, weight in self._model.named_parameters()}
        missing = [tuple(weight.shape) for weight in trained if id(weight) not in names]
        if missing:
            raise InputError(f"the optimizer trains parameters that the model does not have, of shapes {missing}")
        return [names[id(weight)] for weight in trained]

    def _keep(self, trained: list[Tensor]) -> None:
        state, groups = self.optimizer.state, self.optimizer.param_groups
        self._state = {weight: _copy(state[weight]) if weight in state else None for weight in trained}
        self._settings = [{key: _copy(value) for key, value in g.items() if key != "params"} for g in groups]

    def _forget(self) -> None:
        self._after, self._state, self._settings = None, {}, []


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return {key: _copy(part) for key, part in value.items()} if isinstance(value, dict) else copy.deepcopy(value)

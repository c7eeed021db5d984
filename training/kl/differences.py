"""Predict the KL by finite differences in float32, for models whose forward pass has no forward-mode derivative.

In bfloat16 they are useless at the size of a natural step (docs/logra.md), so other weights are refused.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from groundhop.errors import InputError, StepError
from groundhop.training.heads import inner
from groundhop.training.kl.direction import Direction
from groundhop.training.kl.predict import Sums, half_variances, mean_over_processes
from groundhop.training.kl.probe import Probe, logits_of, probing

AIM = 1e-4
"""KL (nats) at the distance where logits are compared: far above float32's rounding, well inside the quadratic range."""
AGREEMENT = 0.05
_ROUNDS = 6


@torch.no_grad()
def predict_by_differences(
    model: nn.Module,
    direction: Direction,
    probes: Sequence[Probe],
    *,
    temperature: float = 1.0,
    kept: list[Tensor] | None = None,
    group: Any = None,
) -> float:
    """What `predict` gives, from logits at weights moved by ±alpha along the direction. Weights come back bit for bit.

    Raises: StepError when two distances give results more than 5 % apart; InputError for weights below float32.
    """
    model = inner(model)
    before = [] if kept is None else kept

    def at(distance: float) -> float:
        def local() -> Sums:
            total = 0.0
            if not before:
                with probing(model):
                    before.extend(logits.float().clone() for logits in logits_of(model, probes))
            for z, tangent in zip(before, _slopes(model, direction, probes, distance), strict=True):
                total += float(half_variances(z, tangent, temperature))
            return Sums(total, sum(map(len, before)))

        return mean_over_processes(local, model, group)

    distance, predicted = 1.0, at(1.0)
    for _ in range(_ROUNDS):
        if not math.isfinite(predicted) or AIM / 4 <= predicted * distance**2 <= AIM * 4:
            break
        distance *= _towards_aim(predicted * distance**2)
        predicted = at(distance)
    if not math.isfinite(predicted):
        return predicted
    nearer = at(distance / 2)
    if abs(predicted - nearer) > AGREEMENT * max(predicted, nearer):
        raise StepError(
            f"finite differences disagree: {predicted:.3g} at alpha {distance:.3g}, {nearer:.3g} at half of it"
        )
    return nearer


@contextmanager
def moved(model: nn.Module, direction: Direction, alpha: float) -> Iterator[None]:
    """While the block runs, the weights stand at alpha along the direction."""
    kept: list[tuple[Tensor, Tensor]] = []
    try:
        for weight, step in direction.dense(model):
            if weight.dtype not in (torch.float32, torch.float64):
                raise InputError(f"finite differences need weights in float32, got {weight.dtype}")
            kept.append((weight, weight.detach().clone()))
            weight.detach().sub_(step.to(weight), alpha=alpha)
        yield
    finally:
        for weight, before in kept:
            weight.detach().copy_(before)


def _slopes(model: nn.Module, direction: Direction, probes: Sequence[Probe], distance: float) -> Iterator[Tensor]:
    """Central differences of the logits by alpha: their error falls with the square of the distance."""
    sides: list[list[Tensor]] = []
    for alpha in (distance, -distance):
        with probing(model), moved(model, direction, alpha):
            sides.append([logits.float().clone() for logits in logits_of(model, probes)])
    for ahead, behind in zip(*sides, strict=True):
        yield (ahead - behind) / (2 * distance)


def _towards_aim(kl: float) -> float:
    # Not far at once: what rounding has made of a KL that is too small says little.
    return min(max(math.sqrt(AIM / kl), 1e-3), 1e3) if kl > 0 else 1e3

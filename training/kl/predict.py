"""Predict the KL divergence that an update will cause, by one forward-mode derivative (docs/logra.md); measure it afterwards.

With p = softmax(z/T) at a generated token and u = dz/dalpha / T along the update, KL(p || p_alpha) is alpha² times half the
variance of u under p, up to alpha³. Axes: n tokens, V words.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad

from groundhop.errors import InputError
from groundhop.training.heads import inner
from groundhop.training.kl.direction import Direction
from groundhop.training.kl.lost import watched
from groundhop.training.kl.probe import Probe, logits_of, probing

_CHUNK = 64


class Sums(NamedTuple):
    """A sum of values over some generated tokens."""

    total: float
    tokens: int


@torch.no_grad()
def predict(
    model: nn.Module,
    direction: Direction,
    probes: Sequence[Probe],
    *,
    temperature: float = 1.0,
    kept: list[Tensor] | None = None,
    group: Any = None,
) -> float:
    """Mean over generated tokens, and over all processes of `group`, of half the variance of u: the KL in nats at alpha = 1.

    `kept` is given the logits of each response, for `realised`. Not finite when the step is not.
    Raises: StepError when the derivative does not come through the model; InputError when nothing is probed.
    """
    model = inner(model)

    def local() -> Sums:
        total, tokens = 0.0, 0
        with probing(model), forward_ad.dual_level(), direction.inject(model), watched(model) as watch:
            for logits in logits_of(model, probes):
                primal, tangent = forward_ad.unpack_dual(logits)
                if tangent is None or watch.broken:
                    raise watch.lost("no derivative comes out")
                total += float(half_variances(primal, tangent, temperature))
                tokens += len(primal)
                if kept is not None:
                    kept.append(primal.detach().float())
        return Sums(total, tokens)

    return mean_over_processes(local, model, group)


@torch.no_grad()
def realised(
    model: nn.Module,
    probes: Sequence[Probe],
    before: Sequence[Tensor],
    *,
    temperature: float = 1.0,
    group: Any = None,
) -> float:
    """Exact KL(policy before || policy now), nats, mean as in `predict`; `before` is what that kept for the same probes."""
    model = inner(model)

    def local() -> Sums:
        with probing(model):
            pairs = zip(before, logits_of(model, probes), strict=True)
            total = sum(float(divergences(old, new, temperature)) for old, new in pairs)
        return Sums(total, sum(map(len, before)))

    return mean_over_processes(local, model, group)


def half_variances(logits: Tensor, tangents: Tensor, temperature: float) -> Tensor:
    """Sum over n of half the variance of `tangents`/T under softmax(`logits`/T), both (n, V); a float64 scalar."""
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    for z, t in zip(logits.split(_CHUNK), tangents.split(_CHUNK), strict=True):
        p, u = (z.double() / temperature).softmax(-1), t.double() / temperature
        total += (p * (u - (p * u).sum(-1, keepdim=True)).square()).sum() / 2
    return total


def divergences(before: Tensor, after: Tensor, temperature: float) -> Tensor:
    """Sum over n of KL(softmax(`before`/T) || softmax(`after`/T)), nats, both (n, V); a float64 scalar."""
    total = torch.zeros((), dtype=torch.float64, device=before.device)
    for old, new in zip(before.split(_CHUNK), after.split(_CHUNK), strict=True):
        log_p, log_q = ((z.double() / temperature).log_softmax(-1) for z in (old, new))
        p = log_p.exp()
        # A word that was impossible adds nothing, even where both logarithms are infinite.
        total += torch.where(p > 0, p * (log_p - log_q), torch.zeros_like(p)).sum()
    return total


def mean_over_processes(sums: Callable[[], Sums], model: nn.Module, group: Any = None) -> float:
    """Mean over all processes of `group` (None: all there are); a process that fails makes it not-a-number for the others.

    Raises: InputError when no process has a token.
    """
    try:
        local = sums()
    except Exception:
        # The others wait for this process: they must hear that there is no prediction.
        _add_up(Sums(math.nan, 0), model, group)
        raise
    total, tokens = _add_up(local, model, group)
    if tokens == 0 and not math.isnan(total):
        raise InputError("the probes hold no generated token: nothing tells how far the update moves the policy")
    return total / tokens if tokens else math.nan


def _add_up(local: Sums, model: nn.Module, group: Any) -> Sums:
    if not (dist.is_available() and dist.is_initialized()):
        return local
    device = next(model.parameters()).device
    both = torch.tensor([local.total, local.tokens], dtype=torch.float64, device=device)
    dist.all_reduce(both, group=group)
    return Sums(float(both[0]), int(both[1]))

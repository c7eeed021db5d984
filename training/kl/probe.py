"""What the policy is probed on, and a model that stands still while it is probed."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from groundhop.errors import InputError
from groundhop.training.heads import projected_only_at

_ATTENTION = "_attn_implementation_internal"
_BARE_FORWARD = "_original_forward"
"""Where accelerate keeps the forward pass around which it put its autocast."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Some responses: rows b, tokens t. Every process must probe the same number of rows."""

    input_ids: Tensor
    """Shape (b, t)."""
    attention_mask: Tensor
    """Shape (b, t), 0 where a token is padding."""
    targets: Tensor
    """Shape (b, t), true at tokens that the policy generated; never in column 0, which nothing predicts."""

    def __post_init__(self) -> None:
        shapes = {tuple(part.shape) for part in (self.input_ids, self.attention_mask, self.targets)}
        if len(shapes) != 1 or self.targets.dim() != 2 or self.targets.dtype != torch.bool:
            raise InputError(f"need three tensors of one shape (b, t), targets boolean; got {sorted(shapes)}")
        if bool(self.targets[:, :1].any()):
            raise InputError("column 0 is marked as generated, but no token before it predicts it")


@contextmanager
def probing(model: nn.Module) -> Iterator[None]:
    """While the block runs, `model` drops nothing out, checkpoints nothing, attends by rules that have a JVP, and computes in its weights' type.

    Flash and other fused attention kernels have no forward-mode derivative. Under BF16 autocast two passes of the same policy are
    some 1e-5 nats apart, and most of a small step is rounded away. Everything is restored, also after an error.
    """
    modules = list(model.modules())
    configs = {id(one.config): one.config for one in modules if hasattr(getattr(one, "config", None), _ATTENTION)}
    kept: list[tuple[Any, str, Any]] = [
        (config, _ATTENTION, getattr(config, _ATTENTION)) for config in configs.values()
    ]
    kept += [(one, "training", one.training) for one in modules]
    kept += [(one, "gradient_checkpointing", True) for one in modules if getattr(one, "gradient_checkpointing", False)]
    if bare := vars(model).get(_BARE_FORWARD):
        kept.append((model, "forward", model.forward))
    instead = {_ATTENTION: "eager", "forward": bare}
    try:
        for thing, name, _ in kept:
            setattr(thing, name, instead.get(name, False))
        with sdpa_kernel(SDPBackend.MATH), torch.autocast(_device(model), enabled=False):
            yield
    finally:
        for thing, name, value in kept:
            setattr(thing, name, value)


def _device(model: nn.Module) -> str:
    return next((weight.device.type for weight in model.parameters()), "cpu")


def logits_of(model: nn.Module, probes: Iterable[Probe]) -> Iterator[Tensor]:
    """Logits of shape (generated tokens, vocabulary) of each response; one pass a row, to hold one row's at a time."""
    for probe in probes:
        predicting = functional.pad(probe.targets[:, 1:], (0, 1))
        for row in range(len(predicting)):
            at = slice(row, row + 1)
            with projected_only_at(model, predicting[at]):
                outputs = model(input_ids=probe.input_ids[at], attention_mask=probe.attention_mask[at], use_cache=False)
            yield outputs.logits

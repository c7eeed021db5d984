"""Collect sketches S = G Aᵀ of weight gradients during the backward pass, so that no dense gradient stays (docs/logra.md).

Two ways. "activation": an `nn.Linear` with a frozen weight projects its input x to x Aᵀ in the forward pass and adds (dL/dy)ᵀ (x Aᵀ) in the
backward pass; neither x nor G is kept. "gradient": each weight's finished gradient is projected and freed on the spot.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

from groundhop.errors import ConfigError, StepError
from groundhop.training.logra.draw import draw_signs
from groundhop.training.logra.ranks import here, rows_of
from groundhop.training.logra.settings import Capture

# Modules that FSDP1, torch.compile and activation checkpointing put around others.
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})


@dataclass(slots=True, eq=False)
class Target:
    """One weight that is trained by sketch."""

    name: str
    """Name of the weight in the checkpoint."""
    modules: Mapping[str, nn.Module]
    """The modules that use it, by name in the model; more than one when they share it."""
    rows: int
    columns: int
    sketch: Tensor
    """Float32 (rows, rank), a view of `Sketches.flat`."""
    signs: Tensor
    """int8 (rank, columns)."""

    @property
    def weight(self) -> Tensor:
        """The weight as the model holds it at the moment: FSDP2 puts another tensor there."""
        return next(iter(self.modules.values())).weight  # type: ignore[return-value]


class Sketches:
    """The sketches of all targets in one buffer, and the signs they are taken with."""

    def __init__(self, model: nn.Module, names: Sequence[str], rank: int, capture: Capture) -> None:
        """Watch the targets of `model` and, to capture activations, freeze their weights.

        Raises: ConfigError when a target cannot be captured.
        """
        self.targets = find_targets(model, names, capture)
        self.rank = rank
        self.capture = capture
        self.device = self.targets[0].weight.device
        self.flat = torch.zeros(sum(target.rows for target in self.targets) * rank, device=self.device)
        self.seeds: dict[str, int] = {}
        self.held = False
        """While an update made of the sketches waits: nothing may be added."""
        self._watched: dict[str, Tensor] = {}
        # Makes the output of a target need a gradient also where everything before it is frozen.
        self._anchor = torch.zeros((), requires_grad=True)
        self._share()
        if capture == "gradient":
            _hide_from_ddp(model, self.targets)
        watch = self._watch_module if capture == "activation" else self._watch_weight
        self._handles = [handle for target in self.targets for handle in watch(target)]

    def close(self) -> None:
        """Stop watching; weights that were frozen stay frozen."""
        for handle in self._handles:
            handle.remove()

    def check(self) -> None:
        """Make sure that the weights are still those whose gradients are captured.

        Raises: ConfigError when something has replaced them.
        """
        for target in self.targets:
            if self._watched.get(target.name, target.weight) is not target.weight:
                raise ConfigError(f"{target.name} was replaced after LoGRA was made: need LoGRA after fully_shard")

    def clear(self) -> None:
        """Forget what was collected."""
        self.flat.zero_()
        self.held = False

    def draw(self, seeds: Mapping[str, int]) -> None:
        """Draw the signs of each target from its seed, where they changed, and forget what was collected with others."""
        stale = [
            target
            for target in self.targets
            if self.seeds.get(target.name) != seeds[target.name] or target.signs.device != self.device
        ]
        if stale:
            wanted, columns = [seeds[target.name] for target in stale], [target.columns for target in stale]
            for target, signs in zip(stale, draw_signs(wanted, self.rank, columns, self.device), strict=True):
                target.signs = signs
        self.seeds = dict(seeds)
        self.clear()

    def move(self, device: torch.device) -> None:
        """Follow the model to another device; what was collected is forgotten."""
        self.device, self.flat = device, torch.zeros_like(self.flat, device=device)
        self._share()
        self.draw(self.seeds)

    def project(self, target: Target, x: Tensor, dtype: torch.dtype) -> Tensor:
        """X Aᵀ sqrt(rank) of shape (tokens, rank), computed in the layer's own type: ±1 is exact in all of them."""
        return x.detach().reshape(-1, target.columns).to(dtype) @ target.signs.to(dtype).T

    def add(self, target: Target, gradient: Tensor, projected: Tensor) -> None:
        """Add Hᵀ (X Aᵀ); `gradient` H is (..., rows), `projected` (tokens, rank), both of one type."""
        self._refuse_held()
        flat = gradient.reshape(-1, target.rows)
        if flat.dtype == torch.float32:
            target.sketch.addmm_(flat.T, projected, alpha=self.rank**-0.5)
        else:
            target.sketch.add_(flat.T @ projected, alpha=self.rank**-0.5)

    def _refuse_held(self) -> None:
        if self.held:
            raise StepError(
                "a backward pass came between an update's proposal and its end: need apply or abandon first"
            )

    def _share(self) -> None:
        start = 0
        for target in self.targets:
            stop = start + target.rows * self.rank
            target.sketch = self.flat[start:stop].view(target.rows, self.rank)
            start = stop

    def _watch_module(self, target: Target) -> list[Any]:
        target.weight.requires_grad_(False)

        def hook(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> Tensor | None:
            if not torch.is_grad_enabled():
                return None
            if output.dtype == torch.float16:
                raise ConfigError(
                    f"{target.name}: float16's loss scale does not reach sketches, need float32 or bfloat16"
                )
            if output.device != self.device:
                self.move(output.device)
            x = arguments[0] if arguments else named["input"]
            with torch.no_grad():
                projected = self.project(target, x, output.dtype)
            watched: Tensor = _Collect.apply(output, self._anchor, projected, self, target)
            return watched

        return [module.register_forward_hook(hook, with_kwargs=True) for module in target.modules.values()]

    def _watch_weight(self, target: Target) -> list[Any]:
        watched = target.weight.requires_grad_(True)
        self._watched[target.name] = watched

        def hook(weight: Tensor) -> None:
            self._refuse_held()
            assert weight.grad is not None
            gradient, rows = here(weight.grad), rows_of(weight)
            if gradient.device != self.device:
                self.move(gradient.device)
            sketch = target.sketch[rows.start : rows.stop]
            sketch.addmm_(gradient.float(), target.signs.float().T, alpha=self.rank**-0.5)
            weight.grad = None

        return [watched.register_post_accumulate_grad_hook(hook)]


class _Collect(torch.autograd.Function):
    """The identity, whose backward pass adds to a sketch."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, anchor: Tensor, projected: Tensor, sketches: Sketches, target: Target
    ) -> Tensor:
        """Keep x Aᵀ through autograd, so that checkpointing frees it and computes it again without a second backward pass."""
        ctx.save_for_backward(projected)
        ctx.sketches, ctx.target, ctx.seed = sketches, target, sketches.seeds[target.name]
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Add to the sketch and pass the gradient on."""
        (gradient,), (projected,) = gradients, ctx.saved_tensors
        if ctx.seed != ctx.sketches.seeds[ctx.target.name]:
            raise StepError(f"{ctx.target.name}: a backward pass through a forward pass of an earlier step")
        ctx.sketches.add(ctx.target, gradient, projected)
        return gradient, None, None, None, None


def find_targets(model: nn.Module, names: Sequence[str], capture: Capture) -> list[Target]:
    """The weights of all modules whose last name is one of `names`, in the model's order, without buffers.

    Raises: ConfigError when there are none, when one is not float32 with two axes, or when its gradient cannot be captured.
    """
    empty, found = torch.empty(0), dict[int, Target]()
    for name, module in model.named_modules():
        if canonical_name(name).rpartition(".")[2] not in names:
            continue
        weight = getattr(module, "weight", None)
        label = canonical_name(f"{name}.weight")
        if not isinstance(weight, nn.Parameter) or weight.dim() != 2 or weight.dtype != torch.float32:
            raise ConfigError(f"{label}: need a float32 weight with two axes, got {_described(weight)}")
        if capture == "activation" and type(module).forward is not nn.Linear.forward:
            raise ConfigError(f'{label}: {type(module).__name__} is no plain nn.Linear, need capture = "gradient"')
        rows_of(weight)
        target = found.setdefault(id(weight), Target(label, {}, len(weight), weight.shape[1], empty, empty))
        target.modules = {**target.modules, name: module}
    if not found:
        raise ConfigError(f"no module of the model is named one of {tuple(names)}")
    if capture == "activation":
        _refuse_shared(model, found)
    if len({target.weight.device for target in found.values()}) > 1:
        raise ConfigError("the target weights lie on several devices, need one")
    return list(found.values())


def canonical_name(name: str) -> str:
    """A module's or weight's name without the wrappers of FSDP, DDP, compile and checkpointing."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(parts[1:] if parts[0] == "module" else parts)


def _refuse_shared(model: nn.Module, found: Mapping[int, Target]) -> None:
    for name, module in model.named_modules():
        for weight in module._parameters.values():
            target = found.get(id(weight))
            if target is not None and name not in target.modules:
                raise ConfigError(
                    f'{target.name} is shared with {name}, whose part would be lost: need capture = "gradient"'
                )


def _hide_from_ddp(model: nn.Module, targets: Sequence[Target]) -> None:
    # DDP would average gradients that are no longer there.
    if isinstance(model, DistributedDataParallel):
        raise ConfigError('need the model itself with capture = "gradient", before DDP wraps it')
    names = [f"{module}.weight" for target in targets for module in target.modules]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


def _described(weight: object) -> str:
    return f"{weight.dtype} {tuple(weight.shape)}" if isinstance(weight, Tensor) else "none"

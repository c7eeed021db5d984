"""The direction of an update, and how a forward pass carries its derivative along it (docs/logra.md).

Axes: d rows and k columns of a weight, r the rank of its step.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from groundhop.errors import InputError

Uses = list[tuple[nn.Module, str]]
Replace = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LowRank:
    """The step of one weight W of shape (d, k): alpha of it is `W - alpha * factor @ projection`."""

    factor: Tensor
    """Shape (d, r)."""
    projection: Tensor
    """Shape (r, k), of any type, for example ±1 in int8."""


class Direction(Protocol):
    """Where an update would move a model's weights; alpha of it is subtracted."""

    @property
    def is_zero(self) -> bool:
        """Whether it moves nothing. A step that is not a number is not zero."""
        ...

    def inject(self, model: nn.Module) -> AbstractContextManager[None]:
        """While the block runs, inside a forward-AD level, `model(...)` carries its derivative by alpha at alpha = 0.

        The weights stay as they are. Raises: InputError when the model has no such weight.
        """
        ...

    def shift(self, model: nn.Module, alpha: float) -> AbstractContextManager[None]:
        """While the block runs, `model(...)` computes as if `alpha` of the step were taken; the weights stay as they are."""
        ...

    def dense(self, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Each weight that moves, once, with its step in full, one at a time."""
        ...


class LowRankDirection:
    """Steps of rank r for weights of modules, by module name; where the module is a plain `nn.Linear`, no (d, k) tensor is made."""

    def __init__(self, parts: Mapping[str, LowRank]) -> None:
        self._parts = dict(parts)

    @property
    def is_zero(self) -> bool:
        """Whether it moves nothing."""
        return not any(bool(part.factor.any()) for part in self._parts.values())

    @contextmanager
    def inject(self, model: nn.Module) -> Iterator[None]:
        """Let all layers at once add their part to the tangent; what lies below reaches them through their own JVP."""
        with self._hooked(model, _add_tangent, _dual):
            yield

    @contextmanager
    def shift(self, model: nn.Module, alpha: float) -> Iterator[None]:
        """Let all layers add `alpha` of their part to what they put out."""
        with self._hooked(model, partial(_add_share, alpha), partial(_moved, alpha)):
            yield

    @contextmanager
    def _hooked(self, model: nn.Module, add: Callable[..., Tensor], replace: Replace) -> Iterator[None]:
        """`add` as forward hook where a weight is used by plain linear layers alone, `replace` for it elsewhere."""
        uses = uses_of(model)
        full: list[tuple[Tensor, Tensor]] = []
        with ExitStack() as stack:
            for weight, part in self.weights(model):
                users = uses[id(weight)]
                if all(_is_plain_linear(module, name) for module, name in users):
                    for module, _ in users:
                        stack.callback(module.register_forward_hook(partial(add, part)).remove)
                else:
                    full.append((weight, _multiply(part)))
            stack.enter_context(_placed(uses, full, replace))
            yield

    def dense(self, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Each weight with `factor @ projection`."""
        for weight, part in self.weights(model):
            yield weight, _multiply(part)

    def weights(self, model: nn.Module) -> Iterator[tuple[Tensor, LowRank]]:
        """Each weight once with its part: tied modules may be named together, with the same part."""
        modules = dict(model.named_modules())
        seen: dict[int, LowRank] = {}
        for name, part in self._parts.items():
            weight = getattr(modules.get(name), "weight", None)
            wanted = (part.factor.shape[0], part.projection.shape[1])
            if weight is None or tuple(weight.shape) != wanted:
                raise InputError(f"need a weight of shape {wanted} in module {name!r}, got {_shape_of(weight)}")
            if id(weight) not in seen:
                seen[id(weight)] = part
                yield weight, part
            elif seen[id(weight)].factor is not part.factor:
                raise InputError(f"module {name!r} shares its weight with another one that has another step")


class DenseDirection:
    """Full steps, by parameter name."""

    def __init__(self, parts: Mapping[str, Tensor]) -> None:
        self._parts = dict(parts)

    @property
    def is_zero(self) -> bool:
        """Whether it moves nothing."""
        return not any(bool(step.any()) for step in self._parts.values())

    @contextmanager
    def inject(self, model: nn.Module) -> Iterator[None]:
        """Put dual numbers in the place of the parameters, wherever one is used."""
        with _placed(uses_of(model), self.dense(model), _dual):
            yield

    @contextmanager
    def shift(self, model: nn.Module, alpha: float) -> Iterator[None]:
        """Put moved copies in the place of the parameters."""
        with _placed(uses_of(model), self.dense(model), partial(_moved, alpha)):
            yield

    def dense(self, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter with its step."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        seen: set[int] = set()
        for name, step in self._parts.items():
            weight = parameters.get(name)
            if weight is None or weight.shape != step.shape:
                wanted = tuple(step.shape)
                raise InputError(f"need a parameter {name!r} of shape {wanted}, got {_shape_of(weight)}")
            if id(weight) in seen:
                raise InputError(f"parameter {name!r} is tied to another one that has a step")
            seen.add(id(weight))
            yield weight, step


class JointDirection:
    """Low-rank steps for some weights and full ones for others, all in one pass."""

    def __init__(self, low: LowRankDirection, dense: DenseDirection) -> None:
        self._low, self._dense = low, dense

    @property
    def is_zero(self) -> bool:
        """Whether neither moves anything."""
        return self._low.is_zero and self._dense.is_zero

    @contextmanager
    def inject(self, model: nn.Module) -> Iterator[None]:
        """Inject both. Raises: InputError also when a weight has two steps."""
        self._refuse_overlap(model)
        # Low rank first: it looks for weights where the dual numbers of the other will stand.
        with self._low.inject(model), self._dense.inject(model):
            yield

    @contextmanager
    def shift(self, model: nn.Module, alpha: float) -> Iterator[None]:
        """Shift by both. Raises: InputError also when a weight has two steps."""
        self._refuse_overlap(model)
        with self._low.shift(model, alpha), self._dense.shift(model, alpha):
            yield

    def dense(self, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """The weights of both."""
        yield from self._low.dense(model)
        yield from self._dense.dense(model)

    def _refuse_overlap(self, model: nn.Module) -> None:
        low = {id(weight) for weight, _ in self._low.weights(model)}
        if any(id(weight) in low for weight, _ in self._dense.dense(model)):
            raise InputError("a weight has a low-rank step and a full one: need one of them")


def uses_of(model: nn.Module) -> dict[int, Uses]:
    """By a parameter's id, every module that holds it and under which name: a tied one has several."""
    uses: dict[int, Uses] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                uses.setdefault(id(weight), []).append((module, name))
    return uses


@contextmanager
def _placed(uses: Mapping[int, Uses], steps: Iterable[tuple[Tensor, Tensor]], replace: Replace) -> Iterator[None]:
    """Put `replace(weight, step)` wherever a weight is used, and the weights back afterwards."""
    placed: list[tuple[nn.Module, str, Tensor]] = []
    try:
        for weight, step in steps:
            if hasattr(weight, "full_tensor"):
                raise InputError("a sharded parameter (DTensor) has no full step: need a low-rank one or plain weights")
            instead = replace(weight.detach(), step.to(weight))
            for module, name in uses[id(weight)]:
                # Not setattr: it refuses to put a plain tensor where a parameter was.
                module._parameters[name] = instead  # type: ignore[assignment]
                placed.append((module, name, weight))
        yield
    finally:
        for module, name, weight in placed:
            module._parameters[name] = weight  # type: ignore[assignment]


def _dual(weight: Tensor, step: Tensor) -> Tensor:
    return forward_ad.make_dual(weight, step.neg())  # type: ignore[no-any-return]


def _moved(alpha: float, weight: Tensor, step: Tensor) -> Tensor:
    return weight - alpha * step


def _add_tangent(part: LowRank, module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Forward hook of a linear layer: its own weight's share on top of what came through x."""
    primal, tangent = forward_ad.unpack_dual(output)
    ours = _share(part, forward_ad.unpack_dual(arguments[0]).primal).to(primal.dtype)
    return forward_ad.make_dual(primal, ours if tangent is None else tangent + ours)  # type: ignore[no-any-return]


def _add_share(alpha: float, part: LowRank, module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Forward hook of a linear layer whose weight stands `alpha` along its step."""
    return output + (alpha * _share(part, arguments[0])).to(output.dtype)


def _share(part: LowRank, x: Tensor) -> Tensor:
    """-(x Aᵀ) Uᵀ: what a whole step adds to y = x Wᵀ."""
    wide = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        inner = x.to(wide) @ part.projection.to(x.device, wide).T
        return (inner @ part.factor.to(x.device, wide).T).neg()


def _is_plain_linear(module: nn.Module, name: str) -> bool:
    """Whether the weight acts as y = x Wᵀ and in no other way."""
    return name == "weight" and type(module).forward is nn.Linear.forward and "forward" not in vars(module)


def _multiply(part: LowRank) -> Tensor:
    wide = torch.promote_types(part.factor.dtype, torch.float32)
    return part.factor.to(wide) @ part.projection.to(part.factor.device, wide)


def _shape_of(weight: Tensor | None) -> str:
    return "none" if weight is None else str(tuple(weight.shape))

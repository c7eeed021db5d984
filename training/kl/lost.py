"""Notice where a forward-mode derivative gets lost in a model: a prediction without part of it would be too small."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd import forward_ad

from groundhop.errors import StepError


class Watch:
    """What the modules of a model did with derivatives."""

    def __init__(self) -> None:
        self.broken = False
        """Whether a module with weights took a derivative in and gave none out. One without weights may have had no use for it, as
        rotary embeddings take hidden states for their type alone."""
        self._entered: list[str] = []
        self._losing: list[str] = []

    def enter(self, name: str, *_: Any) -> None:
        """Forward pre-hook."""
        self._entered.append(name)

    def leave(self, name: str, module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
        """Forward hook."""
        self._entered.pop()
        given = list(_floats(output))
        if given and _carries(_floats((arguments, keywords))) and not _carries(given):
            self._losing.append(name)
            self.broken |= next(module.parameters(), None) is not None

    def lost(self, reason: str, *, inside: bool = False) -> StepError:
        """The error, with the module's name; `inside` when it is the one that runs."""
        names = self._entered[-1:] if inside else self._losing
        innermost = [name for name in names if name and not any(other.startswith(f"{name}.") for other in names)]
        place = f"module {innermost[-1]!r}" if innermost else "the model"
        return StepError(f"the JVP is lost in {place}: {reason}; finite differences do without it")


@contextmanager
def watched(model: nn.Module) -> Iterator[Watch]:
    """Watch `model` while the block runs, inside a forward-AD level. Enter it last: other hooks may add to derivatives.

    Raises: StepError in place of torch's NotImplementedError when an operation has no forward-mode rule.
    """
    watch = Watch()
    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(partial(watch.enter, name)).remove)
            stack.callback(module.register_forward_hook(partial(watch.leave, name), with_kwargs=True).remove)
        try:
            yield watch
        except NotImplementedError as error:
            if "forward" not in str(error):
                raise
            raise watch.lost(str(error).partition("\n")[0].rstrip("."), inside=True) from error


def _carries(tensors: Any) -> bool:
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def _floats(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict | tuple | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _floats(part)

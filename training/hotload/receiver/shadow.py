"""Run an engine's own loader on copies of the model's storages: what it would write, without writing it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from groundhop.training.hotload.bits import Bits, TensorSpec
from groundhop.training.hotload.receiver.placement import tensor_of
from groundhop.training.hotload.receiver.recorder import Box, Loader, answer_of, box_of, flat_bytes, key_of, written_by


class Shadow(TorchDispatchMode):
    """Runs a loader on copies of the model's storages: the live ones are read where they were not written, never written."""

    def __init__(self, targets: Mapping[int, int]) -> None:
        """`targets` numbers the model's storages by their keys."""
        super().__init__()
        self.copies: dict[int, Any] = {}
        """Bytes of each storage that was written, by its number."""
        self.places: list[tuple[int, Box]] = []
        self._targets = targets

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = written_by(func, args, kwargs)
        mine = [tensor for tensor in written if key_of(tensor) in self._targets]
        for tensor in mine:
            number = self._targets[key_of(tensor)]
            self.places.append((number, box_of(tensor)))
            if number not in self.copies:
                self.copies[number] = flat_bytes(tensor).clone()
        if not self.copies:
            return func(*args, **kwargs)
        result = func(*self._moved(args), **self._moved(kwargs))
        return answer_of(func, written) if mine else result

    def _moved(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            number = self._targets.get(key_of(value))
            if number is None or number not in self.copies:
                return value
            size = value.dtype.itemsize
            copy = self.copies[number]
            return box_of(value).of(copy[: copy.numel() // size * size].view(value.dtype))
        if isinstance(value, dict):
            return {key: self._moved(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._moved(item) for item in value)
        return value


def shadow_load(load: Loader, targets: Mapping[int, int], tensors: Mapping[str, tuple[TensorSpec, Bits]]) -> Shadow:
    """Run the loader over whole tensors without touching the live model. Raises: whatever the loader raises."""
    shadow = Shadow(targets)
    with torch.no_grad(), shadow:
        load([(name, tensor_of(spec, bits)) for name, (spec, bits) in tensors.items()])
    return shadow

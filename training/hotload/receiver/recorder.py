"""Watch an engine's own loader: which elements of which checkpoint tensor go where, without writing anything.

The loader runs under a dispatch mode, so that every way to write (`copy_`, slice assignment, fused and custom operators)
is seen; Python-level patches of `Tensor.copy_` miss some of them. Writes to the model's storages are noted and left out:
the live model stays as it is, whatever the loader does.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from groundhop.errors import InputError, PlacementError

Loader = Callable[[Iterable[tuple[str, Any]]], Any]
"""A model's `load_weights`."""
FILLS = ("fill_", "zero_")


@dataclass(frozen=True, slots=True)
class Box:
    """A strided block of a storage, in elements of `dtype`."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any

    @property
    def span(self) -> tuple[int, int]:
        """First byte, and the byte after the last."""
        reach = sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        return self.offset * self.dtype.itemsize, (self.offset + reach + 1) * self.dtype.itemsize

    def of(self, flat: Any) -> Any:
        """The block as a view of `flat`, which begins where the storage begins and has the block's element size."""
        return torch.as_strided(flat, self.sizes, self.strides, self.offset)


@dataclass(frozen=True, slots=True)
class Copy:
    """One plain copy from a checkpoint tensor into the model."""

    name: str
    source: Box
    target: int
    """Number of the model's storage."""
    place: Box


@dataclass(frozen=True, slots=True)
class Write:
    """A write that is not a plain copy: computed values, a second stage, a constant."""

    operator: str
    names: frozenset[str]
    """Checkpoint tensors that its values were seen to come from; empty for constants."""
    target: int
    place: Box


@dataclass(slots=True)
class Recording:
    """What a loader did."""

    copies: list[Copy] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    fills: list[Write] = field(default_factory=list)
    """Constants, with the tensor at hand: padding, or a tensor of one element that went through Python."""
    consumed: set[str] = field(default_factory=set)
    """Tensors whose values were read otherwise than by a plain copy."""


def box_of(tensor: Any) -> Box:
    """Where a tensor lies in its storage."""
    return Box(tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def key_of(tensor: Any) -> int:
    """What tells its storage from others that live at the same time."""
    return int(tensor.untyped_storage()._cdata)


def record(load: Loader, tensors: Iterable[tuple[str, Any]], targets: Mapping[int, int]) -> Recording:
    """Run `load` over `tensors`, each in a storage of its own; `targets` numbers the model's storages by their keys.

    Nothing is written to a target. Raises: PlacementError with the tensor at hand when the loader fails.
    """
    mode = _Recorder(targets)
    try:
        with torch.no_grad(), mode:
            load(mode.stream(tensors))
    except Exception as error:
        raise PlacementError(
            f"its loader cannot take {mode.present or 'anything'} on the live model: {type(error).__name__}: {error}"
        ) from error
    return mode.recording


class _Recorder(TorchDispatchMode):
    def __init__(self, targets: Mapping[int, int]) -> None:
        super().__init__()
        self.recording = Recording()
        self._targets = targets
        self._sources: dict[int, tuple[str, Any]] = {}
        self._taint: dict[int, tuple[StorageWeakRef, frozenset[str]]] = {}
        self._written: dict[int, list[tuple[frozenset[str], tuple[int, int]]]] = {}
        self.present = ""
        """The tensor at hand."""

    def stream(self, tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        # Kept to the end: a loader may collect tensors and write them later.
        for name, tensor in tensors:
            if key_of(tensor) in self._sources and tensor.numel():
                raise InputError(f"{name} shares memory with {self._sources[key_of(tensor)][0]}")
            self._sources[key_of(tensor)] = (name, tensor)
            self.present = name
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = written_by(func, args, kwargs)
        if any(key_of(tensor) in self._sources for tensor in written):
            raise PlacementError("its loader changes the tensors that it is given")
        if any(key_of(tensor) in self._targets for tensor in written):
            for tensor in written:
                self._note(func, tensor, args, kwargs)
            return answer_of(func, written)
        names = self._names_in(args, kwargs)
        result = func(*args, **kwargs)
        if names:
            self._follow(func, names, [*written, *tensors_in(result)])
        return result

    def _note(self, func: Any, place: Any, args: Any, kwargs: Any) -> None:
        number = self._targets.get(key_of(place))
        if number is None:
            return
        operator, box = func._schema.name.rpartition(":")[2], box_of(place)
        source = args[1] if operator == "copy_" and isinstance(args[1], torch.Tensor) else None
        known = self._sources.get(key_of(source)) if source is not None else None
        if known and source is not None and source.shape == place.shape and source.dtype == known[1].dtype:
            self.recording.copies.append(Copy(known[0], box_of(source), number, box))
            self._written.setdefault(number, []).append((frozenset([known[0]]), box.span))
            return
        others = [*args, *kwargs.values()]
        names = self._names_in([value for value in others if value is not place], {})
        if operator in FILLS and not names:
            self.recording.fills.append(Write(operator, frozenset([self.present]), number, box))
            return
        names |= self._names_at(number, box.span)
        self.recording.writes.append(Write(operator, names, number, box))
        self._written.setdefault(number, []).append((names, box.span))

    def _follow(self, func: Any, names: frozenset[str], results: list[Any]) -> None:
        """Remember whose values a fresh storage holds."""
        held = (self._sources, self._targets)
        fresh = [tensor for tensor in results if not any(key_of(tensor) in keys for keys in held)]
        if func._schema.name.endswith("_local_scalar_dense") or fresh:
            self.recording.consumed |= names
        for tensor in fresh:
            key = key_of(tensor)
            _, before = self._taint.get(key, (None, frozenset()))
            self._taint[key] = (StorageWeakRef(tensor.untyped_storage()), before | names)

    def _names_in(self, args: Any, kwargs: Any) -> frozenset[str]:
        names: frozenset[str] = frozenset()
        for tensor in tensors_in([args, kwargs]):
            key = key_of(tensor)
            if key in self._sources:
                names |= {self._sources[key][0]}
            elif key in self._taint:
                names |= self._taint[key][1]
            elif key in self._targets:
                names |= self._names_at(self._targets[key], box_of(tensor).span)
        return names

    def _names_at(self, number: int, span: tuple[int, int]) -> frozenset[str]:
        found = [n for n, at in self._written.get(number, ()) if at[0] < span[1] and span[0] < at[1]]
        return frozenset().union(*found)


def flat_bytes(tensor: Any) -> Any:
    """The whole storage of a tensor as bytes; shares its memory."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))


def written_by(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The tensors among an operator's arguments that its schema says it writes."""
    found: list[Any] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += tensors_in(value)
    return found


def answer_of(func: Any, written: list[Any]) -> Any:
    """What an operator that writes in place returns: what it was given to write."""
    returns = len(func._schema.returns)
    return None if returns == 0 else written[0] if returns == 1 else tuple(written)


def tensors_in(value: Any) -> list[Any]:
    """All tensors in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, list | tuple) else []

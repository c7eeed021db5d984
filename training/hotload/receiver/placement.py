"""Canonical coordinates to a model's storages: the exact map of a strided block, and the plan that holds all of them."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from groundhop.training.hotload.bits import Bits, TensorSpec

Kind = Literal["XOR", "CAST", "OPAQUE", "SKIP"]
"""Equal bits; equal after one `.to()`; only the loader knows; not held here (`placement.md` 1.4)."""

DTYPES: Mapping[str, Any] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "I16": torch.int16, "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32,
    "F32": torch.float32, "I64": torch.int64, "F64": torch.float64, "C64": torch.complex64,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
}  # fmt: skip
UNITS: Mapping[int, Any] = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Torch integers of a unit's size on which bits are moved, compared, XORed and added modulo their range."""


class Moved(NamedTuple):
    """Which of some positions lie in a row, and where in the storage."""

    chosen: Any
    """Indices into the positions, or a slice of them."""
    places: Any
    """Indices into the storage, or a slice of it; in units."""


@dataclass(frozen=True, slots=True)
class Row:
    """A block of a canonical tensor and the block of a storage that holds it, in units of the canonical bits.

    Axes are sorted by canonical stride, descending, and merged where both sides are contiguous; a canonical position has at
    most one place.
    """

    target: int
    """Number of the storage."""
    source_offset: int
    place_offset: int
    sizes: tuple[int, ...]
    source_strides: tuple[int, ...]
    place_strides: tuple[int, ...]
    dtype: str
    """Type of the elements in the storage; that of the canonical tensor, or what it is cast to."""

    @property
    def size(self) -> int:
        """Units in the block."""
        return prod(self.sizes)

    @property
    def source_box(self) -> tuple[Any, ...]:
        """What tells blocks of one canonical tensor apart."""
        return self.source_offset, self.sizes, self.source_strides

    @property
    def straight(self) -> bool:
        """Whether both sides are one contiguous run."""
        return self.source_strides == self.place_strides == (1,)

    @property
    def source_end(self) -> int:
        """The canonical position after the last."""
        return self.source_offset + 1 + sum((n - 1) * s for n, s in zip(self.sizes, self.source_strides, strict=True))

    def find(self, positions: Any) -> Moved:
        """Map increasing canonical positions (int64 tensor) to places; those outside of the block are left out.

        Exact for every block, also where a narrowed width does not divide the parent's: the remainder goes down the axes.
        """
        bounds = torch.tensor([self.source_offset, self.source_end], device=positions.device)
        low, high = (int(bound) for bound in torch.searchsorted(positions, bounds))
        rest = positions[low:high] - self.source_offset
        if self.straight:
            return Moved(slice(low, high), rest + self.place_offset)
        places = torch.full_like(rest, self.place_offset)
        inside = torch.ones_like(rest, dtype=torch.bool)
        for size, stride, step in zip(self.sizes, self.source_strides, self.place_strides, strict=True):
            index = rest // stride
            inside &= index < size
            rest = rest - index * stride
            places += index * step
        inside &= rest == 0
        return Moved(torch.nonzero(inside).reshape(-1) + low, places[inside])

    def find_run(self, start: int, stop: int, device: Any) -> Moved:
        """Map the canonical positions from `start` to `stop`."""
        if self.straight:
            low, high = max(start, self.source_offset), min(stop, self.source_end)
            high = max(low, high)
            shift = self.place_offset - self.source_offset
            return Moved(slice(low - start, high - start), slice(low + shift, high + shift))
        return self.find(torch.arange(start, stop, dtype=torch.int64, device=device))

    def read(self, flat: Any) -> Any:
        """The block's units in canonical order, one axis; a view where the places are one run."""
        return torch.as_strided(flat, self.sizes, self.place_strides, self.place_offset).reshape(-1)

    def positions(self, start: int, stop: int) -> NDArray[np.int64]:
        """Canonical positions of the block's units `start` to `stop` in the order of `read`."""
        rest = np.arange(start, stop, dtype=np.int64)
        found = np.full_like(rest, self.source_offset)
        inner = self.size
        for size, stride in zip(self.sizes, self.source_strides, strict=True):
            inner //= size
            found += rest // inner * stride
            rest %= inner
        return found


def make_row(
    target: int,
    sizes: tuple[int, ...],
    source: tuple[int, tuple[int, ...]],
    place: tuple[int, tuple[int, ...]],
    dtype: str,
    units: int = 1,
) -> Row | None:
    """A row from (offset, strides) on both sides, in elements of `units` units each.

    None for a block that names a canonical or a stored unit twice, and for an empty one.
    """
    axes = [(n, s * units, d * units) for n, s, d in zip(sizes, source[1], place[1], strict=True) if n != 1]
    axes += [(units, 1, 1)] if units > 1 else []
    axes.sort(key=lambda axis: -axis[1])
    if prod(sizes) == 0 or not _apart([(n, s) for n, s, _ in axes]) or not _apart([(n, d) for n, _, d in axes]):
        return None
    merged: list[tuple[int, int, int]] = []
    for size, stride, step in axes:
        if merged and merged[-1][1:] == (size * stride, size * step):
            size *= merged.pop()[0]
        merged.append((size, stride, step))
    sizes, strides, steps = zip(*(merged or [(1, 1, 1)]), strict=True)
    return Row(target, source[0] * units, place[0] * units, sizes, strides, steps, dtype)


def _apart(axes: list[tuple[int, int]]) -> bool:
    """Whether no two indices of a block fall on one element, seen axis by axis."""
    reach = 0
    for size, stride in sorted(axes, key=lambda axis: axis[1]):
        if stride <= reach:
            return False
        reach += (size - 1) * stride
    return True


@dataclass(frozen=True, slots=True)
class Placed:
    """One canonical tensor on this rank."""

    spec: TensorSpec
    kind: Kind
    rows: tuple[Row, ...] = ()
    """Every place that takes its bits; none for OPAQUE and SKIP."""
    parts: tuple[int, ...] = ()
    """Indices of the rows whose canonical blocks are different: what the tensor's bits are read from."""
    invertible: bool = True
    """Whether canonical bits can be read back from the places."""
    whole: bool = False
    """Whether this rank holds every element."""
    alias: str = ""
    """For SKIP: the tensor that it shares its storage with, so that both must stay equal."""
    group: int = -1
    """For OPAQUE: tensors of one group are loaded together."""

    @property
    def kept(self) -> bool:
        """Whether its canonical bits are kept beside the model, because the model does not hold them."""
        return self.kind == "OPAQUE" or (self.kind == "CAST" and not self.invertible)


@dataclass(frozen=True, slots=True)
class Storage:
    """One allocation that parameters or buffers of the model lie in."""

    names: tuple[str, ...]
    """Qualified names of what lies in it."""
    flat: Any
    """All of it as bytes; keeps it alive."""

    def units(self, itemsize: int) -> Any:
        """All of it as integers of that size."""
        return self.flat[: self.flat.numel() // itemsize * itemsize].view(UNITS[itemsize])


@dataclass(frozen=True, slots=True)
class Plan:
    """Where every canonical tensor lies on this rank. A plan is never changed: another layout needs another certificate."""

    tensors: Mapping[str, Placed]
    storages: tuple[Storage, ...]
    guard: str
    """Digest of every parameter's and buffer's address, shape, strides and type."""
    layout_signature: str
    """The same without addresses: equal for ranks whose storages could be copied one to one."""

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """The canonical tensors."""
        return {name: placed.spec for name, placed in self.tensors.items()}

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of all rows, classes and the layout."""
        rows = [
            [name, placed.kind, placed.alias, placed.group, [self._said(row) for row in placed.rows]]
            for name, placed in sorted(self.tensors.items())
        ]
        return hashlib.sha256(msgspec.json.encode([self.layout_signature, rows])).hexdigest()

    def _said(self, row: Row) -> list[Any]:
        places = [row.source_offset, row.place_offset, row.sizes, row.source_strides, row.place_strides, row.dtype]
        return [self.storages[row.target].names, *places]

    def groups(self) -> dict[int, list[str]]:
        """OPAQUE tensors by group."""
        found: dict[int, list[str]] = {}
        for name, placed in self.tensors.items():
            if placed.group >= 0:
                found.setdefault(placed.group, []).append(name)
        return found


def tensor_of(spec: TensorSpec, bits: Bits) -> Any:
    """A torch tensor that shares memory with `bits`, which must be writable."""
    return torch.from_numpy(bits.view(np.uint8)).view(DTYPES[spec.dtype]).reshape(spec.shape)


def units_of(bits: Bits, device: Any) -> Any:
    """Bits as the torch integers of `UNITS`; shares memory on the CPU where `bits` are writable."""
    plain = bits if bits.flags.writeable else bits.copy()
    signed = {1: np.uint8, 2: np.int16, 4: np.int32}[bits.itemsize]
    return torch.from_numpy(plain.view(signed)).to(device)


def bits_from(units: Any) -> Bits:
    """The inverse of `units_of`."""
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[units.element_size()]
    found: Bits = units.cpu().numpy().view(unsigned)
    return found


def cast(units: Any, found: str, wanted: str) -> Any:
    """Elements of type `found` as the engine's own `.to()` makes them `wanted`; both as units."""
    made = units.view(DTYPES[found]).to(DTYPES[wanted])
    return made.view(UNITS[made.element_size()])

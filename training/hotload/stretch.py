"""A stretch of a tensor's bits, wherever it lies: what the coder asks of it, and the answer for host memory.

`torch_codec.py` answers for tensors on a device, so that only changed elements leave it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from groundhop.training.hotload.bits import Bits
from groundhop.training.hotload.classes import Bounds, Field, Placed, Ranked, choose_bounds, place, rank_in_classes
from groundhop.training.hotload.kernels import compiled, fixed
from groundhop.training.hotload.locations import Ranks
from groundhop.training.hotload.masks import LANES, differ, first_one


class Moved(NamedTuple):
    """Elements to be sent, and what they are before and after; positions count from the start of their stretch."""

    positions: Ranks
    before: Bits
    after: Bits


class Stretch(Protocol):
    """Bits of at most CHUNK_ELEMENTS elements; positions count from their start."""

    @property
    def size(self) -> int:
        """Elements."""
        ...

    def all(self) -> Bits:
        """Every element, in host memory."""
        ...

    def at(self, positions: Ranks) -> Bits:
        """Those elements, in host memory."""
        ...

    def choose_bounds(self, before: Bits, field: Field) -> list[int]:
        """As `classes.choose_bounds`."""
        ...

    def rank(self, positions: Ranks, field: Field, bounds: Bounds) -> Ranked:
        """As `classes.rank_in_classes`."""
        ...

    def place(self, ranks: Sequence[Ranks], field: Field, bounds: Bounds) -> Placed | None:
        """As `classes.place`."""
        ...


@dataclass(frozen=True, slots=True)
class HostStretch:
    """Bits in host memory."""

    bits: Bits

    @property
    def size(self) -> int:
        """Elements."""
        return int(self.bits.size)

    def all(self) -> Bits:
        """Every element."""
        return self.bits

    def at(self, positions: Ranks) -> Bits:
        """Those elements."""
        return take(self.bits, positions)

    def choose_bounds(self, before: Bits, field: Field) -> list[int]:
        """As `classes.choose_bounds`."""
        return choose_bounds(self.bits, before, field)

    def rank(self, positions: Ranks, field: Field, bounds: Bounds) -> Ranked:
        """As `classes.rank_in_classes`."""
        return rank_in_classes(self.bits, positions, field, bounds)

    def place(self, ranks: Sequence[Ranks], field: Field, bounds: Bounds) -> Placed | None:
        """As `classes.place`."""
        return place(self.bits, ranks, field, bounds)


def find_moved(old: Bits, new: Bits) -> Moved:
    """The elements in which two arrays of one type and size differ: one pass over both."""
    whole = old.size // LANES * LANES
    positions, before, after = _find(fixed(np.ascontiguousarray(old[:whole])), fixed(np.ascontiguousarray(new[:whole])))
    rest = (np.flatnonzero(old[whole:] != new[whole:]) + whole).astype(np.uint32)
    if not rest.size:
        return Moved(positions, before, after)
    return Moved(
        np.concatenate([positions, rest]), np.concatenate([before, old[rest]]), np.concatenate([after, new[rest]])
    )


@compiled
def _find(old: Any, new: Any) -> tuple[Ranks, Bits, Bits]:
    positions = np.empty(old.size, np.uint32)
    before, after = np.empty(old.size, old.dtype), np.empty(old.size, old.dtype)
    count = 0
    for start in range(0, old.size, LANES):
        mask = differ(old, new, start)
        while mask:
            at = start + first_one(mask)
            positions[count], before[count], after[count] = at, old[at], new[at]
            count += 1
            mask &= mask - np.uint64(1)
    return positions[:count].copy(), before[:count].copy(), after[:count].copy()


def take(bits: Bits, positions: NDArray[Any]) -> Bits:
    """Elements by their places; faster than numpy's indexing by other integers than its own."""
    return _take(fixed(bits), fixed(positions))


@compiled
def _take(bits: Any, positions: Any) -> Bits:
    picked = np.empty(positions.size, bits.dtype)
    for i in range(positions.size):
        picked[i] = bits[positions[i]]
    return picked

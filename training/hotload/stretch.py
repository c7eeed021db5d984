"""A stretch of a tensor's bits, wherever it lies: what the coder asks of it, and the answer for host memory.

`torch_codec.py` answers for tensors on a device, so that only changed elements leave it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from groundhop.training.hotload.bits import Bits
from groundhop.training.hotload.classes import Bounds, Field, Placed, Ranked, choose_bounds, place, rank_in_classes
from groundhop.training.hotload.elements import put, take
from groundhop.training.hotload.kernels import compiled, fixed
from groundhop.training.hotload.locations import Ranks
from groundhop.training.hotload.masks import LANES, count_ones, differ, fetch_ahead
from groundhop.training.hotload.words import flag, list_ones

BATCH = 128
"""Words of 64 elements that are compared before the changed elements among them are picked, while the processor still holds them."""
AHEAD = 8 * LANES
"""How far ahead elements are asked for."""
ROOM = 64
"""Room for one changed element in so many at first: a large array costs the system a page to clear at its first use."""


class Moved(NamedTuple):
    """Elements to be sent, and what they are before and after; positions count from the start of their stretch."""

    positions: Ranks
    before: Bits
    after: Bits


class After(Protocol):
    """What a stretch becomes."""

    @property
    def size(self) -> int:
        """Elements."""
        ...

    def all(self) -> Bits:
        """Every element, in host memory."""
        ...


class Stretch(After, Protocol):
    """Bits of at most CHUNK_ELEMENTS elements; positions count from their start."""

    def at(self, positions: Ranks) -> Bits:
        """Those elements, in host memory."""
        ...

    def choose_bounds(self, before: Bits, field: Field) -> list[int]:
        """As `classes.choose_bounds`."""
        ...

    def rank(self, positions: Ranks, field: Field, bounds: Bounds) -> Ranked:
        """As `classes.rank_in_classes`."""
        ...

    def place(self, ranks: Sequence[Ranks], totals: Sequence[int], field: Field, bounds: Bounds) -> Placed | None:
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

    def place(self, ranks: Sequence[Ranks], totals: Sequence[int], field: Field, bounds: Bounds) -> Placed | None:
        """As `classes.place`."""
        return place(self.bits, ranks, totals, field, bounds)


@dataclass(frozen=True, slots=True)
class Patched:
    """A stretch of which the old bits lie in host memory, and what changes is known: put together only where all of it is wanted."""

    before: Bits
    moved: Moved

    @property
    def size(self) -> int:
        """Elements."""
        return int(self.before.size)

    def all(self) -> Bits:
        """Every element."""
        bits = self.before.copy()
        put(bits, self.moved.positions, self.moved.after)
        return bits


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
    room = old.size // ROOM + LANES
    positions = np.empty(room, np.uint32)
    before, after = np.empty(room, old.dtype), np.empty(room, old.dtype)
    words, starts = np.empty(BATCH + 2, np.uint64), np.empty(BATCH + 2, np.int64)
    found = 0
    for first in range(0, old.size, BATCH * LANES):
        used, ones = 0, 0
        for start in range(first, min(first + BATCH * LANES, old.size), LANES):
            fetch_ahead(old, start + AHEAD)
            fetch_ahead(new, start + AHEAD)
            word = differ(old, new, start)
            words[used], starts[used] = word, start
            used += flag(word != np.uint64(0))
            ones += count_ones(word)
        if found + ones > positions.size:
            room = 2 * (found + ones)
            positions, before, after = _longer(positions, room), _longer(before, room), _longer(after, room)
        stop = list_ones(words, starts, ones, positions, found)
        for slot in range(found, stop):
            before[slot], after[slot] = old[positions[slot]], new[positions[slot]]
        found = stop
    return positions[:found].copy(), before[:found].copy(), after[:found].copy()


@compiled
def _longer(array: Any, room: int) -> Any:
    longer = np.empty(room, array.dtype)
    longer[: array.size] = array
    return longer

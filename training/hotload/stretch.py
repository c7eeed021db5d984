"""A stretch of a tensor's bits, wherever it lies: what the coder asks of it, and the answer for host memory.

`torch_codec.py` answers for tensors on a device, so that only changed elements leave it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from groundhop.training.hotload.bits import Bits
from groundhop.training.hotload.classes import Bounds, Field, Placed, Ranked, choose_bounds, place, rank_in_classes
from groundhop.training.hotload.locations import Ranks


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

    def choose_bounds(self, positions: Ranks, field: Field) -> list[int]:
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
        picked: Bits = self.bits[positions]
        return picked

    def choose_bounds(self, positions: Ranks, field: Field) -> list[int]:
        """As `classes.choose_bounds`."""
        return choose_bounds(self.bits, positions, field)

    def rank(self, positions: Ranks, field: Field, bounds: Bounds) -> Ranked:
        """As `classes.rank_in_classes`."""
        return rank_in_classes(self.bits, positions, field, bounds)

    def place(self, ranks: Sequence[Ranks], field: Field, bounds: Bounds) -> Placed | None:
        """As `classes.place`."""
        return place(self.bits, ranks, field, bounds)

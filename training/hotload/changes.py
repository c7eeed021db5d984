"""What a delta says of a stretch of a tensor: which elements change and what is done to them."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from groundhop.errors import InputError
from groundhop.training.hotload.bits import Bits
from groundhop.training.hotload.elements import put, take

Operation = Literal["overwrite", "xor", "add"]
"""`add` is the integer sum of bit patterns modulo 2^8, 2^16 or 2^32. Only `overwrite` may be applied twice."""

Encoding = Literal["auto", "context", "xor", "add", "overwrite", "dense"]
"""How changes are coded. `context` needs the old bits to decode and decodes to `overwrite`; `auto` is the smallest by measured size."""


@dataclass(frozen=True, slots=True)
class Change:
    """Elements of one tensor to be changed, each named once."""

    start: int
    """Element of the tensor from which positions count."""
    positions: NDArray[np.uint32] | None
    """Strictly increasing, relative to `start`; None for the dense run `start ... start + len(values) - 1`."""
    operation: Operation
    values: Bits
    before: Bits | None = None
    """The old bits there, where decoding had to look at them."""

    def absolute(self) -> NDArray[np.int64]:
        """Positions in the tensor."""
        if self.positions is None:
            return np.arange(self.start, self.start + self.values.size, dtype=np.int64)
        return self.positions.astype(np.int64) + self.start

    def gather(self, bits: Bits) -> Bits:
        """A copy of the elements of the whole tensor `bits` that this change names."""
        if self.positions is None:
            return bits[self.start : self.start + self.values.size].copy()
        return take(bits[self.start :], self.positions)

    def result(self, old: Bits) -> Bits:
        """What the elements become where they are `old` (as `gather` gives them)."""
        match self.operation:
            case "overwrite":
                return self.values
            case "xor":
                return old ^ self.values
            case "add":
                return old + self.values

    def scatter(self, bits: Bits, values: Bits) -> None:
        """Write `values` to the elements that this change names."""
        if self.positions is None:
            bits[self.start : self.start + values.size] = values
        else:
            put(bits[self.start :], self.positions, values)


def check_bits(name: str, bits: Bits, unit: Any, size: int) -> None:
    """Raises: InputError unless `bits` are flat, of type `unit` and `size` elements."""
    if bits.ndim != 1 or bits.dtype != unit or bits.size != size:
        raise InputError(f"{name}: need {size} flat elements of {np.dtype(unit)}, got {bits.dtype}{bits.shape}")

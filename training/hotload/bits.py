"""Tensors as bits: one flat array of unsigned integers a tensor, row-major, under the checkpoint's own names.

Everything in hot-load compares, codes and places these bits, never values: -0.0, NaN payloads and subnormals are what they are.
"""

from collections.abc import Mapping
from math import prod
from typing import Any, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from groundhop.errors import InputError

Bits = NDArray[Any]
"""One axis; uint16 for BF16 and F16, uint32 for F32, uint8 (raw bytes) for every other type."""

ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes an element, by the type names of the safetensors format (github.com/huggingface/safetensors, `Dtype`)."""

_UNITS: Mapping[str, Any] = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}
_ARRAY_UNITS: Mapping[str, Any] = {"float16": np.uint16, "uint16": np.uint16, "float32": np.uint32, "uint32": np.uint32}


class TensorSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint says of one tensor."""

    name: str
    dtype: str
    """Type name of the safetensors format, e.g. `BF16`."""
    shape: tuple[int, ...]

    @property
    def unit(self) -> Any:
        """The numpy type of its bits. Raises: InputError for a type that the safetensors format does not name."""
        if self.dtype not in ITEM_BYTES:
            raise InputError(f"{self.name}: no tensor type {self.dtype!r}; known are {', '.join(ITEM_BYTES)}")
        return np.dtype(_UNITS.get(self.dtype, np.uint8))

    @property
    def size(self) -> int:
        """Length of its bits: elements, or bytes where the unit is a byte."""
        return self.nbytes // int(self.unit.itemsize)

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class Weights(Protocol):
    """A whole canonical state: a checkpoint, a baseline, a live model seen in checkpoint coordinates."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor, by name."""
        ...

    def bits(self, name: str) -> Bits:
        """The bits of a tensor; a view where possible. Writing to it changes the state where the state can be written."""
        ...


def bits_of(tensor: Any) -> Bits:
    """The row-major logical bits of a torch tensor of any layout on any device, or of a numpy array; no copy where none is needed."""
    if isinstance(tensor, np.ndarray):
        array = np.ascontiguousarray(tensor).reshape(-1)
        found: Bits = array.view(_ARRAY_UNITS.get(array.dtype.name, np.uint8))
        return found
    import torch

    plain = tensor.detach().cpu().contiguous().reshape(-1)
    integers = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
    same_bits = plain.view(integers.get(plain.dtype, torch.uint8)).numpy()
    bits: Bits = same_bits.view(f"u{same_bits.itemsize}")
    return bits

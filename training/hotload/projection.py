"""Where the elements of a rank's shard lie in the whole tensor.

A shard that is a slice along one axis of one tensor maps by one affine rule (`placement.md` 1.2); everything else is gathered.
"""

import zlib
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from groundhop.training.hotload.bits import ITEM_BYTES, Bits, TensorSpec


@dataclass(frozen=True, slots=True)
class Projection:
    """A shard: all of a tensor's axes but `axis`, of which it has some indices from `offset` on. Shapes are in units."""

    whole: tuple[int, ...]
    local: tuple[int, ...]
    axis: int | None
    """None for a shard that is the whole tensor."""
    offset: int

    def positions(self, local: NDArray[np.int64]) -> NDArray[np.int64]:
        """Of elements of the shard, in the whole tensor; increasing ones stay so."""
        if self.axis is None:
            return local
        inner = prod(self.local[self.axis + 1 :])
        slab = self.local[self.axis] * inner
        row = prod(self.whole[self.axis :])
        return local + self.offset * inner + local // max(slab, 1) * (row - slab)

    def cut(self, bits: Bits) -> Bits:
        """The shard's bits, out of the whole tensor's; a copy."""
        if self.axis is None:
            return bits.copy()
        where = [slice(None)] * len(self.whole)
        where[self.axis] = slice(self.offset, self.offset + self.local[self.axis])
        return np.ascontiguousarray(bits.reshape(self.whole)[tuple(where)]).reshape(-1)


def project(spec: TensorSpec, tensor: Any) -> Projection | None:
    """How a trainer's tensor on this rank lies in `spec`; None where that is no slice along one axis.

    A plain tensor is whole. A DTensor is a slice where it is sharded once on a mesh of one axis, evenly or not.
    """
    whole = unit_shape(spec)
    if not hasattr(tensor, "full_tensor"):
        return Projection(whole, whole, None, 0)
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    if mesh.ndim != 1:
        return None
    match placements[0]:
        case Replicate():
            return Projection(whole, whole, None, 0)
        # A strided shard is a subclass that is no slice.
        case Shard(dim=axis) if type(placements[0]) is Shard:
            shape, offset = compute_local_shape_and_global_offset(spec.shape, mesh, placements)
            local = (*shape, *whole[len(spec.shape) :])
            return Projection(whole, local, axis, offset[axis])
        case _:
            return None


def unit_shape(spec: TensorSpec) -> tuple[int, ...]:
    """A tensor's shape in units of its bits: types that are compared as bytes have one axis more."""
    units = ITEM_BYTES[spec.dtype] // int(spec.unit.itemsize)
    return (*spec.shape, units) if units > 1 else spec.shape


def is_owner(name: str, projection: Projection, rank: int, ranks: int) -> bool:
    """Whether this rank speaks for the shard: each for its own, exactly one for what all hold."""
    return projection.axis is not None or zlib.crc32(name.encode()) % ranks == rank

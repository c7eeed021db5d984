"""What LoGRA's processes share: averages, equal projections, and which rows of a weight are here."""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from groundhop.errors import ChecksumError, ConfigError


class Rows(NamedTuple):
    """The rows of a weight that this process holds, from `start` up to but not including `stop`."""

    start: int
    stop: int
    group: Any
    """The process group that holds all rows together; None for a weight that is whole."""


def world_size(group: Any) -> int:
    """Processes in `group` (None: all of them); 1 where nothing is distributed."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def add_up(tensor: Tensor, group: Any) -> Tensor:
    """Sum over the processes, in place."""
    if world_size(group) > 1:
        dist.all_reduce(tensor, group=group)
    return tensor


def average(tensors: Iterable[Tensor], group: Any) -> None:
    """Mean over the processes, in place; tensors that are sharded already hold it."""
    processes = world_size(group)
    for tensor in tensors:
        if processes > 1 and not isinstance(tensor, DTensor):
            add_up(tensor, group).div_(processes)


def check_same(what: Sequence[bytes], group: Any, device: torch.device) -> None:
    """Make sure that all processes hold the same bytes.

    Raises: ChecksumError on every process when one differs: it was started with another seed or configuration.
    """
    digest = blake2b(digest_size=7)
    for part in what:
        digest.update(len(part).to_bytes(8, "little") + part)
    number = int.from_bytes(digest.digest(), "little")
    ends = torch.tensor([number, -number], dtype=torch.int64, device=device)
    if world_size(group) > 1:
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    if int(ends[0]) != number or int(ends[1]) != -number:
        raise ChecksumError("LoGRA's projections differ between processes: need the same seed and settings in each")


def rows_of(weight: Tensor) -> Rows:
    """The rows of `weight` here: FSDP2 cuts axis 0 into pieces of ceil(rows / processes), the last ones may be short or empty.

    Raises: ConfigError for a weight that is cut in any other way.
    """
    if not isinstance(weight, DTensor):
        return Rows(0, len(weight), None)
    cuts = [axis for axis, placement in enumerate(weight.placements) if not isinstance(placement, Replicate)]
    if not cuts:
        return Rows(0, len(weight), None)
    mesh, (axis, *more) = weight.device_mesh, cuts
    if more or type(weight.placements[axis]) is not Shard or not weight.placements[axis].is_shard(0):
        raise ConfigError(f"LoGRA needs weights cut along rows of one mesh axis, got {weight.placements}")
    rows, piece = len(weight), -(-len(weight) // mesh.size(axis))
    start = min(mesh.get_local_rank(axis) * piece, rows)
    return Rows(start, min(start + piece, rows), mesh.get_group(axis))


def here(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def norm_squared(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Sum of squares of all elements, sharded ones counted over all their processes; float64 scalar on `device`."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    shared: dict[Any, Tensor] = {}
    for tensor in tensors:
        square = torch.linalg.vector_norm(here(tensor).detach()).double().square().to(device)
        group = rows_of(tensor).group
        if group is None:
            total += square
        else:
            shared[group] = shared.get(group, torch.zeros_like(total)) + square
    return total + sum(add_up(part, group) for group, part in shared.items())

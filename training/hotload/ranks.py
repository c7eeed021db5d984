"""The ranks of one training job as one publisher: each finds and codes the changes of its own shards.

Every rank keeps its shards of the last committed state and compares bits with them; what differs travels to rank 0 as chunks of
our codec in coordinates of the whole tensor. Rank 0 puts them together on its baseline, so that its publisher sees whole
tensors and never gathers one. What is no slice of a tensor (`projection.py`) is gathered by `full_tensor()`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from groundhop.errors import GroundhopError, InputError
from groundhop.training.hotload.bits import Bits, TensorSpec, Weights
from groundhop.training.hotload.changes import Change
from groundhop.training.hotload.codec import CHUNK_ELEMENTS, Chunk, decode_chunk, encode_change
from groundhop.training.hotload.compare import differences
from groundhop.training.hotload.kernels import spans
from groundhop.training.hotload.named import Given, Named, Whole, cast
from groundhop.training.hotload.projection import Projection, is_owner, project
from groundhop.training.hotload.publisher import Published, Publisher

Result = TypeVar("Result")
Moved = dict[str, tuple[NDArray[np.int64], Bits]]
"""Elements of this rank's shards that a version changes, and their new bits."""


@dataclass(slots=True)
class Shards:
    """What a rank remembers of the last committed state."""

    identity: str = ""
    specs: dict[str, TensorSpec] = field(default_factory=dict)
    bits: dict[str, Bits] = field(default_factory=dict)
    """Of this rank's shards; nothing of tensors that are gathered or spoken for by another rank."""


class RankPublisher:
    """A publisher that all ranks call together, each with its own shards, in the same order.

    Only rank 0 has a `Publisher` in it. Errors are raised on every rank, and leave all of them ready for the next call.
    """

    def __init__(self, publisher: Publisher | None) -> None:
        """`publisher`: on rank 0 only. Makes a process group of its own, in host memory."""
        import torch.distributed

        self._dist: Any = torch.distributed
        self._group = self._dist.new_group(backend="gloo")
        self._rank, self._ranks = self._dist.get_rank(self._group), self._dist.get_world_size(self._group)
        if (publisher is not None) != (self._rank == 0):
            raise InputError("rank 0, and no other, needs the publisher")
        self._publisher = publisher
        self._shards = Shards()

    def start(self, named: Named, checkpoint: Weights | None = None) -> Published:
        """As `Publisher.start`; rank 0 may give the checkpoint that the servers hold, else the tensors are gathered whole."""
        given = list(named)
        source: Any = checkpoint
        if not self._shared(checkpoint is not None):
            whole = [(name, _gathered(tensor)) for name, tensor in given]
            source = Given(whole) if self._rank == 0 else None
        published = self._on_first(lambda one: one.start(source))
        self._remember(given)
        return published

    def publish(self, named: Named, version: int | None = None) -> Published:
        """As `Publisher.publish`; `named` holds this rank's DTensors, or the same plain tensors on all ranks."""
        given = list(named)
        if self._on_first(lambda one: one.settle()) != self._shards.identity:
            self._remember(given)
        moved: Moved = {}
        steps = self._steps(given, moved)

        def publish(one: Publisher) -> Published:
            try:
                return one.publish(steps, version)
            finally:
                _finish(steps)  # the other ranks go through the whole exchange

        if self._rank:
            _finish(steps)
        published = self._on_first(publish)
        for name, (positions, values) in moved.items():
            self._shards.bits[name][positions] = values
        self._shards.identity = published.identity
        return published

    def _steps(self, given: Named, moved: Moved) -> Iterator[tuple[str, Any]]:
        """Exchange tensor after tensor; gives whole ones on rank 0. A rank's error comes last, so that none waits for another."""
        failures: list[str] = []
        for name, tensor in given:
            spec = self._shards.specs.get(name)
            projection = project(spec, tensor) if spec else None
            if spec is None or projection is None:
                yield name, _gathered(tensor)
                continue
            collected = self._collected(spec, projection, tensor, moved)
            failures += [outcome for outcome in collected if isinstance(outcome, str)]
            chunks = [chunk for outcome in collected if isinstance(outcome, list) for chunk in outcome]
            if self._publisher is not None:
                yield name, Whole(spec, _joined(spec, self._publisher.baseline.bits(name), chunks))
            else:
                yield name, None
        if failures:
            raise InputError("; ".join(failures))

    def _collected(self, spec: TensorSpec, projection: Projection, tensor: Any, moved: Moved) -> list[Any]:
        """On rank 0 what each rank has to say of a tensor: its coded changes, or what is wrong with it."""
        outcome: list[Chunk] | str
        try:
            outcome = self._changed(spec, projection, tensor, moved)
        except GroundhopError as error:
            outcome = f"rank {self._rank}: {error}"
        collected: list[Any] = [None] * self._ranks
        self._dist.gather_object(outcome, collected if self._rank == 0 else None, dst=0, group=self._group)
        return collected

    def _changed(self, spec: TensorSpec, projection: Projection, tensor: Any, moved: Moved) -> list[Chunk]:
        """Code a rank's part of a tensor's changes; notes what the shard becomes when they are committed."""
        if tuple(tensor.shape) != spec.shape:
            raise InputError(f"{spec.name}: need the shape {list(spec.shape)}, the trainer gave {list(tensor.shape)}")
        if not is_owner(spec.name, projection, self._rank, self._ranks):
            return []
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        bits = cast(local, TensorSpec(name=spec.name, dtype=spec.dtype, shape=tuple(local.shape)))
        positions = differences(self._shards.bits[spec.name], bits)
        values = bits[positions]
        moved[spec.name] = positions, values
        return list(_coded(spec, projection.positions(positions), values))

    def _remember(self, given: Named) -> None:
        """Take this rank's shards of rank 0's baseline, tensor after tensor."""
        import torch

        baseline = self._publisher.baseline if self._publisher else None
        identity, specs = self._shared((baseline.identity, dict(baseline.specs)) if baseline else None)
        self._shards = Shards(identity, specs)
        for name, tensor in given:
            spec = specs.get(name)
            projection = project(spec, tensor) if spec else None
            if spec is None or projection is None:
                continue
            whole = torch.empty(spec.nbytes, dtype=torch.uint8)
            if baseline:
                whole.numpy()[:] = baseline.bits(name).view(np.uint8)
            if spec.nbytes:
                self._dist.broadcast(whole, 0, group=self._group)
            if is_owner(name, projection, self._rank, self._ranks):
                self._shards.bits[name] = projection.cut(whole.numpy().view(spec.unit))

    def _on_first(self, action: Callable[[Publisher], Result]) -> Result:
        """Do something on rank 0; its result, or its error, on all."""
        outcome: Any = None
        if self._publisher is not None:
            try:
                outcome = action(self._publisher)
            except GroundhopError as error:
                outcome = error
        outcome = self._shared(outcome)
        if isinstance(outcome, GroundhopError):
            raise outcome
        result: Result = outcome
        return result

    def _shared(self, value: Any) -> Any:
        """Rank 0's value, on all. Object collectives pickle; they connect only the processes of one job."""
        held = [value]
        self._dist.broadcast_object_list(held, 0, group=self._group)
        return held[0]


def _finish(steps: Iterator[Any]) -> None:
    for _ in steps:
        pass


def _gathered(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _coded(spec: TensorSpec, positions: NDArray[np.int64], values: Bits) -> Iterator[Chunk]:
    """Changes of any part of a tensor, stretch by stretch of the whole."""
    for start, stop in spans(spec.size, CHUNK_ELEMENTS):
        low, high = np.searchsorted(positions, (start, stop))
        local = (positions[low:high] - start).astype(np.uint32)
        chunk = encode_change(Change(start, local, "overwrite", values[low:high]), stop - start)
        if chunk is not None:
            yield chunk


def _joined(spec: TensorSpec, old: Bits, chunks: Sequence[Chunk]) -> Bits:
    """A whole tensor's bits with the changes of all ranks."""
    if not chunks:
        return old
    new = old.copy()
    for chunk in chunks:
        change = decode_chunk(chunk, spec, None, spec.name)
        change.scatter(new, change.values)
    return new

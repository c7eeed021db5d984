"""What is sent of one tensor, and what a delta says as a whole."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from groundhop.errors import InputError
from groundhop.training.hotload.bits import Bits, TensorSpec
from groundhop.training.hotload.changes import Change, Encoding, Operation, check_bits
from groundhop.training.hotload.codec import (
    CHUNK_ELEMENTS,
    OPERATIONS,
    Chunk,
    decode_chunk,
    encode_chunk,
)
from groundhop.training.hotload.fingerprint import Fingerprint, fingerprint, fingerprint_change
from groundhop.training.hotload.kernels import in_parallel, spans
from groundhop.training.hotload.stretch import HostStretch, Moved, Patched, Stretch, find_moved

Old = Callable[[int, int], Bits | Stretch]
"""Gives the canonical old bits of elements `start` to `stop` of a tensor, from host memory or as they lie on a device."""
Positions = NDArray[np.int64]
"""Elements of a tensor, strictly increasing."""


@dataclass(frozen=True, slots=True)
class TensorDelta:
    """What is sent of one tensor."""

    spec: TensorSpec
    base_fingerprint: Fingerprint | None
    """Print of the old bits; None where the result does not depend on them."""
    fingerprint: Fingerprint
    chunks: tuple[Chunk, ...]
    """By their start. Chunks of one stretch change different elements of it."""
    positions: Positions | None = None
    """The elements that changed or had to be sent; None where all are sent without an old state, or it is not known."""

    @property
    def changed(self) -> int:
        """How many elements changed or had to be sent."""
        return sum(chunk.changed for chunk in self.chunks)

    @property
    def nbytes(self) -> int:
        """Bytes of the coded chunks."""
        return sum(len(chunk.body) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a delta that was read."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    base_fingerprint: Fingerprint | None
    fingerprint: Fingerprint
    changed: int
    chunks: tuple[Chunk, ...]
    """Their bodies are views into the file's bytes."""

    @property
    def spec(self) -> TensorSpec:
        """The tensor in the checkpoint's words."""
        return TensorSpec(name=self.name, dtype=self.dtype, shape=self.shape)

    @property
    def tensor_delta(self) -> TensorDelta:
        """The same, to be written again."""
        return TensorDelta(self.spec, self.base_fingerprint, self.fingerprint, self.chunks)


@dataclass(frozen=True, slots=True)
class DeltaSummary:
    """What was written."""

    bytes: int
    """Size of the file."""
    changed: int
    """Elements that changed or had to be sent."""
    total: int
    """Elements of the tensors that have an entry."""
    encodings: Mapping[str, int]
    """Bytes of chunk bodies by their mode."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A delta that was read and whose SHA-256 and lengths are right."""

    version: int
    base_digest: str
    """`state_digest` of the state it builds on; "" for a part whose index tells."""
    digest: str
    """That of the state it leads to; "" likewise."""
    entries: tuple[Entry, ...]

    def changes(self, entry: Entry, old: Old | None = None) -> Iterator[Change]:
        """Decode the changes of a tensor, stretch by stretch; each is whole and within bounds when it is given out.

        `old` is asked for stretches in context encoding only. Raises: InputError for a malformed chunk or a missing `old`,
        ChecksumError for old bits that a chunk was not made against.
        """
        spec, start, named = entry.spec, -1, []
        for chunk in entry.chunks:
            where = f"{entry.name} at {chunk.start}"
            before = None
            if chunk.mode == "context":
                if old is None:
                    raise InputError(f"{where}: context encoding needs the old bits")
                before = _stretch(old(chunk.start, chunk.start + chunk.size), spec, chunk.size, where)
            change = decode_chunk(chunk, spec, before, where)
            if chunk.start != start:
                start, named = chunk.start, [change.positions]
            else:
                named.append(change.positions)
                _check_apart(named, where)
            yield change

    def needs_old(self, entry: Entry) -> bool:
        """Whether decoding this tensor needs its old bits."""
        return any(chunk.mode == "context" for chunk in entry.chunks)

    @property
    def operations(self) -> frozenset[Operation]:
        """The operations that occur."""
        return frozenset(OPERATIONS[chunk.mode] for entry in self.entries for chunk in entry.chunks)


def encode_tensor(
    spec: TensorSpec,
    old: Bits | None,
    new: Bits,
    *,
    encoding: Encoding = "auto",
    also: Positions | None = None,
    prints: tuple[Fingerprint | None, Fingerprint | None] = (None, None),
    threads: int | None = None,
) -> TensorDelta | None:
    """Code one tensor, None when there is nothing to send. Without `old` all of it is sent.

    `also`: positions that are sent whatever they hold, so that a retry reaches what an attempt before it may have
    written; the operation is then `overwrite` and no base is demanded. `prints`: those of `old` and `new`, where known,
    which saves a read; wrong ones make a delta that every reader refuses.
    Raises: InputError for bits that do not fit `spec`, and for positions out of order or out of range.
    """
    check_bits(spec.name, new, spec.unit, spec.size)
    if old is not None:
        check_bits(spec.name, old, spec.unit, spec.size)
    _check_positions(spec, also)
    if also is not None and encoding != "dense":
        encoding = "overwrite"

    def one(span: tuple[int, int]) -> Coded:
        start, stop = span
        after = new[start:stop]
        if old is None:
            every = Moved(np.arange(after.size, dtype=np.uint32), after, after)
            return Coded(encode_chunk(spec, None, HostStretch(after), every, start, encoding), start, every)
        before = old[start:stop]
        moved = _moved(before, after, start, also)
        return Coded(encode_chunk(spec, HostStretch(before), HostStretch(after), moved, start, encoding), start, moved)

    coded = in_parallel(one, spans(spec.size, CHUNK_ELEMENTS), threads)
    if old is None:
        return TensorDelta(spec, None, prints[1] or fingerprint(new, threads=threads), chunks_of(coded))
    if not any(one.moved.positions.size for one in coded):
        return None
    base = prints[0] or fingerprint(old, threads=threads)
    target = prints[1] or base + print_change(coded)
    sent = np.concatenate([one.moved.positions.astype(np.int64) + one.start for one in coded])
    return TensorDelta(spec, base if also is None else None, target, chunks_of(coded), sent)


def encode_moved(
    spec: TensorSpec,
    old: Bits,
    positions: Positions,
    values: Bits,
    *,
    encoding: Encoding = "auto",
    overwrite: bool = False,
    prints: tuple[Fingerprint, Fingerprint],
    threads: int | None = None,
) -> TensorDelta:
    """As `encode_tensor` of a tensor that was compared: `values` are the new bits at `positions`, all others stay.

    `overwrite`: some of them may not differ; the operation is then `overwrite` and no base is demanded. `prints`: of the tensor
    before and after. Raises: InputError for what does not fit `spec`, and where nothing is to be sent.
    """
    check_bits(spec.name, old, spec.unit, spec.size)
    check_bits(spec.name, values, spec.unit, positions.size)
    _check_positions(spec, positions)
    if not positions.size:
        raise InputError(f"{spec.name}: need something to send")
    if overwrite and encoding != "dense":
        encoding = "overwrite"

    def one(span: tuple[int, int]) -> Chunk | None:
        start, stop = span
        before = old[start:stop]
        low, high = np.searchsorted(positions, span)
        local = (positions[low:high] - start).astype(np.uint32)
        moved = Moved(local, before[local], values[low:high])
        return encode_chunk(spec, HostStretch(before), Patched(before, moved), moved, start, encoding)

    coded = in_parallel(one, spans(spec.size, CHUNK_ELEMENTS), threads)
    chunks = tuple(chunk for chunk in coded if chunk)
    return TensorDelta(spec, None if overwrite else prints[0], prints[1], chunks, positions)


@dataclass(frozen=True, slots=True)
class Coded:
    """A stretch, coded."""

    chunk: Chunk | None
    start: int
    moved: Moved


def chunks_of(coded: Sequence[Coded]) -> tuple[Chunk, ...]:
    """The chunks that there are."""
    return tuple(one.chunk for one in coded if one.chunk)


def print_change(coded: Sequence[Coded]) -> Fingerprint:
    """What the new state's fingerprint has more than the old one's."""
    change = Fingerprint.zero
    for one in coded:
        positions, before, after = one.moved
        change += fingerprint_change(positions, before, after, one.start)
    return change


def _moved(before: Bits, after: Bits, start: int, also: Positions | None) -> Moved:
    """What to send of a stretch that begins at `start`."""
    moved = find_moved(before, after)
    if also is None:
        return moved
    low, high = np.searchsorted(also, (start, start + after.size))
    local = np.union1d(moved.positions, also[low:high] - start).astype(np.uint32)
    return Moved(local, before[local], after[local])


def _stretch(old: Bits | Stretch, spec: TensorSpec, size: int, where: str) -> Stretch:
    if isinstance(old, np.ndarray):
        check_bits(where, old, spec.unit, size)
        return HostStretch(old)
    if old.size != size:
        raise InputError(f"{where}: need {size} old elements, got {old.size}")
    return old


def _check_positions(spec: TensorSpec, positions: Positions | None) -> None:
    if positions is None or not positions.size:
        return
    if int(positions[0]) < 0 or int(positions[-1]) >= spec.size or not bool((positions[1:] > positions[:-1]).all()):
        raise InputError(f"{spec.name}: need increasing positions below {spec.size}")


def _check_apart(named: list[NDArray[np.uint32] | None], where: str) -> None:
    whole = [positions for positions in named if positions is not None]
    if len(whole) < len(named) or np.unique(np.concatenate(whole)).size < sum(part.size for part in whole):
        raise InputError(f"{where}: an element is named twice")

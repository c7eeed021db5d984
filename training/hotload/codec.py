"""Code the changed elements of a stretch of a tensor into bytes, and read them back.

Five modes. `dense`: the stretch's bits, a section for each byte of an element. `overwrite`: locations, then the new bits in
the same way. `xor` and `add`: locations, then what is xored or added. `context`: the same as `add`, class by class of the
old exponents (`classes.py`), with differences of bits in the order of the values that they stand for; its reader holds the
old bits. Bodies are written by `streams.py`, locations by `locations.py`, values by `values.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from groundhop.errors import ChecksumError, InputError
from groundhop.training.hotload.bits import Bits, TensorSpec
from groundhop.training.hotload.changes import Change, Encoding, Operation
from groundhop.training.hotload.classes import FIELDS, MOST_CLASSES, Field
from groundhop.training.hotload.kernels import compiled, fixed
from groundhop.training.hotload.locations import Ranks, read_locations, write_locations
from groundhop.training.hotload.streams import Reader, Writer
from groundhop.training.hotload.stretch import After, Moved, Stretch
from groundhop.training.hotload.values import read_values, write_values

Mode = Literal["dense", "overwrite", "xor", "add", "context"]
MODES: tuple[Mode, ...] = ("dense", "overwrite", "xor", "add", "context")
"""By their number in a file."""
OPERATIONS: dict[Mode, Operation] = {
    "dense": "overwrite",
    "overwrite": "overwrite",
    "xor": "xor",
    "add": "add",
    "context": "overwrite",
}
"""What a decoded chunk does to the elements."""

CHUNK_ELEMENTS = 1 << 22
"""Elements that a chunk spans at most, so that a reader can bound what it allocates."""
CONTEXT_GAIN = 0.99
"""`auto` takes context encoding where it is below this part of the plain size: it costs its reader a pass over old bits."""
LONG_VALUES = 0.75
"""Where differences take more than this part of an element each, `auto` tries the other modes too."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A coded stretch of a tensor."""

    mode: Mode
    start: int
    """Its first element."""
    size: int
    """Elements that it spans."""
    changed: int
    """Elements that it changes; all but `dense` name just these."""
    body: bytes | memoryview


def encode_chunk(
    spec: TensorSpec, old: Stretch | None, new: After, moved: Moved, start: int, encoding: Encoding
) -> Chunk | None:
    """Code one stretch. `moved` are the elements to send; None if there are none. Without `old` all is sent.

    Context encoding falls back to the best of the others where the type has no exponent.
    """
    if old is None or encoding == "dense":
        return Chunk("dense", start, new.size, moved.positions.size, _dense(new.all())) if new.size else None
    if not moved.positions.size:
        return None
    best: tuple[Mode, bytes] | None = None
    for mode, body in _candidates(spec, old, new, moved, encoding):
        if best is None or len(body) < len(best[1]) * (CONTEXT_GAIN if mode == "context" else 1.0):
            best = mode, body
    assert best is not None
    return Chunk(best[0], start, new.size, moved.positions.size, best[1])


def encode_change(change: Change, size: int) -> Chunk | None:
    """Code what is known to happen to a stretch of `size` elements that begins at `change.start`, None if nothing."""
    if change.positions is None:
        return Chunk("dense", change.start, size, size, _dense(change.values)) if size else None
    if not change.positions.size:
        return None
    body = _sparse(change.operation, change.positions, change.values, size)
    return Chunk(change.operation, change.start, size, change.positions.size, body)


def decode_chunk(chunk: Chunk, spec: TensorSpec, old: Stretch | None, where: str) -> Change:
    """Read a chunk back; `old` is used by context encoding only.

    Raises: InputError for a malformed chunk, ChecksumError where `old` are not the bits that it was coded against.
    """
    reader = Reader(chunk.body, where)
    if chunk.mode == "context":
        if old is None or spec.dtype not in FIELDS:
            raise InputError(f"{where}: context encoding needs the old bits of a float, got {spec.dtype}")
        change = _read_context(reader, chunk, spec, old)
    elif chunk.mode == "dense":
        change = Change(chunk.start, None, "overwrite", _read_planes(reader, spec.unit, chunk.size))
    else:
        positions = read_locations(reader, chunk.changed, chunk.size)
        if chunk.mode == "overwrite":
            values = _read_planes(reader, spec.unit, chunk.changed)
        else:
            values = read_values(reader, spec.unit, [chunk.changed], signs=chunk.mode == "add")
        change = Change(chunk.start, positions, OPERATIONS[chunk.mode], values)
    reader.end()
    return change


def _candidates(
    spec: TensorSpec, old: Stretch, new: After, moved: Moved, encoding: Encoding
) -> Iterator[tuple[Mode, bytes]]:
    """The modes worth comparing, made one after the other."""
    positions, before, after = moved
    field = FIELDS.get(spec.dtype)
    if encoding == "context" and field:
        yield "context", _context(old, moved, field, old.choose_bounds(before, field))
        return
    if encoding == "overwrite":
        yield encoding, _sparse("overwrite", positions, after, new.size)
        return
    if encoding == "xor":
        yield encoding, _sparse("xor", positions, before ^ after, new.size)
        return
    added = _sparse("add", positions, after - before, new.size)
    yield "add", added
    if encoding == "add":
        return
    if len(added) > LONG_VALUES * before.nbytes:
        yield "xor", _sparse("xor", positions, before ^ after, new.size)
        yield "overwrite", _sparse("overwrite", positions, after, new.size)
        if 2 * positions.size > new.size:
            yield "dense", _dense(new.all())
    if encoding == "auto" and field:
        bounds = old.choose_bounds(before, field)
        if bounds:
            yield "context", _context(old, moved, field, bounds)


def _sparse(operation: Operation, positions: Ranks, values: Bits, size: int) -> bytes:
    writer = Writer()
    write_locations(writer, positions, size)
    if operation == "overwrite":
        _write_planes(writer, values)
    else:
        write_values(writer, values, [values.size], signs=operation == "add")
    return writer.bytes()


def _dense(bits: Bits) -> bytes:
    writer = Writer()
    _write_planes(writer, bits)
    return writer.bytes()


def _context(old: Stretch, moved: Moved, field: Field, bounds: list[int]) -> bytes:
    writer = Writer()
    ranked = old.rank(moved.positions, field, bounds)
    writer.number(len(bounds))
    writer.raw(bytes(bounds))
    for total, count in zip(ranked.totals, ranked.counts, strict=True):
        writer.number(total)
        writer.number(count)
    start = 0
    for total, count in zip(ranked.totals, ranked.counts, strict=True):
        write_locations(writer, ranked.ranks[start : start + count], total)
        start += count
    write_values(
        writer, _moves(fixed(moved.before), fixed(moved.after), fixed(ranked.order)), ranked.counts, signs=True
    )
    return writer.bytes()


def _read_context(reader: Reader, chunk: Chunk, spec: TensorSpec, old: Stretch) -> Change:
    field = FIELDS[spec.dtype]
    kinds = reader.number() + 1
    if kinds > MOST_CLASSES:
        raise InputError(f"{reader.where}: need at most {MOST_CLASSES} classes, got {kinds}")
    bounds = list(reader.raw(kinds - 1))
    if any(low >= high for low, high in zip([0, *bounds], [*bounds, 1 << field.bits], strict=True)):
        raise InputError(f"{reader.where}: classes of exponents out of order")
    sizes = [(reader.number(), reader.number()) for _ in range(kinds)]
    counts = [count for _, count in sizes]
    if (sum(total for total, _ in sizes), sum(counts)) != (chunk.size, chunk.changed) or any(c > t for t, c in sizes):
        raise InputError(f"{reader.where}: the counts of its classes do not add up")
    ranks = [read_locations(reader, count, total) for total, count in sizes]
    values = read_values(reader, spec.unit, counts, signs=True)
    placed = old.place(ranks, [total for total, _ in sizes], field, bounds)
    if placed is None:
        raise ChecksumError(f"{reader.where}: the old bits are not those that the delta was made against")
    new = _move(fixed(placed.before), fixed(values), fixed(placed.sources))
    return Change(chunk.start, placed.positions, "overwrite", new, placed.before)


@compiled
def _ordered(bits: Any, top: Any) -> Any:
    """Bits in the order of the floats that they stand for, as two's complement, -0.0 below 0.0; its own inverse."""
    wide = np.uint64(bits)
    return wide ^ ((wide >> top) * ((np.uint64(1) << top) - np.uint64(1)))


@compiled
def _moves(before: Any, after: Any, order: Any) -> Any:
    """How far elements go, in that order, in the row that `order` gives."""
    moves, top = np.empty_like(before), np.uint64(8 * before.itemsize - 1)
    for i in range(order.size):
        moves[i] = _ordered(after[order[i]], top) - _ordered(before[order[i]], top)
    return moves


@compiled
def _move(before: Any, moves: Any, sources: Any) -> Any:
    """The inverse: where elements come to, each by the move at its source."""
    after, top = np.empty_like(before), np.uint64(8 * before.itemsize - 1)
    width = (np.uint64(2) << top) - np.uint64(1)
    for i in range(before.size):
        after[i] = _ordered((_ordered(before[i], top) + np.uint64(moves[sources[i]])) & width, top)
    return after


def _write_planes(writer: Writer, bits: Bits) -> None:
    """One section for each byte of an element, the lowest first."""
    planes = np.ascontiguousarray(bits).view(np.uint8).reshape(-1, bits.itemsize)
    for plane in range(bits.itemsize):
        writer.section(np.ascontiguousarray(planes[:, plane]))


def _read_planes(reader: Reader, unit: Any, size: int) -> Bits:
    each = np.dtype(unit).itemsize
    planes = np.empty((size, each), np.uint8)
    for plane in range(each):
        planes[:, plane] = reader.section(size)
    bits: Bits = planes.view(unit).reshape(-1)
    return bits

"""Code the changed elements of a stretch of a tensor into bytes, and read them back."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard

from groundhop.errors import InputError
from groundhop.training.hotload import zstd_frames
from groundhop.training.hotload.bits import Bits
from groundhop.training.hotload.changes import Change, Encoding, Operation

CHUNK_ELEMENTS = 1 << 22
"""Elements that one chunk spans at most."""
MODES = ("dense", "overwrite", "xor", "add", "context")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A coded stretch of a tensor."""

    mode: str
    start: int
    size: int
    changed: int
    body: bytes


def encode_chunk(old: Bits | None, new: Bits, start: int, encoding: Encoding) -> Chunk | None:
    """Code what changed from `old` to `new` (both the stretch alone), None if nothing; without `old` all of it."""
    if old is None or encoding == "dense":
        return Chunk("dense", start, new.size, new.size, zstandard.compress(new.tobytes(), 1))
    positions = np.flatnonzero(old != new).astype(np.uint32)
    return encode_changes(Change(start, positions, "overwrite", new[positions]), new.size)


def encode_changes(change: Change, size: int) -> Chunk | None:
    """Code changes that are known already, None if there are none."""
    if change.positions is None or change.operation != "overwrite":
        raise InputError("not yet")
    if not change.positions.size:
        return None
    raw = change.positions.astype("<u4").tobytes() + change.values.tobytes()
    return Chunk("overwrite", change.start, size, change.values.size, zstandard.compress(raw, 1))


def decode_chunk(chunk: Chunk, unit: Any, old: Bits | None, where: str) -> Change:
    """Read a chunk back. Raises: InputError for a malformed one."""
    each = np.dtype(unit).itemsize
    if chunk.mode == "dense":
        raw = zstd_frames.decode_exact(chunk.body, chunk.size * each, where)
        return Change(chunk.start, None, "overwrite", np.frombuffer(raw, unit))
    raw = zstd_frames.decode_exact(chunk.body, chunk.changed * (4 + each), where)
    positions = np.frombuffer(raw, "<u4", chunk.changed)
    if positions.size and (int(positions[-1]) >= chunk.size or not bool(np.all(positions[1:] > positions[:-1]))):
        raise InputError(f"{where}: positions out of order or out of range")
    return Change(chunk.start, positions, "overwrite", np.frombuffer(raw, unit, chunk.changed, chunk.changed * 4))


OPERATIONS: dict[str, Operation] = {
    "dense": "overwrite",
    "overwrite": "overwrite",
    "xor": "xor",
    "add": "add",
    "context": "overwrite",
}

"""A delta as a file: head, table of tensors and chunks (Zstandard), chunk bodies, SHA-256 of all that came before.

docs/hotload.md, "The delta format", describes it for other readers.
"""

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable
from math import prod
from pathlib import Path

import zstandard

from groundhop.errors import ChecksumError, InputError
from groundhop.training.hotload import zstd_frames
from groundhop.training.hotload.atomic import replacing
from groundhop.training.hotload.bits import ITEM_BYTES, TensorSpec
from groundhop.training.hotload.codec import CHUNK_ELEMENTS, MODES, Chunk
from groundhop.training.hotload.fingerprint import Fingerprint
from groundhop.training.hotload.tensor_delta import Delta, DeltaSummary, Entry, TensorDelta

MAGIC = b"GHDELTA2"
DIGEST_BYTES = 32
TABLE_LEVEL = 9
HEAD = struct.Struct("<8sQII")
"""Magic, version, bytes of the coded table, bytes of the decoded table."""
CHUNK = struct.Struct("<BQIII")
"""Mode, first element, elements spanned, elements changed, bytes of its body."""
TABLE_BYTES = 1 << 26
"""Largest decoded table that is read."""
MOST_AXES = 32
MOST_ELEMENTS = 1 << 60


def dump_delta(deltas: Iterable[TensorDelta], *, version: int, base_digest: str, digest: str) -> bytes:
    """The bytes of a delta file. Raises: InputError for a table that no reader would take."""
    rows, bodies = [_text(base_digest), _text(digest)], []
    for delta in deltas:
        rows.append(_row(delta))
        bodies += [chunk.body for chunk in delta.chunks]
    table = b"".join(rows)
    if len(table) > TABLE_BYTES:
        raise InputError(f"need a table of at most {TABLE_BYTES} bytes, got {len(table)}: send it in several parts")
    coded = zstandard.ZstdCompressor(level=TABLE_LEVEL).compress(table)
    content = b"".join([HEAD.pack(MAGIC, version, len(coded), len(table)), coded, *bodies])
    return content + hashlib.sha256(content).digest()


def write_delta(
    path: Path, deltas: Iterable[TensorDelta], *, version: int, base_digest: str, digest: str
) -> DeltaSummary:
    """Write a delta file, all of it or nothing."""
    kept = list(deltas)
    content = dump_delta(kept, version=version, base_digest=base_digest, digest=digest)
    with replacing(path) as temporary:
        temporary.write_bytes(content)
    return summarise(kept, len(content))


def summarise(deltas: Iterable[TensorDelta], size_bytes: int) -> DeltaSummary:
    """Count what a file of `size_bytes` holds."""
    changed, total, encodings = 0, 0, Counter[str]()
    for delta in deltas:
        changed += delta.changed
        total += delta.spec.size
        for chunk in delta.chunks:
            encodings[chunk.mode] += len(chunk.body)
    return DeltaSummary(size_bytes, changed, total, dict(encodings))


def read_delta(source: Path | bytes) -> Delta:
    """Read and check a delta file, or its bytes.

    Raises: InputError for a malformed one, ChecksumError where its SHA-256 differs.
    """
    where = str(source) if isinstance(source, Path) else "delta"
    view = memoryview(source.read_bytes() if isinstance(source, Path) else source)
    if len(view) < HEAD.size + DIGEST_BYTES:
        raise InputError(f"{where}: need at least {HEAD.size + DIGEST_BYTES} bytes, got {len(view)}")
    magic, version, coded, size = HEAD.unpack(view[: HEAD.size])
    if magic != MAGIC:
        raise InputError(f"{where} is not a delta file: it begins with {magic!r}")
    content = view[:-DIGEST_BYTES]
    if hashlib.sha256(content).digest() != view[-DIGEST_BYTES:]:
        raise ChecksumError(f"{where}: its bytes differ from its SHA-256")
    if HEAD.size + coded > len(content) or size > TABLE_BYTES:
        raise InputError(f"{where}: its table claims {coded} bytes ({size} decoded), the file has {len(view)}")
    raw = zstd_frames.decode_exact(content[HEAD.size : HEAD.size + coded], size, where)
    return _Table(raw, content[HEAD.size + coded :], where).delta(version)


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<H", len(raw)) + raw


def _row(delta: TensorDelta) -> bytes:
    spec = delta.spec
    shape = struct.pack(f"<B{len(spec.shape)}Q", len(spec.shape), *spec.shape)
    base = b"\0" if delta.base_fingerprint is None else b"\1" + delta.base_fingerprint.to_bytes()
    chunks = [CHUNK.pack(MODES.index(c.mode), c.start, c.size, c.changed, len(c.body)) for c in delta.chunks]
    count = struct.pack("<I", len(chunks))
    return b"".join([_text(spec.name), _text(spec.dtype), shape, base, delta.fingerprint.to_bytes(), count, *chunks])


class _Table:
    """Reads the decoded table; every length is compared with what is there before anything is made of it."""

    def __init__(self, raw: bytes, bodies: memoryview, where: str) -> None:
        self._raw, self._at = raw, 0
        self._bodies, self._used = bodies, 0
        self._where = where

    def delta(self, version: int) -> Delta:
        base, digest = self._text(), self._text()
        entries: dict[str, Entry] = {}
        while self._at < len(self._raw):
            entry = self._entry()
            if entry.name in entries:
                raise InputError(f"{self._where}: {entry.name} is named twice")
            entries[entry.name] = entry
        if self._used != len(self._bodies):
            raise InputError(
                f"{self._where}: its table tells of {self._used} bytes of chunks, there are {len(self._bodies)}"
            )
        return Delta(version, base, digest, tuple(entries.values()))

    def _take(self, size: int) -> bytes:
        if size > len(self._raw) - self._at:
            raise InputError(f"{self._where}: its table is cut off at byte {self._at}")
        self._at += size
        return self._raw[self._at - size : self._at]

    def _text(self) -> str:
        (length,) = struct.unpack("<H", self._take(2))
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            raise InputError(f"{self._where}: a text in its table is not UTF-8") from error

    def _spec(self) -> TensorSpec:
        name, dtype = self._text(), self._text()
        (axes,) = self._take(1)
        shape = struct.unpack(f"<{axes}Q", self._take(8 * axes)) if axes <= MOST_AXES else ()
        if dtype not in ITEM_BYTES or axes > MOST_AXES or prod(shape) > MOST_ELEMENTS:
            raise InputError(f"{self._where}: {name} claims {axes} axes {list(shape)} of type {dtype!r}")
        return TensorSpec(name=name, dtype=dtype, shape=shape)

    def _print(self) -> Fingerprint:
        return Fingerprint.from_bytes(self._take(16))

    def _entry(self) -> Entry:
        spec = self._spec()
        base = self._print() if self._take(1) != b"\0" else None
        new = self._print()
        (count,) = struct.unpack("<I", self._take(4))
        chunks: list[Chunk] = []
        for numbers in CHUNK.iter_unpack(self._take(CHUNK.size * count)):
            chunks.append(self._chunk(spec, numbers, chunks[-1] if chunks else None))
        changed = sum(chunk.changed for chunk in chunks)
        if changed > spec.size:
            raise InputError(f"{self._where}: {spec.name} has {spec.size} elements, {changed} are said to change")
        return Entry(spec.name, spec.dtype, spec.shape, base, new, changed, tuple(chunks))

    def _chunk(self, spec: TensorSpec, numbers: tuple[int, ...], before: Chunk | None) -> Chunk:
        mode, start, size, changed, length = numbers
        again = before is not None and (start, size) == (before.start, before.size)
        free = again or before is None or start >= before.start + before.size
        fits = 0 < size <= CHUNK_ELEMENTS and start + size <= spec.size and changed <= size
        if not (mode < len(MODES) and free and fits) or length > len(self._bodies) - self._used:
            raise InputError(f"{self._where}: chunk {list(numbers)} of {spec.name} is out of order or out of range")
        body = self._bodies[self._used : self._used + length]
        self._used += length
        return Chunk(MODES[mode], start, size, changed, body)

"""A step from one state to the next as one file: a table of tensors with fingerprints, coded chunks, SHA-256.

The layout is described in docs/hotload.md, "The delta format".
"""

import hashlib
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import zstandard
from numpy.typing import NDArray

from groundhop.errors import ChecksumError, InputError
from groundhop.training.hotload import zstd_frames
from groundhop.training.hotload.bits import Bits, TensorSpec, Weights
from groundhop.training.hotload.changes import Change, Encoding, Operation, check_bits
from groundhop.training.hotload.codec import (
    CHUNK_ELEMENTS,
    MODES,
    OPERATIONS,
    Chunk,
    decode_chunk,
    encode_changes,
    encode_chunk,
)
from groundhop.training.hotload.fingerprint import Fingerprint, fingerprint, fingerprint_at, state_digest
from groundhop.training.hotload.kernels import in_parallel, spans

__all__ = [
    "Change", "Delta", "DeltaSummary", "Encoding", "Entry", "Operation", "TensorDelta",
    "apply_delta", "dump_delta", "encode_tensor", "prints_of", "read_delta", "write_delta",
]  # fmt: skip

MAGIC = b"GHDELTA2"
DIGEST_BYTES = 32
HEAD = struct.Struct("<8sQII")
"""Magic, version, bytes of the coded table, bytes of the decoded table."""
TABLE_BYTES = 1 << 28
"""Largest table we read."""

Old = Callable[[int, int], Bits]
"""Gives the canonical old bits of elements `start` to `stop` of a tensor."""


@dataclass(frozen=True, slots=True)
class TensorDelta:
    """What is sent of one tensor."""

    spec: TensorSpec
    base_fingerprint: Fingerprint | None
    """Print of the old bits; None where the result does not depend on them."""
    fingerprint: Fingerprint
    chunks: tuple[Chunk, ...]

    @property
    def changed(self) -> int:
        """Elements that are sent."""
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
    """Elements sent."""
    total: int
    """Elements of the tensors that have an entry."""
    encodings: Mapping[str, int]
    """Bytes of chunk bodies by their encoding."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A delta that was read and whose SHA-256 and lengths are right."""

    version: int
    base_digest: str
    digest: str
    entries: tuple[Entry, ...]

    def changes(self, entry: Entry, old: Old | None = None) -> Iterator[Change]:
        """Decode the changes of a tensor, chunk by chunk in order. Raises: InputError for a malformed chunk, or for one that needs `old`."""
        for chunk in entry.chunks:
            if chunk.mode == "context" and old is None:
                raise InputError(f"{entry.name}: a chunk in context encoding needs the old bits")
            before = old(chunk.start, chunk.start + chunk.size) if old and chunk.mode == "context" else None
            yield decode_chunk(chunk, entry.spec.unit, before, f"{entry.name} at {chunk.start}")

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
    also: NDArray[np.int64] | None = None,
    prints: tuple[Fingerprint | None, Fingerprint | None] = (None, None),
    threads: int | None = None,
) -> TensorDelta | None:
    """Code one tensor, None when there is nothing to send.

    `also`: positions that are sent whatever they hold, so that a retry reaches what an attempt before it may have
    written; the operation is then `overwrite` and no base is demanded. `prints`: those of `old` and `new` where known,
    which saves a read of each; a wrong one makes a delta that every reader refuses.
    Raises: InputError for bits that do not fit `spec`.
    """
    check_bits(spec.name, new, spec.unit, spec.size)
    if old is not None:
        check_bits(spec.name, old, spec.unit, spec.size)
    if also is not None and encoding != "dense":
        encoding = "overwrite"

    def one(span: tuple[int, int]) -> Chunk | None:
        start, stop = span
        extra = None if also is None else also[(also >= start) & (also < stop)]
        before = None if old is None else old[start:stop]
        if extra is not None and before is not None and encoding != "dense":
            positions = np.union1d(np.flatnonzero(before != new[start:stop]), extra - start).astype(np.uint32)
            return encode_changes(Change(start, positions, "overwrite", new[start:stop][positions]), stop - start)
        return encode_chunk(before, new[start:stop], start, encoding)

    chunks = tuple(chunk for chunk in in_parallel(one, spans(spec.size, CHUNK_ELEMENTS), threads) if chunk)
    if not chunks and old is not None:
        return None
    base = None if old is None or also is not None else prints[0] or fingerprint(old, threads=threads)
    return TensorDelta(spec, base, prints[1] or fingerprint(new, threads=threads), chunks)


def dump_delta(deltas: Iterable[TensorDelta], *, version: int, base_digest: str, digest: str) -> bytes:
    """The bytes of a delta file."""
    rows, bodies = [_text(base_digest), _text(digest)], []
    for delta in deltas:
        rows.append(_row(delta))
        bodies += [chunk.body for chunk in delta.chunks]
    table = b"".join(rows)
    coded = zstandard.ZstdCompressor(level=9).compress(table)
    content = b"".join([HEAD.pack(MAGIC, version, len(coded), len(table)), coded, *bodies])
    return content + hashlib.sha256(content).digest()


def write_delta(
    path: Path, deltas: Iterable[TensorDelta], *, version: int, base_digest: str, digest: str
) -> DeltaSummary:
    """Write a delta file at once (temporary file, then rename)."""
    kept = list(deltas)
    content = dump_delta(kept, version=version, base_digest=base_digest, digest=digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    temporary.replace(path)
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
    table = _Table(zstd_frames.decode_exact(content[HEAD.size : HEAD.size + coded], size, where), where)
    return table.delta(version, content[HEAD.size + coded :])


def prints_of(weights: Weights) -> dict[str, Fingerprint]:
    """The fingerprints of all tensors; one read of the state."""
    return {name: fingerprint(weights.bits(name)) for name in weights.specs}


def apply_delta(delta: Delta, weights: Weights, prints: MutableMapping[str, Fingerprint] | None = None) -> None:
    """Move `weights` to the delta's state; tensors that are there already stay as they are.

    `prints`: the fingerprints of all tensors of `weights`, where the caller keeps them. Then no tensor is read whole,
    the digests of the state are checked too, and the new prints are put in. Without them each tensor of the delta is
    read once. All is decoded and every result checked before the first element is written.
    Raises: ChecksumError for another base or result, InputError for a delta that does not fit; `weights` are then as before.
    """
    known = dict(prints) if prints is not None else {}
    _check_state(delta.base_digest, delta.digest, weights, known)
    plan: list[tuple[Bits, Change, Bits, Bits]] = []
    for entry in delta.entries:
        bits = _tensor(entry, weights)
        present = known.get(entry.name) or fingerprint(bits)
        if present == entry.fingerprint:
            continue
        if entry.base_fingerprint is not None and present != entry.base_fingerprint:
            raise ChecksumError(
                f"{entry.name}: version {delta.version} builds on {entry.base_fingerprint.hex()}, this is {present.hex()}"
            )
        for change in delta.changes(entry, lambda start, stop, bits=bits: bits[start:stop]):  # type: ignore[misc]
            before = change.gather(bits)
            after = change.result(before)
            present += _print(change, after) - _print(change, before)
            plan.append((bits, change, before, after))
        if present != entry.fingerprint:
            raise ChecksumError(
                f"{entry.name}: version {delta.version} gives {present.hex()}, promised was {entry.fingerprint.hex()}"
            )
        known[entry.name] = entry.fingerprint
    if prints is not None and delta.digest and state_digest(weights.specs, known) != delta.digest:
        raise ChecksumError(f"version {delta.version} does not give the state {delta.digest[:12]} that it promises")
    _write(plan)
    if prints is not None:
        prints.update(known)


def _write(plan: list[tuple[Bits, Change, Bits, Bits]]) -> None:
    done = 0
    try:
        for bits, change, _, after in plan:
            done += 1
            change.scatter(bits, after)
    except BaseException:
        for bits, change, before, _ in reversed(plan[:done]):
            change.scatter(bits, before)
        raise


def _print(change: Change, values: Bits) -> Fingerprint:
    if change.positions is None:
        return fingerprint(values, change.start)
    return fingerprint_at(change.positions, values, change.start)


def _tensor(entry: Entry, weights: Weights) -> Bits:
    spec = weights.specs.get(entry.name)
    if spec is None:
        raise InputError(f"the delta changes {entry.name}, which these weights do not have")
    if spec != entry.spec:
        raise InputError(
            f"{entry.name}: the delta is for {entry.dtype}{list(entry.shape)}, this is {spec.dtype}{list(spec.shape)}"
        )
    bits = weights.bits(entry.name)
    check_bits(entry.name, bits, spec.unit, spec.size)
    return bits


def _check_state(base: str, target: str, weights: Weights, known: Mapping[str, Fingerprint]) -> None:
    if not known or not base:
        return
    here = state_digest(weights.specs, known)
    if here not in (base, target):
        raise ChecksumError(f"the delta builds on the state {base[:12]}, this is {here[:12]}")


_COUNTS = struct.Struct("<QI")
_CHUNK = struct.Struct("<BQIII")


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<H", len(raw)) + raw


def _row(delta: TensorDelta) -> bytes:
    spec = delta.spec
    base = b"\0" if delta.base_fingerprint is None else b"\1" + delta.base_fingerprint.to_bytes()
    shape = struct.pack(f"<B{len(spec.shape)}Q", len(spec.shape), *spec.shape)
    chunks = [_CHUNK.pack(MODES.index(c.mode), c.start, c.size, c.changed, len(c.body)) for c in delta.chunks]
    counts = _COUNTS.pack(delta.changed, len(chunks))
    return b"".join([_text(spec.name), _text(spec.dtype), shape, base, delta.fingerprint.to_bytes(), counts, *chunks])


class _Table:
    """Reads the decoded table; every length is checked against what is there."""

    def __init__(self, raw: bytes, where: str) -> None:
        self._raw, self._at, self._where = raw, 0, where

    def delta(self, version: int, bodies: memoryview) -> Delta:
        base, digest = self._text(), self._text()
        entries: dict[str, Entry] = {}
        at = 0
        while self._at < len(self._raw):
            entry, at = self._entry(bodies, at)
            if entry.name in entries:
                raise InputError(f"{self._where}: {entry.name} is named twice")
            entries[entry.name] = entry
        if at != len(bodies):
            raise InputError(f"{self._where}: need {at} bytes of chunks as its table says, got {len(bodies)}")
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
            raise InputError(f"{self._where}: a name in its table is not UTF-8") from error

    def _entry(self, bodies: memoryview, at: int) -> tuple[Entry, int]:
        name, dtype = self._text(), self._text()
        (axes,) = self._take(1)
        shape = struct.unpack(f"<{axes}Q", self._take(8 * axes))
        spec = TensorSpec(name=name, dtype=dtype, shape=shape)
        if prod(shape) > 1 << 60:
            raise InputError(f"{self._where}: {name} claims the shape {list(shape)}")
        size = spec.unit and spec.size
        base = Fingerprint.from_bytes(self._take(16)) if self._take(1) != b"\0" else None
        new = Fingerprint.from_bytes(self._take(16))
        changed, count = _COUNTS.unpack(self._take(_COUNTS.size))
        chunks: list[Chunk] = []
        for mode, start, length, part, body in _CHUNK.iter_unpack(self._take(_CHUNK.size * count)):
            if mode >= len(MODES) or part > length or start + length > size or body > len(bodies) - at:
                raise InputError(f"{self._where}: a chunk of {name} is out of range")
            chunks.append(Chunk(MODES[mode], start, length, part, bodies[at : at + body]))  # type: ignore[arg-type]
            at += body
        if changed != sum(chunk.changed for chunk in chunks):
            raise InputError(f"{self._where}: the counts of {name} differ")
        return Entry(name, dtype, shape, base, new, changed, tuple(chunks)), at

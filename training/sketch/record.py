"""One sync on the wire: sketches of weights, a delta of the others, FP32 masters where they are asked for.

    head     magic, bytes of the coded table, bytes of the decoded table (little-endian)
    table    MessagePack in Zstandard: versions, digests, a row for each sketched weight, lengths of what follows
    bodies   of each row's steps in order: exponents, then integers, as sections of bytes (`hotload/streams.py`)
    delta    a canonical delta file (docs/hotload.md) of the weights that are not sketched; may be absent
    masters  another one, of dense F32 entries: new masters; may be absent
    SHA-256  of all that came before

Nothing here needs torch, and nothing read makes an object of a type that is not named here.
"""

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import zstandard
from msgspec import Meta, Struct

from groundhop.errors import ChecksumError, InputError
from groundhop.training.hotload import zstd_frames
from groundhop.training.hotload.delta import Delta, TensorDelta, dump_delta, read_delta
from groundhop.training.hotload.fingerprint import Fingerprint
from groundhop.training.hotload.streams import Reader, Writer
from groundhop.training.sketch.expand import Step

MAGIC = b"GHSKTCH1"
HEAD = struct.Struct("<8sII")
DIGEST_BYTES = 32
TABLE_LEVEL = 9
TABLE_BYTES = 1 << 26
"""Largest decoded table that is read."""
FACTOR_ELEMENTS = 1 << 28
"""Largest factor that is decoded."""

Count = Annotated[int, Meta(ge=0, lt=1 << 60)]
Digest = Annotated[str, Meta(min_length=64, max_length=64)]
Print = Annotated[bytes, Meta(min_length=16, max_length=16)]


class StepRow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True):
    """One step of one weight, but for its numbers."""

    seed: Annotated[int, Meta(ge=0, lt=1 << 62)]
    decay: float
    rank: Annotated[int, Meta(ge=1, lt=1 << 24)]
    bits: Literal[8, 16]
    sign_digest: Print
    nbytes: Count
    """Of its body."""


class SketchRow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True):
    """The steps of one weight."""

    name: str
    rows: Count
    columns: Count
    since: Count
    """The version whose master the first step starts from."""
    fingerprint: Print
    """Of the checkpoint's bits after the last step (`hotload/fingerprint.py`)."""
    steps: tuple[StepRow, ...]


class Head(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True):
    """What a record leads from and to."""

    base: Count
    version: Count
    base_digest: Digest
    digest: Digest
    """`state_digest` of the checkpoint's bits before and after."""
    chain: Digest
    """That of the FP32 masters that the trainer began from."""


class _Table(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True):
    head: Head
    sketches: tuple[SketchRow, ...]
    delta_bytes: Count
    masters_bytes: Count


@dataclass(frozen=True, slots=True)
class Sketch:
    """The steps of one weight, coded."""

    row: SketchRow
    bodies: tuple[bytes | memoryview, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in a record, its row as it is before compression."""
        return sum(map(len, self.bodies)) + len(msgspec.msgpack.encode(self.row))

    @property
    def fingerprint(self) -> Fingerprint:
        """Of the checkpoint's bits that it leads to."""
        return Fingerprint.from_bytes(self.row.fingerprint)

    def steps(self) -> list[Step]:
        """Decode the steps. Raises: InputError where a body is damaged."""
        pairs = zip(self.row.steps, self.bodies, strict=True)
        return [_decode(row, body, self.row.rows, f"the sketch of {self.row.name}") for row, body in pairs]


@dataclass(frozen=True, slots=True)
class Record:
    """A record that was read and whose SHA-256 and lengths are right."""

    head: Head
    sketches: tuple[Sketch, ...]
    delta: Delta
    masters: Delta

    @property
    def names(self) -> list[str]:
        """The weights that it says something of."""
        return [
            *(sketch.row.name for sketch in self.sketches),
            *(entry.name for delta in (self.delta, self.masters) for entry in delta.entries),
        ]


def encode_step(step: Step) -> tuple[StepRow, bytes]:
    """A step's row and body."""
    writer = Writer()
    for array in (step.exponents, step.integers):
        planes = np.ascontiguousarray(array).view(np.uint8).reshape(-1, array.itemsize)
        for plane in range(array.itemsize):
            writer.section(np.ascontiguousarray(planes[:, plane]))
    body = writer.bytes()
    bits: Any = 8 * step.integers.itemsize
    row = StepRow(
        seed=step.seed, decay=step.decay, rank=step.rank, bits=bits, sign_digest=step.sign_digest, nbytes=len(body)
    )
    return row, body


def dump_record(
    head: Head, sketches: Iterable[Sketch], delta: Iterable[TensorDelta], masters: Iterable[TensorDelta]
) -> bytes:
    """The bytes of a record. Raises: InputError for a table that no reader would take."""
    kept = list(sketches)
    embedded = [_embedded(tensors, head.version) for tensors in (delta, masters)]
    table = msgspec.msgpack.encode(
        _Table(
            head=head,
            sketches=tuple(sketch.row for sketch in kept),
            delta_bytes=len(embedded[0]),
            masters_bytes=len(embedded[1]),
        )
    )
    if len(table) > TABLE_BYTES:
        raise InputError(f"need a table of at most {TABLE_BYTES} bytes, got {len(table)}")
    coded = zstandard.ZstdCompressor(level=TABLE_LEVEL).compress(table)
    bodies = [body for sketch in kept for body in sketch.bodies]
    content = b"".join([HEAD.pack(MAGIC, len(coded), len(table)), coded, *bodies, *embedded])
    return content + hashlib.sha256(content).digest()


def read_record(source: Path | bytes) -> Record:
    """Read and check a record, or its bytes; factors are decoded when they are asked for.

    Raises: InputError for a malformed one, ChecksumError where its SHA-256 differs.
    """
    where = str(source) if isinstance(source, Path) else "sketch record"
    view = memoryview(source.read_bytes() if isinstance(source, Path) else source)
    if len(view) < HEAD.size + DIGEST_BYTES:
        raise InputError(f"{where}: need at least {HEAD.size + DIGEST_BYTES} bytes, got {len(view)}")
    magic, coded, size = HEAD.unpack(view[: HEAD.size])
    if magic != MAGIC:
        raise InputError(f"{where} is not a sketch record: it begins with {magic!r}")
    content = view[:-DIGEST_BYTES]
    if hashlib.sha256(content).digest() != view[-DIGEST_BYTES:]:
        raise ChecksumError(f"{where}: its bytes differ from its SHA-256")
    if HEAD.size + coded > len(content) or size > TABLE_BYTES:
        raise InputError(f"{where}: its table claims {coded} bytes ({size} decoded), the record has {len(view)}")
    raw = zstd_frames.decode_exact(content[HEAD.size : HEAD.size + coded], size, where)
    try:
        table = msgspec.msgpack.decode(raw, type=_Table)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InputError(f"{where}: its table cannot be read: {error}") from error
    return _record(table, content[HEAD.size + coded :], where)


def _record(table: _Table, rest: memoryview, where: str) -> Record:
    claimed = sum(step.nbytes for row in table.sketches for step in row.steps)
    claimed += table.delta_bytes + table.masters_bytes
    if claimed != len(rest):
        raise InputError(f"{where}: its table tells of {claimed} bytes of bodies, there are {len(rest)}")
    at, sketches = 0, []
    for row in table.sketches:
        if any(row.rows * step.rank > FACTOR_ELEMENTS for step in row.steps) or not row.steps:
            raise InputError(f"{where}: {row.name} claims factors of {row.rows} rows, {len(row.steps)} of them")
        bodies = []
        for step in row.steps:
            bodies.append(rest[at : at + step.nbytes])
            at += step.nbytes
        sketches.append(Sketch(row, tuple(bodies)))
    version, stop = table.head.version, at + table.delta_bytes
    record = Record(table.head, tuple(sketches), _read(rest[at:stop], version), _read(rest[stop:], version))
    if len(set(record.names)) < len(record.names):
        raise InputError(f"{where}: a weight is named twice")
    if any(entry.dtype != "F32" or record.masters.needs_old(entry) for entry in record.masters.entries):
        raise InputError(f"{where}: need masters whole and of F32")
    return record


def _embedded(tensors: Iterable[TensorDelta], version: int) -> bytes:
    kept = list(tensors)
    return dump_delta(kept, version=version, base_digest="", digest="") if kept else b""


def _read(content: memoryview, version: int) -> Delta:
    return read_delta(bytes(content)) if len(content) else Delta(version, "", "", ())


def _decode(row: StepRow, body: bytes | memoryview, rows: int, where: str) -> Step:
    reader = Reader(body, where)
    exponents = _planes(reader, rows, np.dtype("<i2"))
    integers = _planes(reader, rows * row.rank, np.dtype("i1" if row.bits == 8 else "<i2"))
    reader.end()
    return Step(row.seed, row.decay, integers.reshape(rows, row.rank), exponents, row.sign_digest)


def _planes(reader: Reader, size: int, dtype: Any) -> Any:
    planes = np.empty((size, dtype.itemsize), np.uint8)
    for plane in range(dtype.itemsize):
        planes[:, plane] = reader.section(size)
    return planes.view(dtype).reshape(-1)

"""The write-ahead set: which elements an attempt may have written somewhere, on disk before the first of them leaves.

One file an attempt. It holds the positions and the new bits of every element that is sent, so it is also the redo log of the
publisher's own baseline: writing it once more, or from the middle of a first time, gives the same bits.

Layout, little-endian: magic (8 bytes), then frames of u32 head length, u64 body length, head (JSON), body, CRC-32 of the
head and the body (u32). The first head is an `Attempt`, then a `Row` each tensor with its positions and bits as body, last
an `End`. A frame that is cut or damaged ends the file: it was not yet synchronised, so its bits never left.
"""

import contextlib
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from groundhop.errors import InputError
from groundhop.training.hotload.bits import Bits
from groundhop.training.hotload.durable import clear_disk_errors, sync
from groundhop.training.hotload.fingerprint import Fingerprint

MAGIC = b"GHTOUCH1"
LENGTHS = struct.Struct("<IQ")
CHECK = struct.Struct("<I")
MOST_HEAD_BYTES = 1 << 20
SUFFIX = ".touched"
UNITS: Mapping[int, Any] = {1: np.dtype(np.uint8), 2: np.dtype("<u2"), 4: np.dtype("<u4")}

Form = Literal["all", "bitmap", "u32", "u64"]
Positions = NDArray[np.int64] | None
"""Increasing; None means every element."""


class Attempt(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which attempt a file is about."""

    txn: str
    identity: str
    version: int
    base: str
    """Identity of the baseline that its bits change."""
    epoch: int


class Row(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor's frame."""

    name: str
    size: int
    """Units of the whole tensor."""
    unit_bytes: int
    count: int
    """How many of them are sent."""
    form: Form
    fingerprint: str
    """Of the whole tensor with the new bits."""


class End(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All tensors are in, and the snapshot's index is about to be written."""

    digest: str
    """Of the whole state with the new bits."""
    changed: int
    total: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Touched:
    """What one tensor's part of an attempt writes."""

    name: str
    size: int
    positions: Positions
    values: Bits
    fingerprint: Fingerprint


class TouchedWriter:
    """Appends to the file of a running attempt."""

    def __init__(self, folder: Path, attempt: Attempt) -> None:
        """Begin `folder/<version>-<txn>.touched`. Raises: SpaceError, StoreError."""
        self.path = folder / f"{attempt.version:012d}-{attempt.txn}{SUFFIX}"
        with clear_disk_errors(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("xb")
            self._file.write(MAGIC)
        self._frame(attempt, ())
        self.sync()
        sync(folder)

    def append(self, touched: Touched) -> None:
        """Add one tensor; it counts after the next `sync`."""
        form, positions = _pack(touched.positions, touched.size)
        unit = touched.values.dtype.itemsize
        head = Row(
            name=touched.name,
            size=touched.size,
            unit_bytes=unit,
            count=touched.values.size,
            form=form,
            fingerprint=touched.fingerprint.hex(),
        )
        self._frame(head, (positions, np.ascontiguousarray(touched.values, UNITS[unit])))

    def end(self, end: End) -> None:
        """Say that all tensors are in; durable when this returns."""
        self._frame(end, ())
        self.sync()

    def sync(self) -> None:
        """Return when everything so far is on disk."""
        with clear_disk_errors(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; what was not synchronised may be lost."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _frame(self, head: Struct, arrays: Iterable[NDArray[Any]]) -> None:
        raw = msgspec.json.encode(head)
        bodies = [array.view(np.uint8).data for array in arrays if array.size]
        check = zlib.crc32(raw)
        for body in bodies:
            check = zlib.crc32(body, check)
        with clear_disk_errors(self.path):
            self._file.write(LENGTHS.pack(len(raw), sum(len(body) for body in bodies)) + raw)
            for body in bodies:
                self._file.write(body)
            self._file.write(CHECK.pack(check))


@dataclass(frozen=True, slots=True)
class TouchedFile:
    """An attempt's file, read."""

    path: Path
    attempt: Attempt
    end: End | None
    """None when the attempt was cut off before all tensors were in."""

    def rows(self) -> Iterator[Touched]:
        """All tensors, one at a time, in the order they were appended."""
        for raw, body in _frames(self.path):
            if (row := _decode(raw, Row)) is not None:
                yield _unpack(row, body, self.path)


def read_touched(folder: Path) -> list[TouchedFile]:
    """The files of all attempts that were not cleared, oldest version first. A file cut off in its first frame is removed."""
    found = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        attempt: Attempt | None = None
        end: End | None = None
        for raw, _ in _frames(path, bodies=False):
            attempt = attempt or _decode(raw, Attempt)
            end = _decode(raw, End)
        if attempt is None:
            path.unlink()
        else:
            found.append(TouchedFile(path, attempt, end))
    return sorted(found, key=lambda file: file.attempt.version)


def union(files: Iterable[TouchedFile]) -> dict[str, NDArray[np.int64]]:
    """Positions that any of the attempts may have written, by tensor; increasing."""
    together: dict[str, NDArray[np.int64]] = {}
    for file in files:
        for row in file.rows():
            positions = np.arange(row.size, dtype=np.int64) if row.positions is None else row.positions
            known = together.get(row.name)
            together[row.name] = positions if known is None else np.union1d(known, positions)
    return together


def clear(files: Iterable[TouchedFile]) -> None:
    """Remove files whose attempts are committed, or covered by a later file."""
    for file in files:
        file.path.unlink(missing_ok=True)


def _pack(positions: Positions, size: int) -> tuple[Form, NDArray[Any]]:
    """The smallest of the forms."""
    if positions is None:
        return "all", np.empty(0, np.uint8)
    wide = size > 1 << 32
    if positions.size * (8 if wide else 4) > size // 8:
        mask = np.zeros(size, np.bool_)
        mask[positions] = True
        return "bitmap", np.packbits(mask, bitorder="little")
    return ("u64", positions.astype("<u8")) if wide else ("u32", positions.astype("<u4"))


def _unpack(row: Row, body: bytes, path: Path) -> Touched:
    lengths = {"all": 0, "bitmap": -(-row.size // 8), "u32": 4 * row.count, "u64": 8 * row.count}
    cut = lengths[row.form]
    if row.unit_bytes not in UNITS or not 0 <= row.count <= row.size or len(body) != cut + row.count * row.unit_bytes:
        raise InputError(f"{path}: the frame of {row.name} does not have the length that its head says")
    values = np.frombuffer(body, UNITS[row.unit_bytes], row.count, cut)
    raw = np.frombuffer(body, np.uint8, cut)
    match row.form:
        case "all":
            positions = None
        case "bitmap":
            positions = np.flatnonzero(np.unpackbits(raw, count=row.size, bitorder="little"))
        case "u32":
            positions = raw.view("<u4").astype(np.int64)
        case "u64":
            positions = raw.view("<u8").astype(np.int64)
    if (row.size if positions is None else positions.size) != row.count:
        raise InputError(f"{path}: the frame of {row.name} has another number of positions than of values")
    return Touched(row.name, row.size, positions, values, Fingerprint.from_hex(row.fingerprint))


def _frames(path: Path, bodies: bool = True) -> Iterator[tuple[bytes, bytes]]:
    """Head and body of each whole frame; with `bodies` False only heads, unchecked, and the last frame's check."""
    left = path.stat().st_size - len(MAGIC)
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return
        while left >= LENGTHS.size:
            head_bytes, body_bytes = LENGTHS.unpack(file.read(LENGTHS.size))
            left -= LENGTHS.size + head_bytes + body_bytes + CHECK.size
            if left < 0 or head_bytes > MOST_HEAD_BYTES:
                return
            head = file.read(head_bytes)
            if not bodies and left > 0:
                file.seek(body_bytes + CHECK.size, os.SEEK_CUR)
                yield head, b""
                continue
            body = file.read(body_bytes)
            if CHECK.unpack(file.read(CHECK.size))[0] != zlib.crc32(body, zlib.crc32(head)):
                return
            yield head, body


Kind = TypeVar("Kind", bound=Struct)


def _decode(raw: bytes, kind: type[Kind]) -> Kind | None:
    """The head as `kind`, None where it is another one."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError:
        return None

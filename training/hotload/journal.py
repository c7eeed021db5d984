"""What a replica's weights are, on disk before the first of them is written: the memory of an agent that was killed.

A journal says what the replica last held for certain, and, from before the first write until the bits are verified, what is
being written. `writing` set means DIRTY: nobody serves until a digest over the live weights, an overwrite or a whole load
says what they are (`control-plane.md` 5.3, invariant J-I4).
"""

import os
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from groundhop.errors import InputError

MOST_BYTES = 64 * 1024


class Held(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A state that was verified, bit for bit, by its digest."""

    identity: str
    version: int
    digest: str
    epoch: int = 0
    """Fencing number of the publisher it came from; an older one is refused."""


class Writing(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An unfinished write."""

    txn: str
    to: Held


class Record(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of the file."""

    held: Held | None = None
    """What the weights were when they were last known; None before the first time."""
    committed: Held | None = None
    """The last state that the whole fleet agreed on; a local checkpoint of it mends anything."""
    writing: Writing | None = None
    """None when clean."""

    @property
    def state(self) -> Literal["clean", "dirty", "unknown"]:
        """Whether `held` says what the weights are."""
        return "dirty" if self.writing is not None else "clean" if self.held is not None else "unknown"


class Journal:
    """One file, replaced as a whole and synchronised to the disk before any method returns."""

    def __init__(self, path: Path) -> None:
        """Open the journal at `path`, which may be absent. Raises: InputError when it cannot be read."""
        self._path = path
        self._record = _read(path)

    @property
    def record(self) -> Record:
        """What the file says."""
        return self._record

    def begin(self, writing: Writing) -> None:
        """Say, before the first write, that the weights are about to change."""
        self._write(msgspec.structs.replace(self._record, writing=writing))

    def hold(self, held: Held) -> None:
        """Say that the weights were verified to be `held`: clean."""
        self._write(msgspec.structs.replace(self._record, held=held, writing=None))

    def forget(self) -> None:
        """Say that nobody knows the weights, as after the engine's restart: clean of writes, and holding nothing."""
        self._write(msgspec.structs.replace(self._record, held=None, writing=None))

    def commit(self) -> None:
        """Say that what is held is what the fleet agreed on."""
        assert self._record.state == "clean"
        self._write(msgspec.structs.replace(self._record, committed=self._record.held))

    def _write(self, record: Record) -> None:
        if record == self._record:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_name(self._path.name + ".tmp")
        with temporary.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(record), indent=1))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self._record = record


def _read(path: Path) -> Record:
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return Record()
    if len(raw) > MOST_BYTES:
        raise InputError(f"{path}: a journal has at most {MOST_BYTES} bytes")
    try:
        return msgspec.json.decode(raw, type=Record)
    except msgspec.MsgspecError as error:
        raise InputError(
            f"{path} cannot be read as a journal: {error}. Remove it to reload the replica whole"
        ) from error

"""What a replica's weights are, on disk before the first of them is written: the memory of an agent that was killed.

Clean: the weights are `held`. Dirty: `writing` began, nobody knows what the weights are, and nobody serves until a digest over
the live bits, an overwrite or a whole load says what they are (`control-plane.md` 5.3, invariant J-I4). Prepared: what was
written is verified, and waits for the commit of the whole fleet.
"""

from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from groundhop.errors import InputError
from groundhop.training.hotload import durable

MOST_BYTES = 64 * 1024

JournalState = Literal["unknown", "clean", "dirty", "prepared"]


class Held(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A state of the weights."""

    identity: str
    version: int
    digest: str
    """Over every bit."""
    epoch: int = 0
    """Fencing number of the publisher it came from; an older one's snapshots are refused from then on."""


class Writing(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An attempt to reach another state."""

    txn: str
    to: Held
    verified: bool = False
    """Whether the weights were seen to be `to`."""


class Record(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of the file."""

    held: Held | None = None
    """The last state that was served; None where no snapshot names it."""
    writing: Writing | None = None

    @property
    def state(self) -> JournalState:
        """In one word."""
        if self.writing is not None:
            return "prepared" if self.writing.verified else "dirty"
        return "unknown" if self.held is None else "clean"

    @property
    def live(self) -> Held | None:
        """What the weights are for certain; None where nobody knows."""
        match self.state:
            case "prepared":
                return self.writing.to if self.writing else None
            case "clean":
                return self.held
            case _:
                return None


class Journal:
    """One file, replaced as a whole and synchronised to the disk before any method returns."""

    def __init__(self, path: Path | None) -> None:
        """Open the journal at `path`, which may be absent; with None, keep it in memory.

        Raises: InputError when it cannot be read.
        """
        self._path = path
        self._record = Record() if path is None else _read(path)

    @property
    def record(self) -> Record:
        """What the file says."""
        return self._record

    def begin(self, txn: str, to: Held) -> None:
        """Say, before the first write, that the weights are about to become `to`: dirty."""
        self._write(Record(held=self._record.held, writing=Writing(txn=txn, to=to)))

    def verify(self) -> None:
        """Say that the weights were seen to be what was written: prepared."""
        assert self._record.writing is not None
        writing = msgspec.structs.replace(self._record.writing, verified=True)
        self._write(Record(held=self._record.held, writing=writing))

    def doubt(self) -> None:
        """Say that what was written must not be served: dirty again."""
        if self._record.writing is not None:
            writing = msgspec.structs.replace(self._record.writing, verified=False)
            self._write(Record(held=self._record.held, writing=writing))

    def hold(self, held: Held | None) -> None:
        """Say that the weights are `held`, or, with None, weights that no snapshot names: clean."""
        self._write(Record(held=held))

    def _write(self, record: Record) -> None:
        if self._path is not None and record != self._record:
            durable.write(self._path, msgspec.json.format(msgspec.json.encode(record), indent=1))
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
        raise InputError(f"{path} cannot be read as a journal: {error}. Remove it to load the replica anew") from error

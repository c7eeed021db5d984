"""The durable ledger: every event is on disk before anything follows from it; a killed control plane finds its state again.

One SQLite file in WAL mode with `synchronous=FULL`, so that a committed event survives kill -9 and power loss. The state is
what the events add up to; it is kept beside them now and then only so that a start need not read them all.
"""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from groundhop.errors import ConflictError, InputError, SpaceError, StoreError
from groundhop.training.hotload.control.records import Configured, Deployment, Event
from groundhop.training.hotload.control.states import evolve
from groundhop.training.hotload.control.wire import LedgerEntry

SAVE_EVERY = 1000
"""Events of a deployment between two saved states."""
FORMAT = 1
"""Of the file (`PRAGMA user_version`). A file of another one is refused, not guessed at."""
BUSY_S = 1.0

_TABLES = """
CREATE TABLE IF NOT EXISTS events (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, deployment TEXT NOT NULL, body BLOB NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS events_by_deployment ON events (deployment, sequence);
CREATE TABLE IF NOT EXISTS states (
    deployment TEXT PRIMARY KEY, sequence INTEGER NOT NULL, body BLOB NOT NULL
) STRICT, WITHOUT ROWID;
"""


class Entry(NamedTuple):
    """One event as it lies in the ledger."""

    sequence: int
    time: float
    event: Event


class Ledger:
    """An open ledger. One process at a time; a second one is refused."""

    def __init__(self, path: Path) -> None:
        """Open or create. Raises: ConflictError where another process has it open; StoreError; InputError for another format."""
        self._since_saved: dict[str, int] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            self._database.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=FULL")
            # Takes the lock that EXCLUSIVE then keeps until the process ends, however it ends.
            self._database.execute("BEGIN IMMEDIATE")
            (found,) = self._database.execute("PRAGMA user_version").fetchone()
            if found not in (0, FORMAT):
                raise InputError(f"the ledger {path.name} has format {found}, this version writes {FORMAT}")
            for statement in filter(None, map(str.strip, _TABLES.split(";"))):
                self._database.execute(statement)
            self._database.execute(f"PRAGMA user_version={FORMAT}")
            self._database.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise ConflictError(f"another control plane has the ledger {path.name} open") from error
            raise _explain(error) from error
        except (sqlite3.DatabaseError, OSError) as error:
            raise StoreError(f"cannot open the ledger {path.name}: {error}") from error

    def close(self) -> None:
        """Let it go."""
        self._database.close()

    def append(self, deployment: str, event: Event, time: float) -> int:
        """Write one event; it is durable when this returns. Gives its sequence number. Raises: SpaceError, StoreError."""
        try:
            cursor = self._database.execute(
                "INSERT INTO events (time, deployment, body) VALUES (?, ?, ?)",
                (time, deployment, msgspec.json.encode(event)),
            )
        except sqlite3.Error as error:
            raise _explain(error) from error
        self._since_saved[deployment] = self._since_saved.get(deployment, 0) + 1
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def save(self, state: Deployment, sequence: int) -> None:
        """Keep a state that the events up to `sequence` add up to, where enough came since the last one."""
        if self._since_saved.get(state.name, 0) < SAVE_EVERY:
            return
        try:
            self._database.execute(
                "INSERT OR REPLACE INTO states VALUES (?, ?, ?)", (state.name, sequence, msgspec.json.encode(state))
            )
        except sqlite3.Error as error:
            raise _explain(error) from error
        self._since_saved[state.name] = 0

    def load(self) -> dict[str, Deployment]:
        """Every deployment's state. Raises: InputError where an event cannot be read."""
        found: dict[str, Deployment] = {}
        names = [name for (name,) in self._database.execute("SELECT DISTINCT deployment FROM events")]
        for name in names:
            state, sequence = self._saved(name)
            for entry in self._entries(name, sequence, -1):
                if state is None:
                    # A deployment's first event is its configuration: it is written before anything else can name it.
                    assert isinstance(entry.event, Configured)
                    state = Deployment(name=name, config=entry.event.config)
                state = evolve(state, entry.event, entry.time)
                self._since_saved[name] = self._since_saved.get(name, 0) + 1
            assert state is not None
            found[name] = state
        return found

    def read(self, deployment: str, after: int, limit: int) -> list[LedgerEntry]:
        """Events after a sequence number, oldest first."""
        return [
            LedgerEntry(
                sequence=entry.sequence,
                time=entry.time,
                kind=type(entry.event).__name__,
                body=msgspec.Raw(msgspec.json.encode(entry.event)),
            )
            for entry in self._entries(deployment, after, limit)
        ]

    def _saved(self, deployment: str) -> tuple[Deployment | None, int]:
        row = self._database.execute("SELECT sequence, body FROM states WHERE deployment=?", (deployment,)).fetchone()
        if row is None:
            return None, 0
        try:
            return msgspec.json.decode(row[1], type=Deployment), int(row[0])
        except msgspec.DecodeError:
            # Written by another version: the events say the same.
            return None, 0

    def _entries(self, deployment: str, after: int, limit: int) -> Iterator[Entry]:
        rows = self._database.execute(
            "SELECT sequence, time, body FROM events WHERE deployment=? AND sequence>? ORDER BY sequence LIMIT ?",
            (deployment, after, limit),
        )
        for sequence, time, body in rows:
            try:
                event = msgspec.json.decode(body, type=Event)
            except msgspec.DecodeError as error:
                raise InputError(f"event {sequence} of the ledger cannot be read: {error}") from error
            yield Entry(sequence, time, event)


def _explain(error: sqlite3.Error) -> StoreError:
    if "full" in str(error):
        return SpaceError("no space left for the ledger: nothing was changed")
    return StoreError(f"the ledger cannot be written: {error}")

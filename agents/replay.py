"""Keep everything that was fetched: a content-addressed store in SQLite, and a provider that answers from it.

The store is cache, test double and audit trail at once. A request's address is the SHA-256 of provider, version and
request; its body is the answer's JSON under zstd. Model calls are never kept here: samples of one question must differ.
"""

import asyncio
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import zstandard

from groundhop.agents.providers import Fetched, Provider, Request, request_hash
from groundhop.errors import InputError, ProviderError

logger = logging.getLogger(__name__)

Mode = Literal["live", "fallback", "strict"]
T = TypeVar("T")

_TABLE = """
CREATE TABLE IF NOT EXISTS fetched (
    hash TEXT PRIMARY KEY,
    provider TEXT NOT NULL,
    fetched_at REAL NOT NULL,
    body BLOB NOT NULL
) WITHOUT ROWID
"""
_BUSY_S = 60.0
_LOCKED_RETRIES = 5


class ReplayStore:
    """Answers by request hash. Any number of processes may read and write one file at once."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        """Open or create the store. Raises: InputError when the file is something else."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._uri = f"{path.resolve().as_uri()}?mode={'ro' if read_only else 'rwc'}"
        self._local = threading.local()
        self._writing = threading.Lock()
        try:
            if not read_only:
                self._retry(lambda database: database.execute(_TABLE))
            self._retry(lambda database: database.execute("SELECT count(*) FROM fetched").fetchone())
        except sqlite3.DatabaseError as error:
            raise InputError(f"{path} is not a replay store: {error}") from error

    def get(self, address: str) -> Fetched | None:
        """The answer of that hash, or None."""
        row = self._retry(lambda db: db.execute("SELECT body FROM fetched WHERE hash = ?", (address,)).fetchone())
        return None if row is None else _unpack(row[0])

    def put(self, answer: Fetched) -> None:
        """Keep an answer; a later one to the same request takes its place."""
        address = request_hash(answer.provider, answer.version, answer.request)
        row = (address, answer.provider, answer.fetched_at, _pack(answer))
        with self._writing:
            self._retry(lambda db: db.execute("INSERT OR REPLACE INTO fetched VALUES (?, ?, ?, ?)", row))

    def __len__(self) -> int:
        return int(self._retry(lambda db: db.execute("SELECT count(*) FROM fetched").fetchone()[0]))

    def __iter__(self) -> Iterator[Fetched]:
        """All answers, ordered by hash."""
        for (body,) in self._database().execute("SELECT body FROM fetched ORDER BY hash"):
            yield _unpack(body)

    def check(self) -> str:
        """SQLite's own integrity check: `ok`, or what is wrong."""
        return str(self._database().execute("PRAGMA integrity_check").fetchone()[0])

    def _database(self) -> sqlite3.Connection:
        if not hasattr(self._local, "database"):
            database = sqlite3.connect(self._uri, uri=True, timeout=_BUSY_S, isolation_level=None)
            if "mode=rwc" in self._uri:
                database.execute("PRAGMA journal_mode = WAL")
                # With WAL this can lose the last answers on power failure, never corrupt; a kill loses nothing.
                database.execute("PRAGMA synchronous = NORMAL")
            self._local.database = database
        opened: sqlite3.Connection = self._local.database
        return opened

    def _retry(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work`; SQLite gives up at once, whatever the timeout, when a switch to WAL meets another writer."""
        for attempt in range(_LOCKED_RETRIES):
            try:
                return work(self._database())
            except sqlite3.OperationalError as error:
                if ("locked" not in str(error) and "busy" not in str(error)) or attempt + 1 == _LOCKED_RETRIES:
                    raise
                logger.info("%s is busy, waiting", self._path)
                time.sleep(0.1 * 2**attempt)
        raise AssertionError("the loop returns or raises")


class ReplayProvider:
    """Answers as another provider, through the store.

    live: always asks, and keeps the answer. fallback: asks for what the store lacks. strict: never asks.
    Equal requests that wait at once are asked once. Failures, and pages that could not be read, are not kept.
    """

    def __init__(self, provider: Provider, store: ReplayStore, mode: Mode) -> None:
        self.name = provider.name
        self.version = provider.version
        self._provider = provider
        self._store = store
        self._mode = mode
        self._pending: dict[str, asyncio.Task[Fetched]] = {}
        # One thread a store: waiting for a locked file must not stop the event loop.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="replay")

    async def fetch(self, request: Request) -> Fetched:
        """Answer a request. Raises: ProviderError, in strict mode for every request that was never kept."""
        address = request_hash(self.name, self.version, request)
        loop = asyncio.get_running_loop()
        task = self._pending.get(address)
        if task is None or task.get_loop() is not loop:
            task = loop.create_task(self._fetch(address, request))
            self._pending[address] = task
            task.add_done_callback(lambda done: self._forget(address, done))
        # Shielded: one caller that gives up must not take the answer from the others.
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Close the provider and wait for what is being written."""
        await self._provider.close()
        await asyncio.to_thread(self._thread.shutdown)

    def _forget(self, address: str, done: "asyncio.Task[Fetched]") -> None:
        if self._pending.get(address) is done:
            del self._pending[address]
        if not done.cancelled():
            done.exception()  # Marks it as seen where every caller has gone.

    async def _fetch(self, address: str, request: Request) -> Fetched:
        if self._mode != "live":
            kept = await self._in_thread(lambda: self._store.get(address))
            if kept is not None:
                return kept
        if self._mode == "strict":
            raise ProviderError(
                f"strict replay: never recorded: {self.name} {msgspec.json.encode(request).decode()[:200]}"
            )
        answer = await self._provider.fetch(request)
        if answer.complete:
            await self._in_thread(lambda: self._store.put(answer))
        return answer

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            raise ProviderError(f"the replay store failed: {error}") from error


def _pack(answer: Fetched) -> bytes:
    return zstandard.ZstdCompressor(level=6).compress(msgspec.json.encode(answer, order="sorted"))


def _unpack(body: bytes) -> Fetched:
    return msgspec.json.decode(zstandard.ZstdDecompressor().decompress(body), type=Fetched)

"""A publisher's place in a store: its epoch, the numbers it may use, the snapshots and records it writes."""

import logging
import re
from collections.abc import Iterable

from groundhop.errors import FencedError, GroundhopError
from groundhop.training.hotload.fleet import OperationHint
from groundhop.training.hotload.store.index import Layout, SnapshotIndex, read_index
from groundhop.training.hotload.store.log import Abort, Commit, CommitLog
from groundhop.training.hotload.store.objects import Objects
from groundhop.training.hotload.store.writer import SnapshotWriter
from groundhop.training.hotload.touched import Attempt

logger = logging.getLogger(__name__)

_VERSION = re.compile(r"weight_v(\d{1,18})[^/]*/")


class Lease:
    """Everything that is written to the store goes through here, and only while no newer epoch is in the log."""

    def __init__(self, objects: Objects, run_id: str, owner: str, layout: Layout) -> None:
        self.objects, self.run_id, self.owner = objects, run_id, owner
        self.layout: Layout = layout
        self.epoch = 0
        self._log = CommitLog(objects)

    def acquire(self, ttl_s: float, take_over: bool) -> None:
        """Begin a new epoch. Raises: ConflictError while another owner's lease runs, unless `take_over`."""
        self.epoch = self._log.acquire(self.owner, ttl_s, take_over)

    def require(self) -> None:
        """Raises: FencedError when another publisher has taken over."""
        if (epoch := self._log.epoch()) != self.epoch:
            raise FencedError(f"epoch {self.epoch} of {self.owner} is over: epoch {epoch} publishes now")

    def head(self) -> Commit | None:
        """The last commit of anybody; None before the first."""
        return self._log.head()

    def index(self, identity: str, sha256: str = "") -> SnapshotIndex:
        """A snapshot's index, which must have that SHA-256 where it is given. Raises: ChecksumError."""
        return read_index(self.objects, identity, sha256)

    def next_version(self, attempts: Iterable[Attempt]) -> int:
        """One above all that any attempt of anybody may have used, committed or not: a number never names two states."""
        used = {attempt.version for attempt in attempts}
        used |= {entry.version for entry in self._log.entries() if isinstance(entry, Commit | Abort)}
        used |= {int(found[1]) for key in self.objects.list("") if (found := _VERSION.match(key))}
        return max(used, default=-1) + 1

    def commit(self, attempt: Attempt, base: str | None, index_sha256: str, digest: str) -> Commit:
        """Append the commit record. Raises: FencedError, ConflictError where the head is not `base`."""
        return self._log.commit(
            self.epoch,
            base,
            txn=attempt.txn,
            identity=attempt.identity,
            version=attempt.version,
            index_sha256=index_sha256,
            digest=digest,
        )

    def give_up(self, attempt: Attempt, error: BaseException) -> None:
        """Leave an abort record where that is possible; the write-ahead set says what is to be mended either way."""
        reason = f"{type(error).__name__}: {error}"[:500]
        try:
            self._log.abort(
                self.epoch, txn=attempt.txn, identity=attempt.identity, version=attempt.version, reason=reason
            )
        except GroundhopError as another:
            logger.warning("%s: no abort record: %s", attempt.identity, another)

    def delta(self, attempt: Attempt, base_digest: str, operation: OperationHint) -> SnapshotWriter:
        """A writer of an attempt's snapshot."""
        return SnapshotWriter(
            self.objects,
            attempt.identity,
            version=attempt.version,
            kind="delta",
            layout=self.layout,
            base=attempt.base,
            base_digest=base_digest,
            operation=operation,
            run_id=self.run_id,
            epoch=attempt.epoch,
        )

    def full(self, identity: str, version: int) -> SnapshotWriter:
        """A writer of a whole state."""
        return SnapshotWriter(
            self.objects,
            identity,
            version=version,
            kind="full",
            layout=self.layout,
            run_id=self.run_id,
            epoch=self.epoch,
        )

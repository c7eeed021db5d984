"""The store's one append-only log: who publishes, which snapshots count, in which order.

Entry n is the object `log/<n, 12 digits>.json`, created only if absent. So whoever appends entry n has seen all before it,
two publishers can never both extend the same log, and a stale one finds its slot taken and reads why. That makes the one
operation `create` enough for the lease (epochs), for compare-and-set on the head and for the order of commits, on a disk
and on S3 alike (`control-plane.md` 5.4 "two publishers", 5.5 "one atomic append").
"""

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Lock

import msgspec
from msgspec import Struct

from groundhop.errors import ConflictError, FencedError, InputError, MissingError
from groundhop.training.hotload.store.objects import Objects
from groundhop.training.hotload.store.sealed import check_seal, seal, unsealed

FOLDER = "log"
_READERS = 16


class Epoch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="epoch", tag_field="kind"):
    """A publisher takes over. Its epoch is the number of such entries so far, this one included."""

    epoch: int
    owner: str
    ttl_s: float
    """Seconds after this publisher's last entry during which others ask before they take over. Advice between clocks: safety
    comes from the fencing alone."""
    time: float
    """Unix time of the writer's clock."""
    nonce: str
    """Makes each try's bytes its own, so that a try whose answer was lost is recognised."""
    groundhop_sha256: str = msgspec.field(default_factory=unsealed)


class Commit(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="commit", tag_field="kind"):
    """A snapshot becomes the head: the commit record."""

    txn: str
    epoch: int
    identity: str
    version: int
    base: str | None
    """Identity that was the head before; None for the first."""
    index_sha256: str
    """SHA-256 of the snapshot's index object."""
    digest: str
    """State digest of the snapshot."""
    time: float
    nonce: str
    groundhop_sha256: str = msgspec.field(default_factory=unsealed)


class Abort(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="abort", tag_field="kind"):
    """An attempt is given up. The head stays."""

    txn: str
    epoch: int
    identity: str
    version: int
    reason: str
    time: float
    nonce: str
    groundhop_sha256: str = msgspec.field(default_factory=unsealed)


Entry = Epoch | Commit | Abort


@dataclass(frozen=True, slots=True)
class _View:
    """What the log's first `length` entries say."""

    length: int = 0
    lease: Epoch | None = None
    renewed: float = 0.0
    """Time of the lease holder's last entry."""
    head: Commit | None = None

    @property
    def epoch(self) -> int:
        return self.lease.epoch if self.lease else 0

    def after(self, entry: Entry) -> "_View":
        """The view one entry later. Raises: InputError for an entry that no writer of ours appends to this log."""
        match entry:
            case Epoch():
                wrong = entry.epoch != self.epoch + 1
                view = replace(self, lease=entry, renewed=entry.time)
            case Commit():
                head = self.head.identity if self.head else None
                old = self.head.version if self.head else -1
                wrong = entry.epoch != self.epoch or entry.base != head or entry.version <= old
                view = replace(self, head=entry, renewed=entry.time)
            case Abort():
                wrong = entry.epoch != self.epoch
                view = replace(self, renewed=entry.time)
        if wrong:
            raise InputError(f"log entry {self.length} does not follow from those before it: {entry}")
        return replace(view, length=self.length + 1)


@dataclass(slots=True)
class CommitLog:
    """The log of one store. Threads may share it; so may machines."""

    objects: Objects
    _entries: list[Entry] = field(default_factory=list)
    _view: _View = field(default_factory=_View)
    _lock: Lock = field(default_factory=Lock)

    def entries(self) -> list[Entry]:
        """All entries, oldest first. Raises: InputError, ChecksumError for a damaged log, StoreError."""
        with self._lock:
            self._refresh()
            return list(self._entries)

    def head(self) -> Commit | None:
        """The last commit; None before the first."""
        with self._lock:
            return self._refresh().head

    def epoch(self) -> int:
        """The epoch in force; 0 before the first publisher."""
        with self._lock:
            return self._refresh().epoch

    def commits(self) -> list[Commit]:
        """All commits, oldest first."""
        return [entry for entry in self.entries() if isinstance(entry, Commit)]

    def acquire(self, owner: str, ttl_s: float, take_over: bool = False) -> int:
        """Become the publisher and return the new epoch, which fences every earlier one.

        The same owner always gets it, so that a restarted publisher need not wait for itself.
        Raises: ConflictError while another owner's lease runs, unless `take_over`.
        """
        with self._lock:
            while True:
                view, now = self._refresh(), time.time()
                if (lease := view.lease) and not take_over and lease.owner != owner:
                    left = view.renewed + lease.ttl_s - now
                    if left > 0:
                        raise ConflictError(f"{lease.owner} publishes here (epoch {lease.epoch}, {left:.0f} s left)")
                entry = Epoch(epoch=view.epoch + 1, owner=owner, ttl_s=ttl_s, time=now, nonce=uuid.uuid4().hex)
                if self._append(view, entry):
                    return entry.epoch

    def commit(
        self,
        epoch: int,
        expected_head: str | None,
        *,
        txn: str,
        identity: str,
        version: int,
        index_sha256: str,
        digest: str,
    ) -> Commit:
        """Append the commit record; it counts from the moment this object exists. Asking again with the same `txn` and content
        returns the record that is there, so that a lost answer does no harm.

        Raises: FencedError when a newer epoch is in the log, ConflictError when the head is not `expected_head`, when `version`
        is not above the head's, or when `txn` was committed with other content or aborted.
        """
        wanted = Commit(
            txn=txn,
            epoch=epoch,
            identity=identity,
            version=version,
            base=expected_head,
            index_sha256=index_sha256,
            digest=digest,
            time=time.time(),
            nonce=uuid.uuid4().hex,
        )
        with self._lock:
            while True:
                view = self._refresh()
                if done := self._settled(wanted):
                    return done
                self._require_epoch(view, epoch)
                head, old = (view.head.identity, view.head.version) if view.head else (None, -1)
                if head != expected_head:
                    raise ConflictError(f"{identity}: the head is {head}, expected {expected_head}")
                if version <= old:
                    raise ConflictError(f"{identity}: need a version above {old}, got {version}")
                if self._append(view, wanted) and (done := self._settled(wanted)):
                    return done

    def abort(self, epoch: int, *, txn: str, identity: str, version: int, reason: str) -> None:
        """Record that an attempt was given up. Raises: FencedError, ConflictError when it was committed after all.

        This also settles a `commit` that ended in StoreError: its entry is either found here, or can no longer get its slot.
        """
        now, nonce = time.time(), uuid.uuid4().hex
        entry = Abort(txn=txn, epoch=epoch, identity=identity, version=version, reason=reason, time=now, nonce=nonce)
        with self._lock:
            while True:
                view = self._refresh()
                for earlier in self._entries:
                    match earlier:
                        case Commit() if earlier.txn == txn:
                            raise ConflictError(f"transaction {txn} was committed as {earlier.identity}")
                        case Abort() if earlier.txn == txn:
                            return
                        case _:
                            pass
                self._require_epoch(view, epoch)
                if self._append(view, entry):
                    return

    def _settled(self, wanted: Commit) -> Commit | None:
        """The commit of the same transaction that is already in the log."""
        for entry in self._entries:
            match entry:
                case Commit() if entry.txn == wanted.txn:
                    if (entry.identity, entry.index_sha256) != (wanted.identity, wanted.index_sha256):
                        raise ConflictError(
                            f"transaction {wanted.txn} was committed with other content, {entry.identity}"
                        )
                    return entry
                case Abort() if entry.txn == wanted.txn:
                    raise ConflictError(f"transaction {wanted.txn} was aborted: {entry.reason}")
                case _:
                    pass
        return None

    def _require_epoch(self, view: _View, epoch: int) -> None:
        if view.lease is None or view.epoch < epoch:
            raise InputError(f"epoch {epoch} was never acquired here, the log is at {view.epoch}")
        if view.epoch > epoch:
            raise FencedError(f"epoch {epoch} is over: {view.lease.owner} publishes with epoch {view.epoch}")

    def _append(self, view: _View, entry: Entry) -> bool:
        """Whether `entry` is now the one after `view`; False when another took the slot."""
        key, raw = entry_key(view.length), seal(entry)
        # S3 may answer "taken" to the second try of a request whose first answer was lost: then the slot holds our nonce.
        if not self.objects.create(key, raw) and self.objects.get(key) != raw:
            return False
        self._take(raw)
        return True

    def _refresh(self) -> _View:
        """Read what was appended since."""
        if not self._entries:
            self._read_listed()
        while True:
            try:
                self._take(self.objects.get(entry_key(self._view.length)))
            except MissingError:
                return self._view

    def _read_listed(self) -> None:
        """Read a log of many entries at once; the listing is only a hint of how many there are."""
        count = len(self.objects.list(FOLDER))
        with ThreadPoolExecutor(_READERS) as pool:
            for raw in pool.map(self.objects.get, map(entry_key, range(count))):
                self._take(raw)

    def _take(self, raw: bytes) -> None:
        entry = read_entry(raw, entry_key(self._view.length))
        self._view = self._view.after(entry)
        self._entries.append(entry)


def entry_key(number: int) -> str:
    """The key of entry `number`, from 0."""
    return f"{FOLDER}/{number:012d}.json"


def read_entry(raw: bytes, where: str) -> Entry:
    """Decode an entry. Raises: InputError for one that cannot be read, ChecksumError for a damaged one."""
    check_seal(raw, where)
    try:
        return msgspec.json.decode(raw, type=Entry)
    except msgspec.MsgspecError as error:
        raise InputError(f"{where}: the entry cannot be read: {error}") from error

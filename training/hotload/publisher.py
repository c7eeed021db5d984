"""Publish a trainer's weights version after version: what changed since the last committed version, and nothing twice.

The commit protocol (`control-plane.md` 5.5; docs/hotload.md, "Publishing"): compare bits with the baseline; put what will be
sent into the write-ahead set before it leaves; the first attempt is differential, every retry overwrites all that an
unfinished attempt may have written; one commit record moves the head; the baseline follows the record, never the other way.
"""

import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from groundhop.errors import ConflictError, FencedError, GroundhopError, InputError
from groundhop.training.hotload.anchors import add_like, add_weights, scratch
from groundhop.training.hotload.baseline import Baseline, make_baseline
from groundhop.training.hotload.bits import Bits, TensorSpec, Weights
from groundhop.training.hotload.changes import Encoding
from groundhop.training.hotload.checkpoint import Checkpoint, same_tensors
from groundhop.training.hotload.compare import differences
from groundhop.training.hotload.fingerprint import Fingerprint, fingerprint_at, state_digest
from groundhop.training.hotload.fleet import Fleet, NoFleet, OperationHint
from groundhop.training.hotload.named import Given, Named, matched
from groundhop.training.hotload.parts import PartWriter, make_coder
from groundhop.training.hotload.recovery import covered, follow, held_attempt, recover
from groundhop.training.hotload.store.index import Layout, SnapshotIndex, anchor_of, identity_of, read_index
from groundhop.training.hotload.store.log import Commit, CommitLog
from groundhop.training.hotload.store.materialize import add_checkpoint
from groundhop.training.hotload.store.objects import Objects
from groundhop.training.hotload.store.route import route
from groundhop.training.hotload.store.writer import SnapshotWriter
from groundhop.training.hotload.touched import (
    Attempt,
    End,
    Touched,
    TouchedFile,
    TouchedWriter,
    clear,
    read_touched,
    union,
)

logger = logging.getLogger(__name__)

PART_BYTES = 64 * 2**20
NOTHING: NDArray[np.int64] = np.empty(0, np.int64)

_VERSION = re.compile(r"weight_v(\d{1,18})[^/]*/")


@dataclass(frozen=True, slots=True)
class Published:
    """One committed version."""

    identity: str
    version: int
    changed: int
    total: int
    """Elements whose bits differ from the version before, of how many."""
    bytes: int
    """All parts together."""
    encode_s: float
    """Comparing and coding, with the uploads that ran beside it."""
    upload_s: float
    """Waiting for uploads after the last tensor was coded."""
    commit_s: float
    """From the finished snapshot to the commit record: what the fleet took."""
    digest: str
    """Of the whole state."""


class Publisher:
    """The only writer of a chain of snapshots; one thread at a time. After any error the next `publish` makes good."""

    def __init__(
        self,
        objects: Objects,
        folder: Path,
        fleet: Fleet = NoFleet(),  # noqa: B008
        *,
        run_id: str,
        owner: str,
        encoding: Encoding = "auto",
        layout: Layout = "groundhop",
        anchor_every: int = 20,
        part_bytes: int = PART_BYTES,
        mapped: bool = True,
        lease_s: float = 60.0,
        take_over: bool = False,
        checkpoint: Callable[[str], None] = lambda place: None,
    ) -> None:
        """Publish to `objects`, with `folder` for what must survive a kill.

        `run_id`: a store belongs to one run. `owner`: who publishes; another owner waits `lease_s` after our last word, unless
        it says `take_over`. `mapped`: the baseline lies in a file of `folder`, else in memory. `checkpoint` is called with the
        name of each place of the protocol, so that a test can end the process there.
        """
        self._objects, self._folder, self._fleet = objects, folder, fleet
        self._run_id, self._owner, self._encoding, self._layout = run_id, owner, encoding, layout
        self._anchor_every, self._part_bytes, self._mapped = anchor_every, part_bytes, mapped
        self._lease_s, self._take_over, self._at = lease_s, take_over, checkpoint
        self._log = CommitLog(objects)
        self._attempts = folder / "attempts"
        self._epoch = 0
        self._next = 0
        self._since_anchor = 0
        self._baseline: Baseline | None = None

    @property
    def baseline(self) -> Baseline:
        """The last committed state. Raises: InputError before `start`."""
        if self._baseline is None:
            raise InputError("the publisher was not started")
        return self._baseline

    def start(self, source: Named | Weights) -> Published:
        """Take the lease and stand on the last committed version; `source` becomes the first one where there is none.

        Of a store that has versions, `source` gives only the names to compare; `publish` then brings whatever differs.
        Raises: ConflictError while another owner publishes, or where the store is another run's; InputError for other tensors.
        """
        self._epoch = self._log.acquire(self._owner, self._lease_s, self._take_over)
        self._next = 1 + max((*self._used_versions(),), default=-1)
        head = self._log.head()
        if head is None:
            return self._first(source)
        index = read_index(self._objects, head.identity, head.index_sha256)
        if index.run_id != self._run_id:
            raise ConflictError(f"the store holds run {index.run_id!r}, this is {self._run_id!r}")
        self._baseline = recover(self._objects, head, self._folder, self._attempts, self._mapped)
        if isinstance(source, Checkpoint):
            same_tensors(source.specs, self._baseline.specs, f"version {head.version}")
        self._since_anchor = len(route(self._index, None, head.identity).deltas)
        self._settle()
        head = self._log.head() or head
        now = time.monotonic()
        return _published(head, self._index(head.identity), now, now, now)

    def publish(self, named: Named, version: int | None = None) -> Published:
        """Publish the weights in `named` as the next version, or as `version`, which must be higher than any before.

        Raises: InputError for other tensors than the baseline's; ServerError from the fleet, StoreError, SpaceError: the head
        stays, and the next call mends what this one left; FencedError when another publisher has taken over: this one is done.
        """
        self._settle()
        number = self._take_version(version)
        files = read_touched(self._attempts)
        operation = self._operation(files)
        self._require_lease()
        attempt = Attempt(
            txn=uuid.uuid4().hex,
            identity=identity_of(number),
            version=number,
            base=self.baseline.identity,
            epoch=self._epoch,
        )
        try:
            published = self._try(named, attempt, operation, files)
        except BaseException as error:
            self._give_up(attempt, error)
            raise
        self._anchor_if_due()
        return published

    def _try(self, named: Named, attempt: Attempt, operation: OperationHint, files: list[TouchedFile]) -> Published:
        start = time.monotonic()
        journal = TouchedWriter(self._attempts, attempt)
        try:
            self._at("begun")
            with self._writer(attempt, operation) as writer:
                end = self._encode(named, attempt, operation, self._touched(files), journal, writer)
                self._at("encoded")
                journal.end(end)
                # The new file covers all that the older ones name.
                clear(files)
                encoded = time.monotonic()
                self._at("ended")
                index = writer.finish(digest=end.digest, changed=end.changed, total=end.total)
        finally:
            journal.close()
        self._at("indexed")
        uploaded = time.monotonic()
        self._require_lease()
        self._fleet.hot_load(index, operation)
        self._at("held")
        head = self._log.commit(
            self._epoch,
            attempt.base,
            txn=attempt.txn,
            identity=attempt.identity,
            version=attempt.version,
            index_sha256=writer.index_sha256,
            digest=end.digest,
        )
        self._at("committed")
        published = _published(head, index, start, encoded, uploaded)
        self._follow(head)
        return published

    def _encode(
        self,
        named: Named,
        attempt: Attempt,
        operation: OperationHint,
        touched: Mapping[str, NDArray[np.int64]],
        journal: TouchedWriter,
        writer: SnapshotWriter,
    ) -> End:
        baseline = self.baseline
        prints = dict(baseline.prints)
        changed = 0
        coder = make_coder(self._layout, attempt.version, self._encoding)
        parts = PartWriter(coder, writer, journal, self._part_bytes, lambda: self._at("leaving"))
        for spec, bits in matched(named, baseline):
            old = baseline.bits(spec.name)
            positions = differences(old, bits)
            changed += positions.size
            before = prints[spec.name]
            after = before + fingerprint_at(positions, bits[positions]) - fingerprint_at(positions, old[positions])
            also = None
            if operation == "overwrite":
                also = positions = np.union1d(positions, touched.get(spec.name, NOTHING))
            if positions.size:
                prints[spec.name] = after
                journal.append(_row(spec, positions, bits, after))
                parts.add(spec, old, bits, also, (before, after))
        parts.finish()
        total = sum(spec.size for spec in baseline.specs.values())
        return End(digest=state_digest(baseline.specs, prints), changed=changed, total=total, bytes=parts.bytes)

    def _operation(self, files: list[TouchedFile]) -> OperationHint:
        """Differences fit exactly one state; after an attempt whose end nobody knows, bits are written whatever is there."""
        clean = not files and self._fleet.clean_on(self.baseline.identity)
        return "differential" if clean else "overwrite"

    def _touched(self, files: list[TouchedFile]) -> Mapping[str, NDArray[np.int64]]:
        """What unfinished attempts may have written. An element that went back to its baseline value since is among it."""
        return union(files)

    def _settle(self) -> None:
        """Bring the baseline to the head, whoever moved it, and see what of earlier attempts is still open."""
        baseline, head = self.baseline, self._log.head()
        assert head is not None
        if not follow(baseline, head, read_touched(self._attempts)):
            self._require_lease()
            raise ConflictError(
                f"the head is {head.identity}, this publisher stands on {baseline.identity}: start it anew"
            )
        files = covered(read_touched(self._attempts), head)
        held = held_attempt(self._objects, self._fleet, head, files)
        if held is None:
            return
        file, sha256 = held
        assert file.end is not None
        attempt = file.attempt
        logger.info("%s is held by the whole fleet: its commit record is written now", attempt.identity)
        moved = self._log.commit(
            self._epoch,
            head.identity,
            txn=uuid.uuid4().hex,
            identity=attempt.identity,
            version=attempt.version,
            index_sha256=sha256,
            digest=file.end.digest,
        )
        self._follow(moved)

    def _follow(self, head: Commit) -> None:
        """Advance to a commit of our own."""
        files = read_touched(self._attempts)
        assert follow(self.baseline, head, files)
        self._at("advanced")
        covered(files, head)
        self._at("cleared")
        self._since_anchor += 1

    def _give_up(self, attempt: Attempt, error: BaseException) -> None:
        """Leave an abort record where that is possible; the write-ahead set says what is to be mended either way."""
        try:
            self._log.abort(
                self._epoch,
                txn=attempt.txn,
                identity=attempt.identity,
                version=attempt.version,
                reason=f"{type(error).__name__}: {error}"[:500],
            )
        except GroundhopError as another:
            logger.warning("%s: no abort record: %s", attempt.identity, another)

    def _take_version(self, wanted: int | None) -> int:
        number = self._next if wanted is None else wanted
        if number < self._next:
            raise InputError(f"need a version above {self._next - 1}, which was used, got {number}")
        self._next = number + 1
        return number

    def _used_versions(self) -> set[int]:
        """Versions that any attempt of anybody may have used: committed or not, a number never names two states."""
        used = {file.attempt.version for file in read_touched(self._attempts)}
        used |= {commit.version for commit in self._log.commits()}
        return used | {int(found[1]) for key in self._objects.list("") if (found := _VERSION.match(key))}

    def _require_lease(self) -> None:
        if (epoch := self._log.epoch()) != self._epoch:
            raise FencedError(f"epoch {self._epoch} of {self._owner} is over: epoch {epoch} publishes now")

    def _writer(self, attempt: Attempt, operation: OperationHint) -> SnapshotWriter:
        return SnapshotWriter(
            self._objects,
            attempt.identity,
            version=attempt.version,
            kind="delta",
            layout=self._layout,
            base=attempt.base,
            base_digest=self.baseline.digest,
            operation=operation,
            run_id=self._run_id,
            epoch=attempt.epoch,
        )

    def _full_writer(self, identity: str, version: int) -> SnapshotWriter:
        return SnapshotWriter(
            self._objects,
            identity,
            version=version,
            kind="full",
            layout=self._layout,
            run_id=self._run_id,
            epoch=self._epoch,
        )

    def _first(self, source: Named | Weights) -> Published:
        """Publish the first version whole."""
        start = time.monotonic()
        version = self._take_version(None)
        identity = identity_of(version)
        weights = Given(source) if isinstance(source, Iterable) else source
        clear(read_touched(self._attempts))
        baseline = make_baseline(weights, identity, version, self._folder if self._mapped else None)
        encoded = time.monotonic()
        with scratch(self._folder / "anchor") as folder, self._full_writer(identity, version) as writer:
            if isinstance(source, Checkpoint):
                add_checkpoint(writer, source)
            else:
                add_weights(writer, baseline, folder)
            total = sum(spec.size for spec in baseline.specs.values())
            index = writer.finish(digest=baseline.digest, changed=total, total=total)
        self._at("indexed")
        uploaded = time.monotonic()
        if not self._fleet.clean_on(identity):
            self._fleet.hot_load(index, "overwrite")
        self._at("held")
        head = self._log.commit(
            self._epoch,
            None,
            txn=uuid.uuid4().hex,
            identity=identity,
            version=version,
            index_sha256=writer.index_sha256,
            digest=baseline.digest,
        )
        self._at("committed")
        self._baseline, self._since_anchor = baseline, 0
        return _published(head, index, start, encoded, uploaded)

    def _anchor_if_due(self) -> None:
        """Write the whole state beside the delta, every so many versions. A failure waits for the next version."""
        if self._since_anchor < self._anchor_every:
            return
        baseline = self.baseline
        try:
            like = route(self._index, None, baseline.identity).anchor
            assert like is not None
            identity = anchor_of(baseline.identity)
            with scratch(self._folder / "anchor") as folder, self._full_writer(identity, baseline.version) as writer:
                add_like(writer, baseline, like, self._objects, folder)
                writer.finish(digest=baseline.digest, total=like.total)
            self._since_anchor = 0
            self._at("anchored")
        except GroundhopError as error:
            logger.warning("no full snapshot of %s yet: %s", baseline.identity, error)

    def _index(self, identity: str) -> SnapshotIndex:
        return read_index(self._objects, identity)


def _row(spec: TensorSpec, positions: NDArray[np.int64], bits: Bits, after: Fingerprint) -> Touched:
    whole = positions.size == spec.size
    return Touched(spec.name, spec.size, None if whole else positions, bits if whole else bits[positions], after)


def _published(head: Commit, index: SnapshotIndex, start: float, encoded: float, uploaded: float) -> Published:
    return Published(
        identity=head.identity,
        version=head.version,
        changed=index.changed,
        total=index.total,
        bytes=index.bytes,
        encode_s=encoded - start,
        upload_s=uploaded - encoded,
        commit_s=time.monotonic() - uploaded,
        digest=head.digest,
    )

"""Publish a trainer's weights version after version: what changed since the last committed version, and nothing twice.

The commit protocol (`control-plane.md` 5.5; docs/hotload.md, "Publishing"): compare bits with the baseline; put what will be
sent into the write-ahead set before it leaves; the first attempt is differential, every retry overwrites all that an
unfinished attempt may have written; one commit record moves the head; the baseline follows the record, never the other way.
"""

import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from groundhop.errors import ConflictError, GroundhopError, InputError
from groundhop.training.hotload.anchors import write_anchor, write_first
from groundhop.training.hotload.baseline import Baseline, make_baseline
from groundhop.training.hotload.bits import Weights
from groundhop.training.hotload.changes import Encoding
from groundhop.training.hotload.checkpoint import Checkpoint, same_tensors
from groundhop.training.hotload.fleet import Fleet, NoFleet, OperationHint
from groundhop.training.hotload.lease import Lease
from groundhop.training.hotload.named import Given, Named, Take, cast
from groundhop.training.hotload.parts import PartWriter, make_coder
from groundhop.training.hotload.recovery import covered, follow, held_attempt, recover
from groundhop.training.hotload.step import Together, encode_step
from groundhop.training.hotload.store.index import Layout, SnapshotIndex, identity_of
from groundhop.training.hotload.store.log import Commit
from groundhop.training.hotload.store.objects import Objects
from groundhop.training.hotload.store.route import route
from groundhop.training.hotload.touched import Attempt, TouchedFile, TouchedWriter, clear, read_touched, union

logger = logging.getLogger(__name__)

PART_BYTES = 64 * 2**20


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
        devices: Collection[str] = (),
        lease_s: float = 60.0,
        take_over: bool = False,
        checkpoint: Callable[[str], None] = lambda place: None,
    ) -> None:
        """Publish to `objects`, with `folder` for what must survive a kill.

        `run_id`: a store belongs to one run. `owner`: who publishes; another owner waits `lease_s` after our last word, unless
        it says `take_over`. `mapped`: the baseline lies in a file of `folder`, else in memory. `devices`: types of devices (as
        `cuda`) whose tensors are compared there with a copy of the baseline, which takes the checkpoint's bytes on the device;
        other tensors come to the host whole. `checkpoint` is called with the name of each place of the protocol, so that a
        test can end the process there.
        """
        self._lease = Lease(objects, run_id, owner, layout)
        self._folder, self._fleet = folder, fleet
        self._layout: Layout = layout
        self._encoding: Encoding = encoding
        self._anchor_every, self._part_bytes, self._mapped = anchor_every, part_bytes, mapped
        self._lease_s, self._take_over, self._at = lease_s, take_over, checkpoint
        self._devices = devices
        self._take: Take = cast
        self._next = self._since_anchor = 0
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
        lease = self._lease
        lease.acquire(self._lease_s, self._take_over)
        self._next = lease.next_version(file.attempt for file in self._files())
        head = lease.head()
        if head is None:
            first = self._first(source)
            self._take = _taker(self.baseline, self._devices)
            return first
        if (run := lease.index(head.identity, head.index_sha256).run_id) != lease.run_id:
            raise ConflictError(f"the store holds run {run!r}, this is {lease.run_id!r}")
        self._baseline = recover(lease.objects, head, self._folder, self._attempts, self._mapped)
        self._take = _taker(self._baseline, self._devices)
        if isinstance(source, Checkpoint):
            same_tensors(source.specs, self._baseline.specs, f"version {head.version}")
        self._since_anchor = len(route(lease.index, None, head.identity).deltas)
        self.settle()
        head, now = lease.head() or head, time.monotonic()
        return _published(head, lease.index(head.identity), now, now, now)

    def publish(self, named: Named, version: int | None = None) -> Published:
        """Publish the weights in `named` as the next version, or as `version`, which must be higher than any before.

        Raises: InputError for other tensors than the baseline's; ServerError from the fleet, StoreError, SpaceError: the head
        stays, and the next call mends what this one left; FencedError when another publisher has taken over: this one is done.
        """
        self.settle()
        number = self._take_version(version)
        files = self._files()
        operation = self._operation(files)
        self._lease.require()
        attempt = Attempt(
            txn=uuid.uuid4().hex,
            identity=identity_of(number),
            version=number,
            base=self.baseline.identity,
            epoch=self._lease.epoch,
        )
        try:
            published = self._try(named, attempt, operation, files)
        except BaseException as error:
            self._lease.give_up(attempt, error)
            raise
        self._anchor_if_due()
        return published

    def settle(self) -> str:
        """Bring the baseline to the head after an attempt whose end was not known, and commit one that the fleet holds.

        `start` and `publish` begin with it. Returns the identity that the publisher stands on.
        """
        baseline, head = self.baseline, self._lease.head()
        assert head is not None  # `start` committed one or found one
        if not follow(baseline, head, self._files()):
            self._lease.require()
            raise ConflictError(f"the head is {head.identity}, this publisher is at {baseline.identity}: start it anew")
        files = covered(self._files(), head)
        held = held_attempt(self._lease.objects, self._fleet, head, files)
        if held is not None:
            attempt, sha256, digest = held
            logger.info("%s is held by the whole fleet: its commit record is written now", attempt.identity)
            # The try may have an abort record, which only ends the try.
            renewed = Attempt(
                txn=uuid.uuid4().hex,
                identity=attempt.identity,
                version=attempt.version,
                base=attempt.base,
                epoch=self._lease.epoch,
            )
            self._follow(self._lease.commit(renewed, head.identity, sha256, digest))
        return self.baseline.identity

    def close(self) -> None:
        """Let go of the baseline's file and of its copies; the lease simply runs out."""
        self._baseline, self._take = None, cast

    def _try(self, named: Named, attempt: Attempt, operation: OperationHint, files: list[TouchedFile]) -> Published:
        start = time.monotonic()
        lease, baseline = self._lease, self.baseline
        overwrite = self._touched(files) if operation == "overwrite" else None
        coder = make_coder(self._layout, attempt.version, self._encoding)
        journal = TouchedWriter(self._attempts, attempt)
        try:
            self._at("begun")
            with lease.delta(attempt, baseline.digest, operation) as writer:
                parts = PartWriter(coder, writer, journal, self._part_bytes, lambda: self._at("leaving"))
                end = encode_step(named, baseline, overwrite, journal, parts, self._take)
                self._at("encoded")
                journal.end(end)
                # The new file names all that the older ones do.
                clear(files)
                encoded = time.monotonic()
                self._at("ended")
                lease.require()
                index = writer.finish(digest=end.digest, changed=end.changed, total=end.total)
        finally:
            journal.close()
        self._at("indexed")
        uploaded = time.monotonic()
        lease.require()
        self._fleet.hot_load(index, operation)
        self._at("held")
        head = lease.commit(attempt, attempt.base, writer.index_sha256, end.digest)
        self._at("committed")
        published = _published(head, index, start, encoded, uploaded)
        self._follow(head)
        return published

    def _operation(self, files: list[TouchedFile]) -> OperationHint:
        """Differences fit exactly one state; after an attempt whose end nobody knows, bits are written whatever is there."""
        clean = not files and self._fleet.clean_on(self.baseline.identity)
        return "differential" if clean else "overwrite"

    def _touched(self, files: list[TouchedFile]) -> Together:
        """What unfinished attempts may have written. An element that went back to its baseline value since is among it."""
        return union(files)

    def _follow(self, head: Commit) -> None:
        """Advance to a commit of our own, then forget what led there."""
        files = self._files()
        followed = follow(self.baseline, head, files)
        assert followed
        self._at("advanced")
        covered(files, head)
        self._at("cleared")
        self._since_anchor += 1

    def _take_version(self, wanted: int | None) -> int:
        number = self._next if wanted is None else wanted
        if number < self._next:
            raise InputError(f"need a version above {self._next - 1}, which was used, got {number}")
        self._next = number + 1
        return number

    @property
    def _attempts(self) -> Path:
        return self._folder / "attempts"

    def _files(self) -> list[TouchedFile]:
        return read_touched(self._attempts)

    def _first(self, source: Named | Weights) -> Published:
        """Publish the first version whole."""
        start = time.monotonic()
        lease, number = self._lease, self._take_version(None)
        attempt = Attempt(
            txn=uuid.uuid4().hex, identity=identity_of(number), version=number, base="", epoch=lease.epoch
        )
        clear(self._files())
        weights = Given(source) if isinstance(source, Iterable) else source
        baseline = make_baseline(weights, attempt.identity, number, self._folder if self._mapped else None)
        encoded = time.monotonic()
        index, sha256 = write_first(lease, baseline, source, self._folder / "anchor")
        self._at("indexed")
        uploaded = time.monotonic()
        if not self._fleet.clean_on(attempt.identity):
            self._fleet.hot_load(index, "overwrite")
        self._at("held")
        head = lease.commit(attempt, None, sha256, baseline.digest)
        self._at("committed")
        self._baseline, self._since_anchor = baseline, 0
        return _published(head, index, start, encoded, uploaded)

    def _anchor_if_due(self) -> None:
        """Write the whole state beside the delta, every so many versions. A failure waits for the next version."""
        if self._since_anchor < self._anchor_every:
            return
        try:
            write_anchor(self._lease, self.baseline, self._folder / "anchor")
        except GroundhopError as error:
            logger.warning("no full snapshot of %s yet: %s", self.baseline.identity, error)
        else:
            self._since_anchor = 0
            self._at("anchored")


def _taker(baseline: Baseline, devices: Collection[str]) -> Take:
    if not devices:
        return cast
    from groundhop.training.hotload.torch_baseline import DeviceBaseline

    return DeviceBaseline(baseline, devices).take


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

"""Bring to the local disk what leads a replica from the weights it holds to a snapshot, before it is paused.

The cheapest way that is sure to end in the snapshot's bits: one delta; several as one, folded; those that cannot be folded in a
row; a local checkpoint and the deltas after it; the whole checkpoint restored from the store.
"""

import logging
import shutil
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from groundhop.errors import FencedError, GroundhopError, InputError, SpaceError
from groundhop.training.hotload.checkpoint import open_checkpoint
from groundhop.training.hotload.delta import read_delta, write_delta
from groundhop.training.hotload.fold import fold
from groundhop.training.hotload.journal import Held, Record
from groundhop.training.hotload.replica import Operation
from groundhop.training.hotload.store.objects import Objects
from groundhop.training.hotload.store.snapshots import Route, SnapshotIndex, fetch, materialize, read_index, route

logger = logging.getLogger(__name__)

FETCH_TRIES = 3


@dataclass(frozen=True, slots=True)
class Whole:
    """A checkpoint folder on the local disk, and what it holds."""

    folder: Path
    held: Held


@dataclass(frozen=True, slots=True)
class Step:
    """A delta as files on the local disk, and the state that it ends in."""

    parts: tuple[Path, ...]
    base_digest: str
    to: Held
    operation: Operation


@dataclass(frozen=True, slots=True)
class Supply:
    """Everything that is needed to make a replica's weights `target`: load `whole`, where there is one, then take `steps`."""

    target: Held
    whole: Whole | None = None
    steps: tuple[Step, ...] = ()
    bytes: int = 0
    """Size of the files that are read."""

    @property
    def empty(self) -> bool:
        """Whether the weights are right already."""
        return self.whole is None and not self.steps


class Depot:
    """The local files of one replica. Its methods block; run them in a thread.

    Layout: `staged/IDENTITY/` parts of deltas, `staged/TO.fold` deltas made one, `whole/IDENTITY/` checkpoints.
    """

    def __init__(self, objects: Objects, folder: Path) -> None:
        self._objects = objects
        self._staged = folder / "staged"
        self._whole = folder / "whole"
        self._lock = Lock()
        """Replicas that share a depot wait for each other's files instead of fetching them twice."""

    def read_index(self, identity: str, sha256: str = "", least_epoch: int = 0) -> SnapshotIndex:
        """A snapshot's index. Raises: FencedError for one of a publisher that another has replaced; as `read_index`."""
        index = read_index(self._objects, identity, sha256)
        if 0 < index.epoch < least_epoch:
            raise FencedError(f"{identity} is of publisher {index.epoch}, which publisher {least_epoch} has replaced")
        return index

    def prepare(self, record: Record, index: SnapshotIndex) -> Supply:
        """Fetch what is needed to come from what the journal says to `index`; nothing is returned that was not checked.

        Raises: SpaceError, MissingError, ChecksumError, StoreError, InputError; the replica is then as before.
        """
        target = held_of(index)
        if record.live is not None and target.digest and record.live.digest == target.digest:
            return Supply(target)
        return self._with_space(index, lambda: self._deltas(record, index) or self._from_checkpoint(index))

    def restore(self, index: SnapshotIndex) -> Supply:
        """The whole checkpoint of a snapshot, which mends anything."""
        return self._with_space(index, lambda: self._from_checkpoint(index))

    def keep(self, identity: str) -> None:
        """Have a checkpoint of a committed state at hand for the engine's next restart, and no other."""
        with self._lock:
            self._restored(identity)
            for folder in self._checkpoints():
                if folder.name != identity:
                    shutil.rmtree(folder, ignore_errors=True)

    def tidy(self, needed: Set[str]) -> None:
        """Remove the parts of all snapshots but those `needed`, and all checkpoints but the newest."""
        for folder in self._checkpoints()[1:]:
            shutil.rmtree(folder, ignore_errors=True)
        for path in self._staged.glob("*"):
            if path.name.removesuffix(".fold") not in needed:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove all checkpoints: one of them did not hold what it should."""
        with self._lock:
            shutil.rmtree(self._whole, ignore_errors=True)

    @property
    def kept(self) -> str | None:
        """Identity of the checkpoint at hand."""
        return next((folder.name for folder in self._checkpoints()), None)

    def _with_space(self, index: SnapshotIndex, make: Callable[[], Supply]) -> Supply:
        with self._lock:
            try:
                return make()
            except SpaceError as error:
                logger.warning("%s; removing checkpoints and parts that can be fetched again", error)
                self.tidy({index.identity})
                shutil.rmtree(self._whole, ignore_errors=True)
                return make()

    def _deltas(self, record: Record, index: SnapshotIndex) -> Supply | None:
        """By deltas from the live weights; None where that is not sure to work."""
        if record.state == "dirty":
            # Only absolute values reach the right bits from a half-written state, and only on the same base.
            held = record.held
            if index.operation != "overwrite" or index.layout != "groundhop" or not held or index.base != held.identity:
                return None
            return self._of_deltas((index,), index.base_digest)
        if record.live is None:
            return None
        way = self._way(record.live.identity, index)
        if way is None:
            return None
        return self._of_deltas(way.deltas, record.live.digest)

    def _from_checkpoint(self, index: SnapshotIndex) -> Supply:
        """From a checkpoint at hand and the deltas after it; else from one that is restored now."""
        for folder in self._checkpoints():
            way = self._way(folder.name, index)
            if way is not None:
                whole = Whole(folder, self._held_in(folder, self.read_index(folder.name)))
                if not way.deltas:
                    return Supply(whole.held, whole, bytes=_size(folder))
                after = self._of_deltas(way.deltas, whole.held.digest)
                return Supply(after.target, whole, after.steps, _size(folder) + after.bytes)
        folder = self._restored(index.identity)
        held = self._held_in(folder, index)
        return Supply(held, Whole(folder, held), bytes=_size(folder))

    def _way(self, have: str, index: SnapshotIndex) -> Route | None:
        """Deltas of ours from `have`; None where there are none, or only those of another layout."""
        try:
            way = route(
                lambda name: index if name == index.identity else read_index(self._objects, name), have, index.identity
            )
        except GroundhopError as error:
            logger.warning("no way from %s to %s: %s", have, index.identity, error)
            return None
        ours = way.anchor is None and all(delta.layout == "groundhop" and delta.digest for delta in way.deltas)
        return way if ours else None

    def _of_deltas(self, deltas: tuple[SnapshotIndex, ...], base_digest: str) -> Supply:
        steps: list[Step] = []
        for index in deltas:
            parts = tuple(fetch(self._objects, index, self._staged / index.identity, FETCH_TRIES))
            steps.append(Step(parts, steps[-1].to.digest if steps else base_digest, held_of(index), index.operation))
        if len(steps) > 1:
            steps = self._folded(steps) or steps
        size = sum(path.stat().st_size for step in steps for path in step.parts)
        return Supply(steps[-1].to, None, tuple(steps), size)

    def _folded(self, steps: list[Step]) -> list[Step] | None:
        """The steps as one; None where some need the old bits to be decoded."""
        first, last = steps[0], steps[-1]
        try:
            folded = fold([read_delta(path) for step in steps for path in step.parts])
        except InputError as error:
            logger.info("%s: %d steps, one after another: %s", last.to.identity, len(steps), error)
            return None
        path = self._staged / f"{last.to.identity}.fold"
        rows = (entry.tensor_delta for entry in folded.entries)
        write_delta(path, rows, version=last.to.version, base_digest=first.base_digest, digest=last.to.digest)
        return [Step((path,), first.base_digest, last.to, first.operation)]

    def _restored(self, identity: str) -> Path:
        folder = self._whole / identity
        if not folder.exists():
            self._whole.mkdir(parents=True, exist_ok=True)
            materialize(self._objects, identity, folder)
        return folder

    def _held_in(self, folder: Path, index: SnapshotIndex) -> Held:
        held = held_of(index)
        if held.digest:
            return held
        # Another writer of the shared layout gives no digest; what was restored is checked by its Adler-32 sums.
        return Held(
            identity=held.identity, version=held.version, digest=open_checkpoint(folder).digest, epoch=held.epoch
        )

    def _checkpoints(self) -> list[Path]:
        return [
            folder
            for folder in sorted(self._whole.glob("*"), reverse=True)
            if folder.is_dir() and folder.name[0] != "."
        ]


def held_of(index: SnapshotIndex) -> Held:
    """The state that a snapshot describes."""
    return Held(identity=index.identity, version=index.version, digest=index.digest, epoch=index.epoch)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))

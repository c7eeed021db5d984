"""Find out, after a kill or a lost answer, which state a publisher stands on: the log decides, the folder follows."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from groundhop.errors import ChecksumError, InputError, MissingError
from groundhop.training.hotload.anchors import scratch
from groundhop.training.hotload.baseline import Baseline, make_baseline, open_baseline
from groundhop.training.hotload.checkpoint import open_checkpoint
from groundhop.training.hotload.fleet import Fleet
from groundhop.training.hotload.store.index import index_key, index_sha256, read_index
from groundhop.training.hotload.store.log import Commit
from groundhop.training.hotload.store.materialize import materialize
from groundhop.training.hotload.store.objects import Objects
from groundhop.training.hotload.touched import Attempt, TouchedFile, clear, read_touched

logger = logging.getLogger(__name__)


class HeldAttempt(NamedTuple):
    """An attempt that only lacks its commit record."""

    attempt: Attempt
    index_sha256: str
    digest: str


def recover(objects: Objects, head: Commit, folder: Path, attempts: Path, mapped: bool) -> Baseline:
    """The baseline at `head`: the one in `folder`, redone where a commit was not followed yet, else built from the store.

    Its bits are verified. Raises: ChecksumError when the store does not hold what its log says.
    """
    baseline = open_baseline(folder) if mapped else None
    if baseline is not None:
        try:
            if follow(baseline, head, read_touched(attempts)):
                baseline.verify()
                return baseline
        except (ChecksumError, InputError) as error:
            logger.warning("%s; the baseline is built again from the store", error)
    return rebuild(objects, head, folder, mapped)


def follow(baseline: Baseline, head: Commit, files: Sequence[TouchedFile]) -> bool:
    """Advance `baseline` to `head` where one of `files` says how. Returns whether it stands there."""
    for file in files:
        leads = file.attempt.identity == head.identity and file.end is not None and file.end.digest == head.digest
        if leads and file.attempt.base == baseline.identity:
            baseline.advance(file.rows(), head.identity, head.version, head.digest)
    return (baseline.identity, baseline.digest) == (head.identity, head.digest)


def rebuild(objects: Objects, head: Commit, folder: Path, mapped: bool) -> Baseline:
    """A baseline from the store's own snapshots. Raises: ChecksumError when they do not give `head`'s digest."""
    with scratch(folder / "rebuild") as work:
        materialize(objects, head.identity, work / "checkpoint")
        checkpoint = open_checkpoint(work / "checkpoint")
        baseline = make_baseline(checkpoint, head.identity, head.version, folder if mapped else None)
    if baseline.digest != head.digest:
        raise ChecksumError(
            f"the store gives {baseline.digest[:12]} for {head.identity}, its log says {head.digest[:12]}"
        )
    return baseline


def covered(files: Sequence[TouchedFile], head: Commit) -> list[TouchedFile]:
    """Clear attempts that are not above the head, which overwrote all that they may have written. Returns the others."""
    clear(file for file in files if file.attempt.version <= head.version)
    return [file for file in files if file.attempt.version > head.version]


def held_attempt(objects: Objects, fleet: Fleet, head: Commit, files: Sequence[TouchedFile]) -> HeldAttempt | None:
    """The last attempt on `head`, if its snapshot is whole and the fleet holds it.

    Its publisher was lost, or its answer was, between the fleet's word and the commit record.
    """
    if not files:
        return None
    last = files[-1]
    if last.end is None or last.attempt.base != head.identity:
        return None
    try:
        index = read_index(objects, last.attempt.identity)
        sha256 = index_sha256(objects.get(index_key(last.attempt.identity)))
    except MissingError:
        return None
    if index.digest != last.end.digest or not fleet.clean_on(index.identity):
        return None
    return HeldAttempt(last.attempt, sha256, index.digest)

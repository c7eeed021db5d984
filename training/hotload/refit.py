"""A trainer's weights into the servers of its policy, by the publisher's commit protocol and without a control plane.

Trainer and servers share a file system. The store of snapshots lies in the run's folder; a version that was committed there is
never lost, and a killed run goes on with the next number.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from groundhop.training.hotload.checkpoint import open_checkpoint
from groundhop.training.hotload.direct import DirectFleet
from groundhop.training.hotload.fleet import Fleet
from groundhop.training.hotload.publisher import Published, Publisher
from groundhop.training.hotload.store.log import CommitLog
from groundhop.training.hotload.store.objects import Objects, open_objects
from groundhop.training.hotload.store.retention import prune

OWNER = "trainer"


@dataclass(frozen=True, slots=True)
class RefitResult:
    """One move of all servers to new weights."""

    version: str
    changed: int
    total: int
    """Elements that changed, of how many."""
    bytes: int
    """Size of what was published for it."""
    seconds: float
    digest: str
    """Of the whole state that all servers hold."""


class Refitter(Protocol):
    """Brings new weights to the servers of a policy; returns when all of them sample from these weights."""

    async def refit(self, named: Iterable[tuple[str, Any]]) -> RefitResult:
        """Send what changed in `named` (all of a model's parameters, torch tensors of any float type).

        Raises: ServerError that names a server that does not hold the new weights.
        """
        ...


def make_refitter(
    urls: Sequence[str], folder: Path, baseline: Path, headers: Mapping[str, str] | None = None, *, run_id: str = "grpo"
) -> Refitter:
    """A refitter for servers at `urls` (without `/v1`) that were started on the checkpoint in `baseline`, or on any other state.

    All of it lies below `folder`, which a resumed run passes again: versions go on, and servers that hold another state than the
    last committed one are brought over by the first refit.
    """
    objects = open_objects(folder / "store")
    fleet = DirectFleet(urls, headers or {}, folder / "replicas", objects)
    return PublisherRefitter(objects, folder / "publisher", baseline, fleet, run_id=run_id)


class PublisherRefitter:
    """A `Refitter` over a `Publisher`."""

    def __init__(self, objects: Objects, folder: Path, baseline: Path, fleet: Fleet, *, run_id: str) -> None:
        self._objects, self._baseline, self._started = objects, baseline, False
        self._publisher = Publisher(objects, folder, fleet, run_id=run_id, owner=OWNER)

    async def refit(self, named: Iterable[tuple[str, Any]]) -> RefitResult:
        """See `Refitter`."""
        start = time.monotonic()
        # The fleet runs an event loop of its own.
        published = await asyncio.to_thread(self._refit, list(named))
        return RefitResult(
            version=str(published.version),
            changed=published.changed,
            total=published.total,
            bytes=published.bytes,
            seconds=time.monotonic() - start,
            digest=published.digest,
        )

    def _refit(self, named: list[tuple[str, Any]]) -> Published:
        if not self._started:
            self._publisher.start(open_checkpoint(self._baseline))
            self._started = True
        published = self._publisher.publish(named)
        prune(self._objects, CommitLog(self._objects), {published.identity}, set(), keep_anchors=1)
        return published

"""Sketch sync in front of a refitter: the trainer's weights go as a record to the site, and from there to the servers as ever."""

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groundhop.training.hotload.bits import Weights
from groundhop.training.hotload.named import Given, Named
from groundhop.training.hotload.refit import RefitResult, Refitter
from groundhop.training.sketch.quantise import SketchUpdate
from groundhop.training.sketch.sender import Sender, Sent
from groundhop.training.sketch.site import Site

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one sync sent, and what it would have sent."""

    version: int
    record_bytes: int
    repair_bytes: int
    """Of deltas that the site asked for."""
    delta_bytes: int
    """Of the delta alone, without sketches."""
    sketched: int
    """Weights that went as sketches."""
    stale: int
    """Targets whose master at the site is behind."""


class SketchRefitter:
    """A `Refitter` (`hotload/refit.py`) that sends sketches; `add` is to be called after each optimizer step."""

    def __init__(self, inner: Refitter, sender: Sender, site: Site) -> None:
        self._inner, self._sender, self._site = inner, sender, site
        self._waiting: Sent | None = None
        self.traffic: list[Traffic] = []

    def add(self, updates: Mapping[str, SketchUpdate]) -> None:
        """Take what an optimizer step did to the targets (`Logra.last_update`)."""
        self._sender.add(updates)

    async def refit(self, named: Iterable[tuple[str, Any]]) -> RefitResult:
        """See `Refitter`. The result tells of the fan-out behind the site; `traffic` of what reached the site."""
        await asyncio.to_thread(self._sync, list(named))
        return await self._inner.refit(self._site.named())

    def _sync(self, named: list[tuple[str, Any]]) -> None:
        if self._waiting is not None:
            self._deliver(self._waiting)
        self._waiting = self._sender.send(named)
        self._deliver(self._waiting)

    def _deliver(self, sent: Sent) -> None:
        repairs: list[bytes] = []

        def fetch(names: Collection[str]) -> bytes:
            repairs.append(self._sender.delta(names))
            return repairs[-1]

        self._site.apply(sent.content, fetch)
        self._waiting = None
        traffic = Traffic(
            version=sent.version,
            record_bytes=len(sent.content),
            repair_bytes=sum(map(len, repairs)),
            delta_bytes=sent.delta_bytes,
            sketched=len(sent.sketched),
            stale=sum(state == "MASTER_STALE" for state in self._sender.states.values()),
        )
        self.traffic.append(traffic)
        logger.info(
            "version %d: %d bytes to the site, %d as a delta; %d weights as sketches, %d masters behind",
            traffic.version,
            traffic.record_bytes + traffic.repair_bytes,
            traffic.delta_bytes,
            traffic.sketched,
            traffic.stale,
        )


def make_sketch_refitter(
    inner: Refitter, named: Named, base: Weights, targets: Collection[str], folder: Path, *, resync_every: int = 0
) -> SketchRefitter:
    """A refitter whose site lies in `folder` and begins, as the sender does, from the trainer's present weights `named`.

    `base`: the policy's checkpoint, for its names and types. `targets`: names of the weights that LoGRA updates.
    """
    kept = list(named)
    sender = Sender(kept, base, targets, resync_every=resync_every)
    masters = Given((name, tensor) for name, tensor in kept if name in targets)
    site = Site.create(folder, sender, targets, masters)
    return SketchRefitter(inner, sender, site)

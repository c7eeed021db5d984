"""Publish a trainer's weights version after version: what changed since the last committed version, and nothing twice."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from groundhop.training.hotload.bits import Weights
from groundhop.training.hotload.fleet import Fleet, NoFleet

if TYPE_CHECKING:
    from groundhop.training.hotload.store.objects import Objects

PART_BYTES = 64 * 2**20
Named = Iterable[tuple[str, Any]]
"""All of a model's parameters by checkpoint name, each once; torch tensors or numpy arrays."""


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
    """The only writer of a chain of snapshots. One process, one thread at a time."""

    def __init__(
        self,
        objects: "Objects",
        folder: Path,
        fleet: Fleet = NoFleet(),  # noqa: B008
        *,
        run_id: str,
        owner: str,
        encoding: Literal["auto", "context", "xor", "add", "overwrite", "dense"] = "auto",
        layout: Literal["groundhop", "shared"] = "groundhop",
        anchor_every: int = 20,
        part_bytes: int = PART_BYTES,
        lease_s: float = 60.0,
        take_over: bool = False,
        checkpoint: Callable[[str], None] = lambda place: None,
    ) -> None:
        raise NotImplementedError

    def start(self, source: "Named | Weights") -> Published:
        """Take the lease and stand on the last committed version; `source` becomes the first anchor where there is none."""
        raise NotImplementedError

    def publish(self, named: Named, version: int | None = None) -> Published:
        """Publish the weights in `named` as the next version, or as `version`, which must be higher than any before."""
        raise NotImplementedError

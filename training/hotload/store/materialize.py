"""Restore a Hugging Face checkpoint folder from snapshots, bit for bit."""

from pathlib import Path

from groundhop.training.hotload.store.index import SnapshotIndex
from groundhop.training.hotload.store.objects import Objects


def materialize(objects: Objects, identity: str, out: Path) -> SnapshotIndex:
    """Write the checkpoint of a snapshot to the folder `out`, which appears at once and whole."""
    raise NotImplementedError

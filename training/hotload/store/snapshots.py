"""Snapshots on a store, all under one import: write one, read its index, find a way to it, fetch it, restore it."""

from pathlib import Path
from typing import TYPE_CHECKING

from groundhop.training.hotload.store.fetch import fetch
from groundhop.training.hotload.store.index import (
    INDEX_NAME,
    Part,
    SnapshotIndex,
    anchor_of,
    check_identity,
    identity_of,
    index_key,
    read_index,
)
from groundhop.training.hotload.store.objects import Objects
from groundhop.training.hotload.store.route import CHAIN_LIMIT, Route, route
from groundhop.training.hotload.store.writer import SnapshotWriter

if TYPE_CHECKING:
    from groundhop.training.hotload.checkpoint import Checkpoint

__all__ = [
    "CHAIN_LIMIT",
    "INDEX_NAME",
    "Part",
    "Route",
    "SnapshotIndex",
    "SnapshotWriter",
    "add_checkpoint",
    "anchor_of",
    "check_identity",
    "fetch",
    "identity_of",
    "index_key",
    "materialize",
    "read_index",
    "route",
]


def materialize(objects: Objects, identity: str, out: Path, limit: int = CHAIN_LIMIT) -> SnapshotIndex:
    """See `materialize.py`, which is loaded when it is called: the codec compiles loops, and most readers need no codec."""
    from groundhop.training.hotload.store import materialize as module

    return module.materialize(objects, identity, out, limit)


def add_checkpoint(writer: SnapshotWriter, source: "Checkpoint") -> None:
    """See `materialize.py`."""
    from groundhop.training.hotload.store import materialize as module

    module.add_checkpoint(writer, source)

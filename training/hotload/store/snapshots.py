"""Snapshots on a store, all under one import: write one, read its index, find a way to it, fetch it, restore it."""

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
from groundhop.training.hotload.store.materialize import add_checkpoint, materialize
from groundhop.training.hotload.store.route import CHAIN_LIMIT, Route, route
from groundhop.training.hotload.store.writer import SnapshotWriter

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

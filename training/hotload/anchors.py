"""Full snapshots: the whole state as the shards of a checkpoint, for readers that cannot come by deltas."""

import json
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from groundhop.errors import InputError
from groundhop.training.hotload.baseline import Baseline
from groundhop.training.hotload.bits import TensorSpec, Weights
from groundhop.training.hotload.checkpoint import Checkpoint
from groundhop.training.hotload.durable import clear_disk_errors
from groundhop.training.hotload.lease import Lease
from groundhop.training.hotload.safetensors_file import METADATA, MOST_HEADER_BYTES, make_header
from groundhop.training.hotload.store.index import Part, SnapshotIndex, anchor_of
from groundhop.training.hotload.store.materialize import add_checkpoint
from groundhop.training.hotload.store.objects import Objects
from groundhop.training.hotload.store.route import route
from groundhop.training.hotload.store.writer import SnapshotWriter

SHARD_BYTES = 5 * 10**9
"""Tensors of a new shard at most, as transformers cuts."""


def add_weights(writer: SnapshotWriter, weights: Weights, folder: Path) -> None:
    """Add `weights` in new shards, which lie in `folder` until the writer has finished."""
    for number, specs in enumerate(_grouped(weights.specs.values()), 1):
        head, order = make_header(specs, {"format": "pt"})
        writer.add(_write(weights, folder, f"model-{number:05d}.safetensors", head, order))


def add_like(writer: SnapshotWriter, weights: Weights, like: SnapshotIndex, objects: Objects, folder: Path) -> None:
    """Add `weights` in the shards of the full snapshot `like`, header for header, and its other files."""
    for part in like.parts:
        head, order = _head_of(objects, part, weights.specs)
        writer.add(_write(weights, folder, part.name, head, order), part.name)
    for part in like.files:
        writer.add_file(objects.get(part.key), part.name)


def write_first(lease: Lease, baseline: Baseline, source: Any, folder: Path) -> tuple[SnapshotIndex, str]:
    """Publish the state of `baseline` whole, as the files of `source` where that is a checkpoint. Gives the index and its SHA-256."""
    with scratch(folder) as work, lease.full(baseline.identity, baseline.version) as writer:
        if isinstance(source, Checkpoint):
            add_checkpoint(writer, source)
        else:
            add_weights(writer, baseline, work)
        total = sum(spec.size for spec in baseline.specs.values())
        index = writer.finish(digest=baseline.digest, changed=total, total=total)
    return index, writer.index_sha256


def write_anchor(lease: Lease, baseline: Baseline, folder: Path) -> None:
    """Publish the state of `baseline` whole beside its delta, in the shards and with the files of the full snapshot below it."""
    like = route(lease.index, None, baseline.identity).anchor
    assert like is not None  # there is none only for a reader that has something
    full = lease.full(anchor_of(baseline.identity), baseline.version)
    with scratch(folder) as work, full as writer:
        add_like(writer, baseline, like, lease.objects, work)
        writer.finish(digest=baseline.digest, total=like.total)


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """An empty folder for as long as the block runs; what a killed process left in it is removed first."""
    shutil.rmtree(folder, ignore_errors=True)
    with clear_disk_errors(folder):
        folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _grouped(specs: Iterable[TensorSpec]) -> Iterator[list[TensorSpec]]:
    group: list[TensorSpec] = []
    size = 0
    for spec in specs:
        if group and size + spec.nbytes > SHARD_BYTES:
            yield group
            group, size = [], 0
        group.append(spec)
        size += spec.nbytes
    if group:
        yield group


def _write(weights: Weights, folder: Path, name: str, head: bytes, order: Iterable[TensorSpec]) -> Path:
    path = folder / name
    with clear_disk_errors(path), path.open("wb") as file:
        file.write(head)
        for spec in order:
            file.write(np.ascontiguousarray(weights.bits(spec.name)).view(np.uint8).data)
    return path


def _head_of(objects: Objects, part: Part, specs: Mapping[str, TensorSpec]) -> tuple[bytes, list[TensorSpec]]:
    """A shard's header as it stands in the store, and the order of its tensors. `SnapshotWriter.add` checks what comes of it."""
    (length,) = struct.unpack("<Q", objects.get_range(part.key, 0, 8))
    if length > min(MOST_HEADER_BYTES, part.size):
        raise InputError(f"{part.key}: its header claims {length} bytes, the object has {part.size}")
    head = objects.get_range(part.key, 0, 8 + length)
    table = json.loads(head[8:])
    table.pop(METADATA, None)
    if missing := sorted(table.keys() - specs.keys()):
        raise InputError(f"{part.key} holds {missing[0]}, which the baseline has not")
    names = sorted(table, key=lambda name: tuple(table[name]["data_offsets"]))
    return head, [specs[name] for name in names]

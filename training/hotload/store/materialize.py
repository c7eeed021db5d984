"""Restore a Hugging Face checkpoint folder from snapshots, bit for bit, and put such a folder on a store."""

import tempfile
from pathlib import Path

import msgspec

from groundhop.errors import ChecksumError, InputError
from groundhop.training.hotload.atomic import replacing
from groundhop.training.hotload.checkpoint import INDEX, OTHER_WEIGHTS, Checkpoint, open_checkpoint
from groundhop.training.hotload.delta import apply_delta, prints_of, read_delta
from groundhop.training.hotload.fingerprint import Fingerprint, fingerprint, state_digest
from groundhop.training.hotload.store.fetch import fetch
from groundhop.training.hotload.store.index import SnapshotIndex, read_index
from groundhop.training.hotload.store.objects import Objects
from groundhop.training.hotload.store.route import CHAIN_LIMIT, route
from groundhop.training.hotload.store.scratch import Scratch
from groundhop.training.hotload.store.shared_layout import apply_shared, check_full, read_shared
from groundhop.training.hotload.store.writer import SnapshotWriter


def add_checkpoint(writer: SnapshotWriter, source: Checkpoint) -> None:
    """Add the shards of a checkpoint file or folder as they are, and all other files of the folder but copies of weights."""
    for shard in source.shards:
        writer.add(shard.path, shard.path.name)
    if not source.path.is_dir():
        return
    for path in sorted(source.path.rglob("*")):
        name = path.relative_to(source.path)
        hidden = any(segment.startswith(".") for segment in name.parts)
        if path.is_file() and not hidden and not any(path.match(pattern) for pattern in OTHER_WEIGHTS):
            writer.add_file(path, name.as_posix())


def materialize(objects: Objects, identity: str, out: Path, limit: int = CHAIN_LIMIT) -> SnapshotIndex:
    """Write the checkpoint of a snapshot to the folder `out`, which appears at once, whole and checked, or not at all.

    Shards, their headers and the other files are those of the full snapshot below, byte for byte; tensors are those of
    `identity`. Needs space for the checkpoint and for one delta beside it.
    Raises: MissingError, ChecksumError, InputError as `route`, `fetch` and the deltas' readers; SpaceError.
    """
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not any(out.glob("*.safetensors"))):
        raise InputError(f"{out} holds something else than a checkpoint: not replaced")
    way = route(lambda name: read_index(objects, name), None, identity, limit)
    assert way.anchor is not None  # there is none only for a reader that has something
    target = way.deltas[-1] if way.deltas else way.anchor
    with replacing(out) as folder:
        folder.mkdir()
        shards = _place(objects, way.anchor, folder)
        with Scratch(folder, shards) as weights:
            prints = prints_of(weights)
            _require_state(way.anchor, weights, prints)
            for index in way.deltas:
                _apply(objects, index, weights, prints, folder.parent)
            # The prints of our deltas were carried along by their changes; this reads every bit that lies there.
            _require_state(target, weights, prints_of(weights))
        if not (folder / INDEX).exists() and len(shards) > 1:
            (folder / INDEX).write_bytes(_plain_index(folder, shards))
    return target


def _place(objects: Objects, anchor: SnapshotIndex, folder: Path) -> list[Path]:
    """Fetch a full snapshot under the names that its files have in a checkpoint. Returns the shards."""
    if not anchor.parts:
        raise InputError(f"{anchor.identity} is a full snapshot without shards")
    fetched = folder / ".fetched"
    parts = (*anchor.parts, *anchor.files)
    for path, part in zip(fetch(objects, anchor, fetched, files=True), parts, strict=True):
        (folder / part.name).parent.mkdir(parents=True, exist_ok=True)
        path.rename(folder / part.name)
    fetched.rmdir()
    shards = [folder / part.name for part in anchor.parts]
    if not anchor.digest:
        for shard in shards:
            check_full(shard)
    return shards


def _apply(
    objects: Objects, index: SnapshotIndex, weights: Scratch, prints: dict[str, Fingerprint], beside: Path
) -> None:
    with tempfile.TemporaryDirectory(prefix=".delta-", dir=beside) as scratch:
        for path in fetch(objects, index, Path(scratch)):
            if index.layout == "groundhop":
                apply_delta(read_delta(path), weights, prints)
            else:
                for name in apply_shared(read_shared(path, index.operation), weights):
                    prints[name] = fingerprint(weights.bits(name))
    _require_state(index, weights, prints)


def _require_state(index: SnapshotIndex, weights: Scratch, prints: dict[str, Fingerprint]) -> None:
    """Raises: ChecksumError unless `weights` are the state that `index` promises."""
    found = state_digest(weights.specs, prints)
    if index.digest and found != index.digest:
        raise ChecksumError(f"{index.identity} gives the state {found[:12]}, its index promises {index.digest[:12]}")


def _plain_index(folder: Path, shards: list[Path]) -> bytes:
    """The index of shards that came without one, as transformers writes it."""
    checkpoint = open_checkpoint(folder)
    weight_map = {tensor.spec.name: shard.path.name for shard in checkpoint.shards for tensor in shard.tensors}
    document = {"metadata": {"total_size": checkpoint.nbytes}, "weight_map": dict(sorted(weight_map.items()))}
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"

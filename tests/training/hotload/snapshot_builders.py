"""Small snapshots on a store, for the tests of the store and of those who read from it."""

from pathlib import Path

from small_states import Held

from groundhop.training.hotload.checkpoint import open_checkpoint
from groundhop.training.hotload.delta import dump_delta, encode_tensor, prints_of
from groundhop.training.hotload.fingerprint import state_digest
from groundhop.training.hotload.store.objects import Objects
from groundhop.training.hotload.store.shared_layout import encode_shared, write_shared
from groundhop.training.hotload.store.snapshots import SnapshotIndex, SnapshotWriter, add_checkpoint, identity_of


def digest_of(weights: Held) -> str:
    return state_digest(weights.specs, prints_of(weights))


def publish_full(objects: Objects, version: int, folder: Path, identity: str = "") -> SnapshotIndex:
    """A checkpoint folder as a full snapshot."""
    source = open_checkpoint(folder)
    with SnapshotWriter(objects, identity or identity_of(version), version=version, kind="full") as writer:
        add_checkpoint(writer, source)
        return writer.finish(digest=source.digest)


def publish_delta(
    objects: Objects,
    version: int,
    old: Held,
    new: Held,
    *,
    layout: str = "groundhop",
    base: str = "",
    operation: str = "differential",
) -> SnapshotIndex:
    """A delta in two parts, or in none where nothing changed."""
    writer = SnapshotWriter(
        objects,
        identity_of(version),
        version=version,
        kind="delta",
        layout=layout,  # type: ignore[arg-type]
        base=base or identity_of(version - 1),
        base_digest=digest_of(old),
        operation=operation,  # type: ignore[arg-type]
    )
    with writer:
        for names in (sorted(new.specs)[::2], sorted(new.specs)[1::2]):
            specs = [new.specs[name] for name in names]
            if layout == "shared":
                coded = [
                    encode_shared(spec, old.bits(spec.name), new.bits(spec.name), operation=operation)  # type: ignore[arg-type]
                    for spec in specs
                ]
                if kept := [tensor for tensor in coded if tensor]:
                    writer.add(write_shared(kept))
            else:
                deltas = [encode_tensor(spec, old.bits(spec.name), new.bits(spec.name)) for spec in specs]
                if sent := [delta for delta in deltas if delta]:
                    writer.add(dump_delta(sent, version=version, base_digest="", digest=""))
        return writer.finish(digest=digest_of(new))

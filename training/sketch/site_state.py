"""What a receiving site holds, on disk and in memory.

    snapshot/   card.json, weights.safetensors, masters.safetensors, last.delta: put there as one
    log/        N.record for each version since; N.repair beside it where a delta made good for sketches

A record counts from the moment its file has its name. A site that was killed begins with its snapshot and applies the log again.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from groundhop.errors import InputError, MissingError
from groundhop.training.hotload import durable
from groundhop.training.hotload.atomic import replacing
from groundhop.training.hotload.bits import Bits, TensorSpec
from groundhop.training.hotload.checkpoint import open_checkpoint, write_checkpoint
from groundhop.training.hotload.durable import clear_disk_errors
from groundhop.training.hotload.fingerprint import Fingerprint, fingerprint, state_digest
from groundhop.training.sketch.expand import Master

SNAPSHOT, LOG = "snapshot", "log"


class Card(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of `card.json`."""

    version: int
    chain: str
    digest: str
    record_sha256: str
    """Of the record that led here; "" for none."""
    since: dict[str, int | None]
    stale: tuple[str, ...]


@dataclass(slots=True)
class State:
    """A `Weights` with its FP32 masters."""

    specs: Mapping[str, TensorSpec]
    arrays: dict[str, Bits]
    prints: dict[str, Fingerprint]
    masters: dict[str, Master]
    since: dict[str, int | None]
    """The version that each master is exact at; None where it must come whole."""
    stale: set[str]
    """Masters that a delta has left behind."""
    version: int
    chain: str
    """`state_digest` of the masters at the beginning."""
    record_sha256: str = ""
    last_delta: bytes = field(default=b"", repr=False)
    """What the last record came to, as a canonical delta file."""

    def bits(self, name: str) -> Bits:
        """The bits of a tensor; writing to them changes the state."""
        return self.arrays[name]

    @property
    def digest(self) -> str:
        """`state_digest` of the checkpoint's bits."""
        return state_digest(self.specs, self.prints)


@dataclass(frozen=True, slots=True)
class _Masters:
    """Masters as a `Weights`."""

    masters: Mapping[str, Master]

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: TensorSpec(name=name, dtype="F32", shape=one.shape) for name, one in self.masters.items()}

    def bits(self, name: str) -> Bits:
        bits: Bits = self.masters[name].reshape(-1).view(np.uint32)
        return bits


def digest_masters(masters: Mapping[str, Master]) -> str:
    """`state_digest` of masters."""
    seen = _Masters(masters)
    return state_digest(seen.specs, {name: fingerprint(seen.bits(name)) for name in masters})


def write_snapshot(state: State, folder: Path) -> None:
    """Put the state in place of the snapshot that is there, and forget the log that led to it. Raises: SpaceError, StoreError."""
    card = Card(
        version=state.version,
        chain=state.chain,
        digest=state.digest,
        record_sha256=state.record_sha256,
        since=state.since,
        stale=tuple(sorted(state.stale)),
    )
    with clear_disk_errors(folder), replacing(folder / SNAPSHOT) as path:
        path.mkdir()
        write_checkpoint(state, path / "weights.safetensors")
        write_checkpoint(_Masters(state.masters), path / "masters.safetensors")
        (path / "last.delta").write_bytes(state.last_delta)
        (path / "card.json").write_bytes(msgspec.json.encode(card))
    for version, old in logged(folder):
        if version <= state.version:
            forget(old)


def read_snapshot(folder: Path) -> State:
    """The state that a snapshot holds. Raises: MissingError where there is none, InputError for one that is damaged."""
    path = folder / SNAPSHOT
    if not (path / "card.json").is_file():
        raise MissingError(f"no site in {folder}: create one first")
    try:
        card = msgspec.json.decode((path / "card.json").read_bytes(), type=Card)
    except msgspec.MsgspecError as error:
        raise InputError(f"{path / 'card.json'}: {error}") from error
    weights, masters = open_checkpoint(path / "weights.safetensors"), open_checkpoint(path / "masters.safetensors")
    state = State(
        specs=weights.specs,
        arrays={name: weights.bits(name).copy() for name in weights.specs},
        prints=dict(weights.prints),
        masters={
            name: masters.bits(name).copy().view(np.float32).reshape(s.shape) for name, s in masters.specs.items()
        },
        since=card.since,
        stale=set(card.stale),
        version=card.version,
        chain=card.chain,
        record_sha256=card.record_sha256,
        last_delta=(path / "last.delta").read_bytes(),
    )
    if state.digest != card.digest or state.masters.keys() != state.since.keys():
        raise InputError(f"{path} does not hold the state that its card names")
    return state


def log_record(folder: Path, version: int, content: bytes, repair: bytes | None) -> None:
    """Make a record count; `repair` first, which means nothing without it. Raises: SpaceError, StoreError."""
    path = _record_path(folder, version)
    with clear_disk_errors(path):
        if repair is not None:
            durable.write(repair_path(folder, version), repair)
        durable.write(path, content)


def logged(folder: Path) -> list[tuple[int, Path]]:
    """The records of the log and their versions, in order."""
    return sorted((int(path.stem), path) for path in (folder / LOG).glob("*.record"))


def repair_path(folder: Path, version: int) -> Path:
    """Where the delta lies that made good for a record's sketches."""
    return _record_path(folder, version).with_suffix(".repair")


def forget(record: Path) -> None:
    """Remove a record of the log."""
    with contextlib.suppress(FileNotFoundError):
        record.unlink()
        record.with_suffix(".repair").unlink()


def _record_path(folder: Path, version: int) -> Path:
    return folder / LOG / f"{version:08d}.record"

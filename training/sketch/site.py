"""The receiving site of sketch sync: FP32 masters move by sketches, and what leaves the site is an ordinary canonical delta.

A sketch's result counts only where its checkpoint's bits have the promised fingerprint. Where they have not, the site asks for the
delta of that weight, and its master is stale until it comes whole. There is one site in front of many servers, in host memory:
4 bytes for each element of a target beside the checkpoint, twice that while a record is applied. No torch is needed.
"""

import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from groundhop.errors import ChecksumError, ConflictError, InputError, StoreError
from groundhop.training.hotload.bits import Weights
from groundhop.training.hotload.delta import apply_delta, dump_delta, read_delta
from groundhop.training.hotload.fingerprint import fingerprint
from groundhop.training.hotload.named import Whole
from groundhop.training.sketch.expand import Master, rounded
from groundhop.training.sketch.masters import master_specs, read_masters
from groundhop.training.sketch.record import Record, read_record
from groundhop.training.sketch.replay import checkpoint_deltas, expand_all, masters_sent, mended
from groundhop.training.sketch.site_state import (
    State,
    digest_masters,
    forget,
    log_record,
    logged,
    read_snapshot,
    repair_path,
    write_snapshot,
)

logger = logging.getLogger(__name__)

Fetch = Callable[[Collection[str]], bytes]
"""Gives the delta file of weights that the record at hand sketched."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What a record came to."""

    version: int
    digest: str
    """Of the whole checkpoint."""
    delta: bytes
    """The step as a canonical delta file."""
    repaired: tuple[str, ...] = ()
    """Weights whose sketch gave other bits, so that their delta was asked for."""


class Site:
    """One folder's state; one process at a time."""

    def __init__(self, folder: Path, *, snapshot_every: int = 20) -> None:
        """Open the site in `folder` as the last record that it applied left it.

        Raises: MissingError where there is none, InputError or ChecksumError for one that is damaged.
        """
        self._folder, self._every = folder, snapshot_every
        self._state = self._load()

    @classmethod
    def create(
        cls,
        folder: Path,
        weights: Weights,
        targets: Collection[str],
        masters: Weights | None = None,
        *,
        version: int = 0,
        snapshot_every: int = 20,
    ) -> "Site":
        """Make a site of a checkpoint, in place of one that is in `folder`.

        `masters`: the FP32 weights that the trainer begins from, where `weights` are those rounded; else it begins from `weights`.
        Raises: InputError for masters that do not round to `weights`, and as `master_specs`.
        """
        held = read_masters(masters or weights, master_specs(weights.specs, targets))
        for name, master in held.items():
            if not np.array_equal(rounded(master, weights.specs[name].dtype), weights.bits(name)):
                raise InputError(f"the master of {name} does not round to the checkpoint's bits")
        arrays = {name: weights.bits(name).copy() for name in weights.specs}
        state = State(
            specs=dict(weights.specs),
            arrays=arrays,
            prints={name: fingerprint(bits) for name, bits in arrays.items()},
            masters=held,
            since=dict.fromkeys(held, version),
            stale=set(),
            version=version,
            chain=digest_masters(held),
        )
        for _, old in logged(folder):
            forget(old)
        write_snapshot(state, folder)
        return cls(folder, snapshot_every=snapshot_every)

    @property
    def version(self) -> int:
        """Of the last record that was applied."""
        return self._state.version

    @property
    def digest(self) -> str:
        """Of the whole checkpoint."""
        return self._state.digest

    @property
    def states(self) -> Mapping[str, Literal["MASTER_VALID", "MASTER_STALE"]]:
        """Of each target."""
        stale = self._state.stale
        return {name: "MASTER_STALE" if name in stale else "MASTER_VALID" for name in self._state.masters}

    def named(self) -> Iterator[tuple[str, Whole]]:
        """The whole checkpoint, as the hot-load path takes it; good until the next record."""
        for name, spec in self._state.specs.items():
            yield name, Whole(spec, self._state.arrays[name])

    def apply(self, content: bytes, fetch: Fetch) -> Applied:
        """Take a record. The one that was applied last gives its result again and changes nothing.

        Raises: InputError for a damaged record or one of another trainer, ConflictError where it does not follow on this version,
        ChecksumError where a delta gives other bits than promised; what `fetch` raises. The site is then as before.
        """
        if hashlib.sha256(content).hexdigest() == self._state.record_sha256:
            return Applied(self._state.version, self._state.digest, self._state.last_delta)
        applied, repair = self._take(self._state, content, fetch)
        try:
            log_record(self._folder, applied.version, content, repair)
        except BaseException:
            self._state = self._load()
            raise
        self._snapshot_if_due()
        return applied

    def _snapshot_if_due(self) -> None:
        """End the log. A failure waits for the next record: this one counts already."""
        if self._every and len(logged(self._folder)) >= self._every:
            try:
                write_snapshot(self._state, self._folder)
            except StoreError as error:
                logger.warning("no snapshot of version %d yet: %s", self._state.version, error)

    def _load(self) -> State:
        state = read_snapshot(self._folder)
        for version, path in logged(self._folder):
            if version > state.version:
                self._take(state, path.read_bytes(), lambda _, version=version: self._repair(version))  # type: ignore[misc]
        return state

    def _repair(self, version: int) -> bytes:
        path = repair_path(self._folder, version)
        if not path.is_file():
            raise ChecksumError(f"{path.with_suffix('.record')} gives other bits than it did when it was applied first")
        return path.read_bytes()

    def _take(self, state: State, content: bytes, fetch: Fetch) -> tuple[Applied, bytes | None]:
        """Move `state`, all of it or nothing; also the repair that was needed."""
        record = read_record(content)
        _check_follows(record, state)
        masters, wrong = expand_all(record, state)
        masters |= masters_sent(record, state)
        repair = fetch(wrong) if wrong else None
        entries = (*record.delta.entries, *mended(repair, wrong))
        made = [*checkpoint_deltas(masters, state), *(entry.tensor_delta for entry in entries)]
        base, version = record.head.base_digest, record.head.version
        delta = dump_delta(made, version=version, base_digest=base, digest=record.head.digest)
        apply_delta(read_delta(delta), state, state.prints)
        _advance(state, record, masters, wrong)
        state.record_sha256, state.last_delta = hashlib.sha256(content).hexdigest(), delta
        return Applied(version, state.digest, delta, tuple(wrong)), repair


def _check_follows(record: Record, state: State) -> None:
    head = record.head
    if head.chain != state.chain:
        raise InputError(f"the trainer began from the masters {head.chain[:12]}, this site from {state.chain[:12]}")
    if head.version <= head.base:
        raise InputError(f"version {head.version} cannot build on {head.base}")
    if head.base != state.version or head.base_digest != state.digest:
        raise ConflictError(
            f"version {head.version} builds on {head.base} ({head.base_digest[:12]}), "
            f"this site is at {state.version} ({state.digest[:12]})"
        )
    if odd := [name for name in record.names if name not in state.specs]:
        raise InputError(f"the record has {odd[0]}, which this site has not")


def _advance(state: State, record: Record, masters: Mapping[str, Master], wrong: Iterable[str]) -> None:
    version = record.head.version
    state.masters.update(masters)
    for name in masters:
        state.since[name] = version
        state.stale.discard(name)
    for name in wrong:
        if name in state.masters:
            state.since[name] = None
            state.stale.add(name)
    state.stale |= {entry.name for entry in record.delta.entries if entry.name in state.masters}
    state.version = version

"""A store, replicas and a fleet in one process, with the real core of a receiver, for tests of the commit protocol."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from groundhop.errors import GroundhopError, MissingError, ServerError
from groundhop.training.hotload.bits import Bits, TensorSpec, Weights
from groundhop.training.hotload.checkpoint import open_checkpoint
from groundhop.training.hotload.delta import Delta, read_delta
from groundhop.training.hotload.fleet import OperationHint
from groundhop.training.hotload.receiver.core import HotLoad, ReceiverCore
from groundhop.training.hotload.store.index import SnapshotIndex
from groundhop.training.hotload.store.materialize import materialize
from groundhop.training.hotload.store.objects import Objects


class MemoryObjects:
    """An `Objects` in a dictionary; `fail` may raise before an operation on a key."""

    def __init__(self, fail: Callable[[str, str], None] = lambda operation, key: None) -> None:
        self.held: dict[str, bytes] = {}
        self.fail = fail
        self._lock = Lock()

    def put(self, key: str, data: bytes) -> None:
        self.fail("put", key)
        with self._lock:
            self.held[key] = bytes(data)

    def put_file(self, key: str, path: Path) -> None:
        self.put(key, path.read_bytes())

    def create(self, key: str, data: bytes) -> bool:
        self.fail("create", key)
        with self._lock:
            return self.held.setdefault(key, kept := bytes(data)) is kept

    def get(self, key: str) -> bytes:
        self.fail("get", key)
        if key not in self.held:
            raise MissingError(f"no object {key}")
        return self.held[key]

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return self.get(key)[start:stop]

    def size(self, key: str) -> int:
        return len(self.get(key))

    def list(self, prefix: str) -> list[str]:
        return sorted(key for key in self.held if not prefix or key.startswith(f"{prefix}/"))

    def delete(self, key: str) -> None:
        self.held.pop(key, None)


class HeldWeights:
    """A `Weights` in memory that can be written."""

    def __init__(self, arrays: Mapping[str, Bits], specs: Mapping[str, TensorSpec]) -> None:
        self.arrays = {name: array.copy() for name, array in arrays.items()}
        self.specs = specs

    def bits(self, name: str) -> Bits:
        return self.arrays[name]


def copy_of(weights: Weights) -> HeldWeights:
    return HeldWeights({name: weights.bits(name) for name in weights.specs}, weights.specs)


class MemoryFleet:
    """Replicas that all must hold a snapshot; `deliver` stands for the network and may lose, repeat and reorder parts."""

    def __init__(self, objects: Objects, cores: Sequence[ReceiverCore]) -> None:
        self.objects, self.cores = objects, cores
        self.operations: list[OperationHint] = []
        self.folder: Path | None = None
        """Where a replica that a delta does not bring there gets the whole checkpoint from; None: it fails."""

    def hot_load(self, index: SnapshotIndex, operation_hint: OperationHint) -> None:
        self.operations.append(operation_hint)
        if index.kind == "full":
            assert self.folder is not None
            for core in self.cores:
                self._reload(core, index, self.folder / "whole")
            return
        parts = [(part.key, read_delta(self.objects.get(part.key))) for part in index.parts]
        failures = [failure for core in self.cores if (failure := self._prepare(core, index, parts))]
        if failures:
            raise ServerError("; ".join(failures))
        for core in self.cores:
            if core.dirty:
                core.commit(index.identity)

    def clean_on(self, identity: str) -> bool:
        return all(core.dirty is None and core.identity == identity for core in self.cores)

    def deliver(self, core: ReceiverCore, parts: Sequence[tuple[str, Delta]]) -> None:
        for key, delta in parts:
            core.apply(key, delta)

    def _prepare(self, core: ReceiverCore, index: SnapshotIndex, parts: Sequence[tuple[str, Delta]]) -> str | None:
        try:
            if core.begin(request_of(index)):
                self.deliver(core, parts)
                core.finish()
        except GroundhopError as error:
            if self.folder is None:
                return str(error)
            self._reload(core, index, self.folder / "whole")
        return None

    def _reload(self, core: ReceiverCore, index: SnapshotIndex, folder: Path) -> None:
        materialize(self.objects, index.identity, folder)
        whole = open_checkpoint(folder)
        for name in whole.specs:
            core._weights.bits(name)[:] = whole.bits(name)
        core.replaced(index.identity, index.digest)


def request_of(index: SnapshotIndex, **changes: Any) -> HotLoad:
    assert index.base is not None
    return HotLoad(
        **{
            "txn": index.identity,
            "identity": index.identity,
            "version": index.version,
            "base": index.base,
            "base_digest": index.base_digest,
            "digest": index.digest,
            "operation": index.operation,
            "epoch": index.epoch,
        }
        | changes
    )


def pattern(*patterns: int) -> np.ndarray[Any, Any]:
    """A trainer's FP16 tensor of these bit patterns."""
    return np.array(patterns, np.uint16).view(np.float16)

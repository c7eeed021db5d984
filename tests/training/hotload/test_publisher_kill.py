"""Kill -9 at every place of the protocol, then start again: no version names two states, no replica holds wrong bits.

The publisher runs in a forked process that also does the replicas' work; their weights, names and journals lie on disk, as a
replica's do. The process that starts again finds what the killed one left.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_fleet import HeldWeights, MemoryFleet
from small_states import Held, changed

from groundhop.training.hotload.bits import TensorSpec, Weights
from groundhop.training.hotload.checkpoint import open_checkpoint
from groundhop.training.hotload.delta import Delta
from groundhop.training.hotload.publisher import Publisher
from groundhop.training.hotload.receiver.core import ReceiverCore
from groundhop.training.hotload.store.disk import DiskObjects
from groundhop.training.hotload.store.index import SnapshotIndex
from groundhop.training.hotload.store.log import CommitLog
from groundhop.training.hotload.store.materialize import materialize
from groundhop.training.hotload.touched import read_touched

TYPES = {"F32": np.float32, "F16": np.float16, "U8": np.uint8}


def start_state() -> Held:
    """Four tensors of types that numpy has: a forked process had better not need torch."""
    shapes = {"a": ("F16", (48, 16)), "b": ("F32", (7, 33)), "c": ("F16", (65,)), "d": ("U8", (3, 11))}
    specs = {name: TensorSpec(name=name, dtype=kind, shape=shape) for name, (kind, shape) in shapes.items()}
    random = np.random.default_rng(5)
    held = {n: random.integers(0, 256, spec.nbytes, dtype=np.uint8).view(spec.unit) for n, spec in specs.items()}
    return Held(specs, held)


BASE = start_state()
FIRST = changed(BASE, seed=1)
SECOND = changed(FIRST, seed=2)
THIRD = changed(SECOND, seed=3)
THIRD.held["a"] = FIRST.held["a"].copy()
"""The trainer moved on, and one tensor went back to what it was in version 1."""

Hook = Callable[[str], None]
PLACES = ("begun", "leaving", "encoded", "ended", "indexed", "held", "committed", "advanced", "cleared")


class Replica(ReceiverCore):
    """A receiver whose name and weights survive its process."""

    def __init__(self, folder: Path, hook: Hook) -> None:
        arrays = {
            name: np.memmap(folder / name, spec.unit, "r+") if spec.size else np.empty(0, spec.unit)
            for name, spec in BASE.specs.items()
        }
        weights = HeldWeights({}, BASE.specs)
        weights.arrays = arrays
        self.folder, self.hook = folder, hook
        super().__init__(weights, (folder / "identity").read_text(), folder / "journal")

    def commit(self, txn: str) -> None:
        assert self._open is not None
        (self.folder / "identity").write_text(self._open.identity)
        super().commit(txn)
        self.hook("replica committed")

    @staticmethod
    def make(folder: Path) -> None:
        folder.mkdir(parents=True)
        for name, spec in BASE.specs.items():
            if spec.size:
                (folder / name).write_bytes(BASE.bits(name).tobytes())
        (folder / "identity").write_text("weight_v000000")


class DiskFleet(MemoryFleet):
    """Replicas on disk; `hook` is called while they are written."""

    def __init__(self, root: Path, hook: Hook) -> None:
        replicas = [Replica(root / f"replica{n}", hook) for n in range(2)]
        super().__init__(DiskObjects(root / "store"), replicas)
        self.folder, self.hook = root, hook

    def deliver(self, core: ReceiverCore, parts: Sequence[tuple[str, Delta]]) -> None:
        for number, (key, delta) in enumerate(parts):
            core.apply(key, delta)
            self.hook(f"part {number} of {len(parts)}")
        self.hook("all parts")

    def _reload(self, core: ReceiverCore, index: SnapshotIndex, folder: Path) -> None:
        super()._reload(core, index, folder)
        assert isinstance(core, Replica)
        (core.folder / "identity").write_text(core.identity)


def publisher(root: Path, hook: Hook = lambda place: None) -> Publisher:
    fleet = DiskFleet(root, hook)
    return Publisher(
        DiskObjects(root / "store"), root / "publisher", fleet, run_id="run", owner="one", part_bytes=1, checkpoint=hook
    )


def prepared(root: Path) -> Path:
    """A run at version 1 with two replicas."""
    for number in range(2):
        Replica.make(root / f"replica{number}")
    one = publisher(root)
    one.start(BASE)
    one.publish(named(FIRST))
    return root


def named(weights: Held) -> list[tuple[str, Any]]:
    """As a trainer gives them."""
    return [
        (name, weights.bits(name).view(TYPES[spec.dtype]).reshape(spec.shape)) for name, spec in weights.specs.items()
    ]


def killed(action: Callable[[Hook], None], place: str, nth: int = 1) -> bool:
    """Run `action` in a forked process that kills itself at the `nth` arrival at `place`. Whether it got there."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        arrivals = 0

        def hook(reached: str) -> None:
            nonlocal arrivals
            arrivals += reached == place
            if reached == place and arrivals == nth:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            action(hook)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def same(one: Weights, other: Weights) -> bool:
    return all(one.bits(name).tobytes() == other.bits(name).tobytes() for name in other.specs)


def go_on(root: Path, weights: Held) -> None:
    """Start again, publish, and check that replicas, baseline, store and log say the same."""
    one = publisher(root)
    one.start(BASE)
    done = one.publish(named(weights))
    fleet = one._fleet
    assert isinstance(fleet, DiskFleet)
    assert all(core.dirty is None and same(core._weights, weights) for core in fleet.cores)
    assert {(core.identity, core.digest) for core in fleet.cores} == {(done.identity, done.digest)}
    assert same(one.baseline, weights)
    assert read_touched(root / "publisher" / "attempts") == []
    materialize(DiskObjects(root / "store"), done.identity, root / "restored")
    assert same(open_checkpoint(root / "restored"), weights)
    commits = CommitLog(DiskObjects(root / "store")).commits()
    assert [commit.base for commit in commits] == [None, *(commit.identity for commit in commits[:-1])]


def publish_second(root: Path) -> Callable[[Hook], None]:
    def action(hook: Hook) -> None:
        one = publisher(root, hook)
        one.start(BASE)
        one.publish(named(SECOND))

    return action


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return prepared(tmp_path / "run")


@pytest.mark.parametrize("place", PLACES)
def test_a_killed_publisher_goes_on_with_right_bits(root: Path, place: str) -> None:
    assert killed(publish_second(root), place)
    go_on(root, THIRD)


@pytest.mark.parametrize("place", ["part 0 of 4", "part 2 of 4", "all parts", "replica committed"])
@pytest.mark.parametrize("nth", [1, 2], ids=["first replica", "second replica"])
def test_a_replica_killed_at_any_step_ends_with_right_bits(root: Path, place: str, nth: int) -> None:
    assert killed(publish_second(root), place, nth)
    go_on(root, THIRD)


def test_a_kill_between_the_record_and_the_end_of_the_baselines_advance_is_redone(root: Path) -> None:
    def action(hook: Hook) -> None:
        one = publisher(root)

        def torn(place: str) -> None:
            if place == "committed":
                (file,) = read_touched(root / "publisher" / "attempts")
                for row in list(file.rows())[:2]:
                    array = one.baseline._arrays[row.name]
                    array[slice(None) if row.positions is None else row.positions] = row.values
                hook("half advanced")

        one._at = torn
        one.start(BASE)
        one.publish(named(SECOND))

    assert killed(action, "half advanced")
    go_on(root, THIRD)


@pytest.mark.parametrize("first", ["leaving", "indexed", "held"])
def test_kills_in_a_row_are_mended_together(root: Path, first: str) -> None:
    assert killed(publish_second(root), first)

    def action(hook: Hook) -> None:
        one = publisher(root, hook)
        one.start(BASE)
        one.publish(named(THIRD))

    assert killed(action, "part 1 of 4")
    assert killed(action, "indexed")
    go_on(root, FIRST)


@pytest.mark.parametrize("place", ["indexed", "held", "committed"])
def test_a_kill_in_the_first_version_leaves_a_run_that_can_begin(tmp_path: Path, place: str) -> None:
    for number in range(2):
        Replica.make(tmp_path / f"replica{number}")

    def action(hook: Hook) -> None:
        one = publisher(tmp_path, hook)
        one.start(BASE)

    assert killed(action, place)
    one = publisher(tmp_path)
    one.start(BASE)
    assert same(one.baseline, BASE)

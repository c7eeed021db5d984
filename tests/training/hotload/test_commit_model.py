"""The model of the commit protocol (Monte Carlo, `dcr_sim.py`) run on the real publisher and the real core of a receiver.

Each run: three replicas, twelve steps of a trainer that often goes back to old values, parts that arrive out of order, twice or
not at all, replicas that break off inside a part. The seeded bugs are those of the model.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_fleet import HeldWeights, MemoryFleet, MemoryObjects, copy_of

from groundhop.errors import GroundhopError, ServerError
from groundhop.training.hotload.delta import Delta
from groundhop.training.hotload.fleet import OperationHint
from groundhop.training.hotload.publisher import Publisher
from groundhop.training.hotload.receiver.core import HotLoad, ReceiverCore
from groundhop.training.hotload.store.index import SnapshotIndex
from groundhop.training.hotload.touched import TouchedFile

TENSORS, EACH = 10, 4
RUNS, ENOUGH = 20, 60
BUGS = ("xor_retry", "no_union", "no_dedup")


class Retrying(Publisher):
    """Bug: a retry sends differences again."""

    def _operation(self, files: list[TouchedFile]) -> OperationHint:
        return "differential"


class Forgetting(Publisher):
    """Bug: a retry overwrites only what differs now."""

    def _touched(self, files: list[TouchedFile]) -> Mapping[str, Any]:
        return {}


class Trusting(ReceiverCore):
    """A receiver that checks nothing, so that a bug shows as wrong bits and not as a refusal."""

    def _require_base(self, request: HotLoad) -> None: ...

    def _require_old(self, entry: Any) -> None: ...

    def _require_new(self, request: HotLoad) -> None: ...


class Repeating(Trusting):
    """Bug: a part that comes twice is applied twice."""

    def _is_repeated(self, key: str) -> bool:
        return False


class RepeatingChecked(ReceiverCore):
    """The same bug where bits are checked."""

    def _is_repeated(self, key: str) -> bool:
        return False


class LossyFleet(MemoryFleet):
    """Loses, repeats and reorders parts; replicas break off between two tensors; answers are lost."""

    def __init__(self, objects: MemoryObjects, cores: Sequence[ReceiverCore], random: np.random.Generator) -> None:
        super().__init__(objects, cores)
        self.random, self.loss = random, 0.06

    def hot_load(self, index: SnapshotIndex, operation_hint: OperationHint) -> None:
        super().hot_load(index, operation_hint)
        # Every replica holds it, but the word of it is lost.
        if self.random.random() < self.loss:
            raise ServerError("the answer was lost")

    def deliver(self, core: ReceiverCore, parts: Sequence[tuple[str, Delta]]) -> None:
        for place in self.random.permutation(len(parts)):
            if self.random.random() < self.loss:
                raise ServerError("a part was lost")
            key, delta = parts[place]
            for _ in range(1 + (self.random.random() < 0.2)):
                if self.random.random() < self.loss / 2:
                    cut = int(self.random.integers(len(delta.entries) + 1))
                    core.apply(key, Delta(delta.version, "", "", delta.entries[:cut]))
                    raise ServerError("broke off inside a part")
                core.apply(key, delta)


def tensors(state: np.ndarray[Any, Any]) -> Iterator[tuple[str, Any]]:
    for number in range(TENSORS):
        yield f"t{number}", state[number * EACH : (number + 1) * EACH].view(np.float16)


def stepped(state: np.ndarray[Any, Any], random: np.random.Generator) -> np.ndarray[Any, Any]:
    """A small alphabet, so that elements go back to what they were."""
    state = state.copy()
    state[random.choice(state.size, 6, replace=False)] = random.integers(0, 4, 6)
    return state


def run(seed: int, folder: Path, publisher_kind: type[Publisher], core_kind: type[ReceiverCore]) -> str | None:
    """What went wrong, None if nothing did."""
    random = np.random.default_rng(seed)
    state = random.integers(0, 4, TENSORS * EACH).astype(np.uint16)
    objects = MemoryObjects()
    fleet = LossyFleet(objects, [], random)
    publisher = publisher_kind(
        objects, folder, fleet, run_id="model", owner="model", encoding="xor", part_bytes=60, mapped=False
    )
    publisher.start(list(tensors(state)))
    weights = [copy_of(publisher.baseline) for _ in range(3)]
    fleet.cores = [core_kind(one, publisher.baseline.identity) for one in weights]
    done = False
    for turn in range(12):
        fleet.loss = 0.06 if turn < 10 else 0.0
        if random.random() < 0.8:
            state = stepped(state, random)
        with suppress(GroundhopError):
            done = False
            publisher.publish(tensors(state))
            done = True
        if done and any(wrong(one, state) for one in weights):
            return f"seed {seed}: version {publisher.baseline.version} was committed, but a replica differs"
    return None if done else f"seed {seed}: no progress"


def wrong(weights: HeldWeights, state: np.ndarray[Any, Any]) -> bool:
    return any(not np.array_equal(weights.bits(name), bits.view(np.uint16)) for name, bits in tensors(state))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a place: thousands of small files are synchronised here."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as name:
        yield Path(name)


def failures(folder: Path, seeds: int, publisher: type[Publisher], core: type[ReceiverCore]) -> Iterator[str]:
    for seed in range(seeds):
        if failure := run(seed, folder / str(seed), publisher, core):
            yield failure


@pytest.mark.parametrize("core", [ReceiverCore, Trusting])
def test_replicas_hold_every_committed_version_bit_for_bit(folder: Path, core: type[ReceiverCore]) -> None:
    assert list(failures(folder, RUNS, Publisher, core)) == []


@pytest.mark.parametrize("bug", BUGS)
def test_each_bug_of_the_model_shows_as_wrong_bits_where_nobody_checks(folder: Path, bug: str) -> None:
    publisher = {"xor_retry": Retrying, "no_union": Forgetting}.get(bug, Publisher)
    found = next(failures(folder, ENOUGH, publisher, Repeating if bug == "no_dedup" else Trusting), "")
    assert "a replica differs" in found


@pytest.mark.parametrize("bug", BUGS)
def test_no_bug_of_the_model_gets_past_the_digests(folder: Path, bug: str) -> None:
    publisher = {"xor_retry": Retrying, "no_union": Forgetting}.get(bug, Publisher)
    core = RepeatingChecked if bug == "no_dedup" else ReceiverCore
    found = {failure.partition(": ")[2] for failure in failures(folder, RUNS, publisher, core)}
    assert found == {"no progress"}

"""What a replica accepts, refuses and claims."""

from pathlib import Path

import numpy as np
import pytest
from memory_fleet import HeldWeights, request_of
from small_states import changed, state

from groundhop.errors import ChecksumError, FencedError, InputError
from groundhop.training.hotload.bits import Weights
from groundhop.training.hotload.delta import Delta, dump_delta, encode_tensor, prints_of, read_delta
from groundhop.training.hotload.fingerprint import state_digest
from groundhop.training.hotload.receiver.core import HotLoad, ReceiverCore
from groundhop.training.hotload.store.index import SnapshotIndex

BASE = state()
TARGET = changed(BASE)
LATER = changed(TARGET, seed=10)


def digest(weights: Weights) -> str:
    return state_digest(weights.specs, prints_of(weights))


def held(weights: Weights) -> HeldWeights:
    return HeldWeights({name: weights.bits(name) for name in weights.specs}, weights.specs)


def request(old: Weights, new: Weights, base: int, to: int, operation: str = "differential", epoch: int = 1) -> HotLoad:
    index = SnapshotIndex(
        identity=f"v{to}", version=to, kind="delta", layout="groundhop", base=f"v{base}", base_digest=digest(old),
        digest=digest(new), operation=operation, epoch=epoch,  # type: ignore[arg-type]
    )  # fmt: skip
    return request_of(index)


def part(old: Weights, new: Weights, overwrite: bool = False) -> Delta:
    also = np.empty(0, np.int64) if overwrite else None
    deltas = [encode_tensor(spec, old.bits(name), new.bits(name), also=also) for name, spec in old.specs.items()]
    return read_delta(dump_delta([d for d in deltas if d], version=1, base_digest="", digest=""))


def same(one: Weights, other: Weights) -> bool:
    return all(one.bits(name).tobytes() == other.bits(name).tobytes() for name in other.specs)


def load(core: ReceiverCore, wanted: HotLoad, delta: Delta) -> None:
    if core.begin(wanted):
        core.apply("part", delta)
        core.finish()
        core.commit(wanted.txn)


def test_a_differential_snapshot_gives_the_target_and_its_name() -> None:
    weights = held(BASE)
    core = ReceiverCore(weights, "v3")
    load(core, request(BASE, TARGET, 3, 4), part(BASE, TARGET))
    assert (core.identity, core.dirty, core.digest, same(weights, TARGET)) == ("v4", None, digest(TARGET), True)


def test_a_delta_on_another_base_is_refused_untouched() -> None:
    weights = held(BASE)
    core = ReceiverCore(weights, "v3")
    with pytest.raises(InputError, match="base v4 needed, have v3"):
        core.begin(request(TARGET, LATER, 4, 5))
    assert (core.identity, core.dirty, same(weights, BASE)) == ("v3", None, True)


def test_the_same_snapshot_again_is_a_success_without_work() -> None:
    core = ReceiverCore(held(TARGET), "v5")
    assert core.begin(request(BASE, TARGET, 4, 5)) is False


def test_the_same_name_with_other_bits_is_refused() -> None:
    core = ReceiverCore(held(LATER), "v5")
    with pytest.raises(InputError):
        core.begin(request(BASE, TARGET, 4, 5))


def test_an_older_publisher_is_refused() -> None:
    core = ReceiverCore(held(BASE), "v3")
    load(core, request(BASE, TARGET, 3, 4, epoch=2), part(BASE, TARGET))
    with pytest.raises(FencedError):
        core.begin(request(TARGET, LATER, 4, 5, epoch=1))


def test_a_replica_that_broke_off_takes_no_differences() -> None:
    core = ReceiverCore(held(BASE), "v3")
    core.begin(request(BASE, TARGET, 3, 4))
    core.abort()
    with pytest.raises(InputError, match="half written"):
        core.begin(request(BASE, LATER, 3, 5))


def test_a_replica_that_broke_off_is_mended_by_an_overwrite() -> None:
    weights = held(BASE)
    core = ReceiverCore(weights, "v3")
    core.begin(request(BASE, TARGET, 3, 4))
    first = part(BASE, TARGET)
    core.apply("part", Delta(first.version, "", "", first.entries[:2]))
    core.abort()
    load(core, request(BASE, TARGET, 3, 6, "overwrite"), part(BASE, TARGET, overwrite=True))
    assert (core.identity, core.dirty, same(weights, TARGET)) == ("v6", None, True)


def test_a_snapshot_that_was_never_committed_is_overwritten_from_its_base() -> None:
    weights = held(BASE)
    core = ReceiverCore(weights, "v3")
    load(core, request(BASE, TARGET, 3, 4), part(BASE, TARGET))
    load(core, request(BASE, LATER, 3, 5, "overwrite"), part(BASE, LATER, overwrite=True))
    assert (core.identity, same(weights, LATER)) == ("v5", True)


def test_an_overwrite_that_forgets_an_element_is_not_claimed() -> None:
    core = ReceiverCore(held(BASE), "v3")
    load(core, request(BASE, TARGET, 3, 4), part(BASE, TARGET))
    wanted = request(BASE, BASE, 3, 5, "overwrite")
    core.begin(wanted)
    with pytest.raises(ChecksumError):
        core.finish()
    with pytest.raises(ChecksumError):
        core.commit(wanted.txn)
    assert core.dirty is not None


def test_a_part_that_comes_twice_counts_once() -> None:
    weights = held(BASE)
    core = ReceiverCore(weights, "v3")
    core.begin(request(BASE, TARGET, 3, 4))
    counts = [core.apply("part", part(BASE, TARGET)), core.apply("part", part(BASE, TARGET))]
    assert (counts[0] > 0, counts[1], core.finish()) == (True, 0, digest(TARGET))


def test_the_journal_is_there_before_the_first_write_and_gone_after_the_commit(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    core = ReceiverCore(held(BASE), "v3", journal)
    wanted = request(BASE, TARGET, 3, 4)
    core.begin(wanted)
    assert ReceiverCore(held(BASE), "v3", journal).dirty == core.dirty
    core.apply("part", part(BASE, TARGET))
    core.finish()
    core.commit(wanted.txn)
    assert ReceiverCore(held(TARGET), "v4", journal).dirty is None


def test_a_whole_load_heals_what_was_half_written(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    ReceiverCore(held(BASE), "v3", journal).begin(request(BASE, TARGET, 3, 4))
    core = ReceiverCore(held(TARGET), "v3", journal)
    core.replaced("v4", digest(TARGET))
    assert (core.identity, core.dirty, journal.exists()) == ("v4", None, False)


def test_a_whole_load_of_other_bits_heals_nothing() -> None:
    core = ReceiverCore(held(BASE), "v3")
    core.begin(request(BASE, TARGET, 3, 4))
    with pytest.raises(ChecksumError):
        core.replaced("v4", digest(TARGET))
    assert core.dirty is not None

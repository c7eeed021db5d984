"""Publishing: what readers get, what an error leaves, who may publish."""

import contextlib
import gc
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from memory_fleet import MemoryFleet, MemoryObjects, copy_of
from small_disk import small_disk
from small_states import Held, changed, state, tree, write_folder

from groundhop.errors import ConflictError, FencedError, InputError, ServerError, SpaceError, StoreError
from groundhop.training.hotload.bits import Weights
from groundhop.training.hotload.checkpoint import open_checkpoint
from groundhop.training.hotload.delta import read_delta
from groundhop.training.hotload.fleet import OperationHint
from groundhop.training.hotload.publisher import Published, Publisher
from groundhop.training.hotload.receiver.core import ReceiverCore
from groundhop.training.hotload.store.disk import DiskObjects
from groundhop.training.hotload.store.index import SnapshotIndex, read_index
from groundhop.training.hotload.store.log import Abort, Commit, CommitLog
from groundhop.training.hotload.store.materialize import materialize
from groundhop.training.hotload.store.objects import Objects
from groundhop.training.hotload.touched import read_touched

torch = pytest.importorskip("torch")
TORCH_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "U8": torch.uint8}


def named(weights: Held) -> Iterator[tuple[str, Any]]:
    """As a trainer gives them."""
    for name, spec in weights.specs.items():
        given = torch.empty(spec.shape, dtype=TORCH_TYPES[spec.dtype])
        given.view(-1).view(torch.uint8)[:] = torch.from_numpy(weights.bits(name).view(np.uint8).copy())
        yield name, given


def publisher(objects: Objects, folder: Path, **options: Any) -> Publisher:
    return Publisher(objects, folder, **{"run_id": "run", "owner": "one", "part_bytes": 200} | options)


def fleet_of(objects: Objects, weights: Weights, replicas: int = 2) -> MemoryFleet:
    return MemoryFleet(objects, [ReceiverCore(copy_of(weights), "weight_v000000") for _ in range(replicas)])


def same(one: Weights, other: Weights) -> bool:
    return all(one.bits(name).tobytes() == other.bits(name).tobytes() for name in other.specs)


def held_by(fleet: MemoryFleet, weights: Weights) -> bool:
    """Whether all replicas hold exactly these bits, clean."""
    return all(core.dirty is None and same(core._weights, weights) for core in fleet.cores)


def read_back(objects: Objects, identity: str, folder: Path) -> Weights:
    materialize(objects, identity, folder)
    return open_checkpoint(folder)


BASE = state()
STATES = [BASE]
for seed in range(4):
    STATES.append(changed(STATES[-1], seed=seed))


@pytest.fixture
def store() -> MemoryObjects:
    return MemoryObjects()


@pytest.fixture(params=[(), ("cpu",)], ids=["host", "device"])
def one(store: MemoryObjects, tmp_path: Path, request: pytest.FixtureRequest) -> Publisher:
    """A publisher at version 0 with two replicas, in `one.fleet`; once more as if the tensors lay on a device."""
    made = publisher(store, tmp_path / "one", devices=request.param)
    made._fleet = fleet_of(store, BASE)
    made.start(BASE)
    return made


@pytest.mark.parametrize("layout", ["groundhop", "shared"])
def test_readers_of_the_store_get_every_version_bit_for_bit(store: MemoryObjects, tmp_path: Path, layout: str) -> None:
    one = publisher(store, tmp_path / "one", layout=layout)
    one.start(BASE)
    for version, weights in enumerate(STATES[1:], 1):
        done = one.publish(named(weights))
        assert (done.version, done.identity) == (version, f"weight_v{version:06d}")
        assert same(read_back(store, done.identity, tmp_path / str(version)), weights)


def test_replicas_and_store_agree_on_bits_and_digest(one: Publisher) -> None:
    done = one.publish(named(STATES[1]))
    assert held_by(one._fleet, STATES[1])
    assert {core.digest for core in one._fleet.cores} == {done.digest, one.baseline.digest}


def test_a_clean_fleet_gets_differences(one: Publisher) -> None:
    one.publish(named(STATES[1]))
    one.publish(named(STATES[2]))
    assert one._fleet.operations == ["differential", "differential"]


def test_a_step_that_changes_nothing_is_a_small_version_of_its_own(one: Publisher, store: MemoryObjects) -> None:
    done = one.publish(named(BASE))
    (part,) = read_index(store, done.identity).parts
    assert (done.version, done.changed, len(read_delta(store.get(part.key)).entries)) == (1, 0, 0)
    assert done.bytes < 200
    assert {core.identity for core in one._fleet.cores} == {"weight_v000001"}


def test_the_numbers_say_what_changed(one: Publisher) -> None:
    done = one.publish(named(STATES[1]))
    differing = sum(int((BASE.bits(n) != STATES[1].bits(n)).sum()) for n in BASE.specs)
    assert (done.changed, done.total) == (differing, sum(spec.size for spec in BASE.specs.values()))


def test_a_checkpoint_folder_starts_a_run_and_comes_back_file_by_file(store: MemoryObjects, tmp_path: Path) -> None:
    folder = write_folder(BASE, tmp_path / "hf")
    one = publisher(store, tmp_path / "one")
    one.start(open_checkpoint(folder))
    materialize(store, one.baseline.identity, tmp_path / "out")
    files = {name: raw for name, raw in tree(folder).items() if "/" not in name}
    assert {name: raw for name, raw in tree(tmp_path / "out").items() if name in files} == files


def test_sign_of_zero_and_nan_payloads_are_published(store: MemoryObjects, tmp_path: Path) -> None:
    before = np.array([0x0000, 0x7FC0, 0x7FC1, 0x3F80], np.uint16)
    after = np.array([0x8000, 0x7FC1, 0x7FC1, 0x3F80], np.uint16)
    one = publisher(store, tmp_path / "one")
    one.start([("w", before.view(np.float16))])
    done = one.publish([("w", after.view(np.float16))])
    assert done.changed == 2
    assert read_back(store, done.identity, tmp_path / "out").bits("w").tolist() == after.tolist()


def test_a_failed_hot_load_leaves_an_abort_record_and_the_head(one: Publisher, store: MemoryObjects) -> None:
    fail_once(one._fleet, written=1)
    with pytest.raises(ServerError):
        one.publish(named(STATES[1]))
    last = CommitLog(store).entries()[-1]
    assert isinstance(last, Abort)
    assert (last.identity, one.baseline.identity) == ("weight_v000001", "weight_v000000")


def test_the_next_version_mends_what_a_failed_one_wrote(one: Publisher) -> None:
    fail_once(one._fleet, written=1)
    with pytest.raises(ServerError):
        one.publish(named(STATES[1]))
    done = one.publish(named(STATES[2]))
    assert (done.version, one._fleet.operations[-1]) == (2, "overwrite")
    assert held_by(one._fleet, STATES[2])


def test_an_element_that_went_back_to_its_old_value_is_mended_too(one: Publisher) -> None:
    fail_once(one._fleet, written=1)
    with pytest.raises(ServerError):
        one.publish(named(STATES[1]))
    # The trainer went back to the baseline: nothing differs from it, yet one replica holds something else.
    done = one.publish(named(BASE))
    assert (done.changed, held_by(one._fleet, BASE)) == (0, True)


def test_after_the_mending_differences_are_sent_again(one: Publisher) -> None:
    fail_once(one._fleet, written=1)
    with pytest.raises(ServerError):
        one.publish(named(STATES[1]))
    one.publish(named(STATES[2]))
    one.publish(named(STATES[3]))
    assert one._fleet.operations == ["differential", "overwrite", "differential"]
    assert held_by(one._fleet, STATES[3])


def test_a_version_that_the_fleet_took_although_it_said_otherwise_is_committed(one: Publisher) -> None:
    one._fleet = Forgetful(one._fleet)
    with pytest.raises(ServerError):
        one.publish(named(STATES[1]))
    done = one.publish(named(STATES[2]))
    commits = [entry.identity for entry in one._lease._log.commits()]
    assert commits == ["weight_v000000", "weight_v000001", "weight_v000002"]
    assert (done.version, held_by(one._fleet.fleet, STATES[2])) == (2, True)


def test_wrong_tensors_stop_a_version_and_not_the_next(one: Publisher) -> None:
    with pytest.raises(InputError, match="did not give"):
        one.publish(list(named(STATES[1]))[:2])
    one.publish(named(STATES[2]))
    assert held_by(one._fleet, STATES[2])


@pytest.mark.parametrize("error", [StoreError, SpaceError])
@pytest.mark.parametrize("operation", ["put", "create"])
def test_a_store_that_fails_loses_nothing(
    one: Publisher, store: MemoryObjects, error: type[StoreError], operation: str
) -> None:
    store.fail = failing(operation, "weight_v000001/", error)
    with pytest.raises(error):
        one.publish(named(STATES[1]))
    assert one._fleet.operations == []
    store.fail = lambda *_: None
    one.publish(named(STATES[2]))
    assert held_by(one._fleet, STATES[2])


def test_a_commit_whose_answer_was_lost_counts(one: Publisher, store: MemoryObjects) -> None:
    whole = store.create

    def create(key: str, data: bytes) -> bool:
        done = whole(key, data)
        if key.startswith("log/") and b"weight_v000001" in data:
            store.create = whole  # type: ignore[method-assign]
            raise StoreError("the answer was lost")
        return done

    store.create = create  # type: ignore[method-assign]
    with pytest.raises(StoreError):
        one.publish(named(STATES[1]))
    done = one.publish(named(STATES[2]))
    assert (done.version, read_index(store, done.identity).base) == (2, "weight_v000001")
    assert held_by(one._fleet, STATES[2])


def test_a_full_disk_under_the_publisher_loses_nothing(store: MemoryObjects, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64 * 1024) as disk:
        one = publisher(store, disk / "one")
        one._fleet = fleet_of(store, BASE)
        one.start(BASE)
        filler = disk / "filler"
        filler.write_bytes(b"\0" * (disk_free(disk)))
        with pytest.raises(SpaceError):
            one.publish(named(STATES[1]))
        filler.unlink()
        one.publish(named(STATES[2]))
        assert held_by(one._fleet, STATES[2])
        one.close()
        gc.collect()


def test_a_full_store_loses_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 96 * 1024) as disk:
        objects = DiskObjects(disk / "store")
        one = publisher(objects, tmp_path / "one")
        one._fleet = fleet_of(objects, BASE)
        one.start(BASE)
        filler = disk / "filler"
        filler.write_bytes(b"\0" * (disk_free(disk)))
        with pytest.raises(SpaceError):
            one.publish(named(STATES[1]))
        filler.unlink()
        one.publish(named(STATES[2]))
        assert held_by(one._fleet, STATES[2])


def test_a_write_ahead_set_that_was_damaged_after_its_commit_is_not_needed(
    store: MemoryObjects, tmp_path: Path
) -> None:
    def stop(place: str) -> None:
        if place == "committed":
            raise KeyboardInterrupt

    one = publisher(store, tmp_path / "one")
    one.start(BASE)
    one._at = stop
    with pytest.raises(KeyboardInterrupt):
        one.publish(named(STATES[1]))
    (path,) = (tmp_path / "one" / "attempts").iterdir()
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    again = publisher(store, tmp_path / "one")
    again.start(BASE)
    assert (again.baseline.identity, same(again.baseline, STATES[1])) == ("weight_v000001", True)


def test_a_full_disk_at_the_start_is_an_error_and_not_a_signal(store: MemoryObjects, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4096) as disk, pytest.raises(SpaceError):
        publisher(store, disk / "one").start(BASE)


def test_no_byte_leaves_before_its_tensor_is_in_the_write_ahead_set(store: MemoryObjects, tmp_path: Path) -> None:
    one = publisher(store, tmp_path / "one")
    one.start(BASE)
    late: list[str] = []

    def put(key: str, data: bytes) -> None:
        if key.endswith(".ghd"):
            rows = {row.name for file in read_touched(one._attempts) for row in file.rows()}
            late.extend(entry.name for entry in read_delta(data).entries if entry.name not in rows)
            late.append(f"{len(rows)} rows")
        MemoryObjects.put(store, key, data)

    store.put = put  # type: ignore[method-assign]
    one.publish(named(STATES[1]))
    assert late
    assert [name for name in late if not name.endswith(" rows")] == []


def test_parts_are_uploaded_while_the_next_tensors_are_coded(store: MemoryObjects, tmp_path: Path) -> None:
    second, leaving = Event(), []

    def at(place: str) -> None:
        leaving.append(place)
        if leaving.count("leaving") == 2:
            second.set()

    def put(operation: str, key: str) -> None:
        # The first upload ends only after the second part was coded: in one thread this would wait for ever.
        if key.endswith(".ghd"):
            assert second.wait(60)

    one = publisher(store, tmp_path / "one", part_bytes=1, checkpoint=at)
    one.start(BASE)
    store.fail = put
    one.publish(named(STATES[1]))
    assert second.is_set()


def test_a_number_is_never_used_twice(one: Publisher, store: MemoryObjects, tmp_path: Path) -> None:
    fail_once(one._fleet, written=1)
    with pytest.raises(ServerError):
        one.publish(named(STATES[1]))
    # The folder is lost, and with it all memory of version 1 but the store's.
    two = publisher(store, tmp_path / "two")
    two.start(BASE)
    assert two.publish(named(STATES[1])).version == 2
    with pytest.raises(InputError, match="above 2"):
        two.publish(named(STATES[2]), version=2)
    assert two.publish(named(STATES[2]), version=7).identity == "weight_v000007"


@pytest.mark.parametrize("mapped", [True, False])
def test_a_restarted_publisher_goes_on_from_the_last_version(
    store: MemoryObjects, tmp_path: Path, mapped: bool
) -> None:
    for number, weights in enumerate(STATES[1:], 1):
        one = publisher(store, tmp_path / "one", mapped=mapped, anchor_every=2)
        one.start(BASE)
        done = one.publish(named(weights))
        assert (done.version, same(one.baseline, weights)) == (number, True)
    assert read_index(store, "weight_v000004").operation == "differential"


def test_a_baseline_that_was_damaged_is_built_again(store: MemoryObjects, tmp_path: Path) -> None:
    publisher(store, tmp_path / "one").start(BASE)
    (bits,) = (tmp_path / "one").glob("*.bits")
    raw = bytearray(bits.read_bytes())
    raw[100] ^= 1
    bits.write_bytes(raw)
    one = publisher(store, tmp_path / "one")
    one.start(BASE)
    assert same(one.baseline, BASE)


def test_every_so_many_versions_are_published_whole_too(store: MemoryObjects, tmp_path: Path) -> None:
    folder = write_folder(BASE, tmp_path / "hf")
    one = publisher(store, tmp_path / "one", anchor_every=2)
    one.start(open_checkpoint(folder))
    for weights in STATES[1:]:
        one.publish(named(weights))
    full = [key for key in store.list("") if "-anchor/model.safetensors.index.json" in key]
    assert [key.partition("/")[0] for key in full] == ["weight_v000002-anchor", "weight_v000004-anchor"]
    for identity, weights in (("weight_v000002-anchor", STATES[2]), ("weight_v000004-anchor", STATES[4])):
        restored = read_back(store, identity, tmp_path / identity)
        assert same(restored, weights)
        assert (tmp_path / identity / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_an_anchor_that_fails_does_not_fail_its_version(store: MemoryObjects, tmp_path: Path) -> None:
    one = publisher(store, tmp_path / "one", anchor_every=1)
    one.start(BASE)
    store.fail = failing("put", "weight_v000001-anchor/", SpaceError)
    assert one.publish(named(STATES[1])).version == 1
    store.fail = lambda *_: None
    one.publish(named(STATES[2]))
    assert read_index(store, "weight_v000002-anchor").kind == "full"


def test_a_store_belongs_to_one_run(one: Publisher, store: MemoryObjects, tmp_path: Path) -> None:
    with pytest.raises(ConflictError, match="'run'"):
        publisher(store, tmp_path / "two", run_id="another").start(BASE)


def test_another_owner_waits_for_the_lease(one: Publisher, store: MemoryObjects, tmp_path: Path) -> None:
    with pytest.raises(ConflictError, match="one publishes here"):
        publisher(store, tmp_path / "two", owner="two").start(BASE)


@pytest.mark.parametrize("place", ["begun", "leaving", "encoded", "ended", "indexed", "held"])
def test_a_publisher_that_was_taken_over_changes_nothing_more(store: MemoryObjects, tmp_path: Path, place: str) -> None:
    two = publisher(store, tmp_path / "two", owner="two", take_over=True)
    done: list[Published] = []

    def at(reached: str) -> None:
        if reached == place and not done:
            two.start(BASE)
            done.append(two.publish(named(STATES[2])))

    one = publisher(store, tmp_path / "one")
    one.start(BASE)
    fleet = fleet_of(store, BASE)
    fleet.folder = tmp_path
    one._fleet = two._fleet = fleet
    one._at = at
    with pytest.raises(FencedError):
        one.publish(named(STATES[1]))
    with pytest.raises(FencedError):
        one.publish(named(STATES[1]))
    assert CommitLog(store).head() is not None
    assert (CommitLog(store).commits()[-1].identity, held_by(fleet, STATES[2])) == (done[0].identity, True)


def test_of_two_racing_publishers_one_commits_each_head(store: MemoryObjects, tmp_path: Path) -> None:
    racers = [publisher(store, tmp_path / owner, owner=owner, take_over=True) for owner in ("one", "two")]
    racers[0].start(BASE)
    for weights, turn in zip(STATES[1:], (1, 0, 1, 0), strict=True):
        racers[turn].start(BASE)
        with pytest.raises(FencedError):
            racers[1 - turn].publish(named(weights))
        racers[turn].publish(named(weights))
    commits = [entry for entry in CommitLog(store).entries() if isinstance(entry, Commit)]
    assert [entry.base for entry in commits] == [None, *(entry.identity for entry in commits[:-1])]
    assert len({entry.version for entry in commits}) == len(commits) == 5


def test_publishers_that_take_the_store_from_each_other_all_the_time_leave_one_chain(
    store: MemoryObjects, tmp_path: Path
) -> None:
    committed: list[str] = []

    def race(owner: str) -> None:
        for turn in range(6):
            racer = publisher(store, tmp_path / owner, owner=owner, take_over=True)
            with contextlib.suppress(FencedError, ConflictError):
                racer.start(BASE)
                committed.append(racer.publish(named(STATES[1 + turn % 4])).identity)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(race, ("one", "two")))
    commits = CommitLog(store).commits()
    assert [entry.base for entry in commits] == [None, *(entry.identity for entry in commits[:-1])]
    assert set(committed) <= {entry.identity for entry in commits}
    last = commits[-1].identity
    assert read_index(store, last).digest == open_digest(store, last, tmp_path / "out")


def test_a_run_on_a_folder_and_on_a_real_s3_server(objects: Objects, tmp_path: Path) -> None:
    one = publisher(objects, tmp_path / "one", anchor_every=2)
    fleet = one._fleet = fleet_of(objects, BASE)
    one.start(BASE)
    one.publish(named(STATES[1]))
    fail_once(fleet, written=1)
    with pytest.raises(ServerError):
        one.publish(named(STATES[2]))
    one.publish(named(STATES[3]))
    two = publisher(objects, tmp_path / "two", owner="two", take_over=True)
    two._fleet = fleet
    two.start(BASE)
    with pytest.raises(FencedError):
        one.publish(named(STATES[4]))
    done = two.publish(named(STATES[4]))
    assert (done.version, held_by(fleet, STATES[4])) == (4, True)
    assert fleet.operations == ["differential", "differential", "overwrite", "differential"]
    assert same(read_back(objects, done.identity, tmp_path / "out"), STATES[4])
    assert same(read_back(objects, "weight_v000003-anchor", tmp_path / "anchor"), STATES[3])


class Forgetful:
    """A fleet that holds the first snapshot and says that it does not."""

    def __init__(self, fleet: MemoryFleet) -> None:
        self.fleet, self.said = fleet, False

    def hot_load(self, index: SnapshotIndex, operation_hint: OperationHint) -> None:
        self.fleet.hot_load(index, operation_hint)
        if not self.said:
            self.said = True
            raise ServerError("the answer was lost")

    def clean_on(self, identity: str) -> bool:
        return self.fleet.clean_on(identity)


def fail_once(fleet: MemoryFleet, written: int) -> None:
    """The first replica breaks off after `written` parts of the next snapshot; the others take all of it."""
    deliver = fleet.deliver

    def broken(core: ReceiverCore, parts: Any) -> None:
        fleet.deliver = deliver  # type: ignore[method-assign]
        deliver(core, parts[:written])
        raise ServerError("broke off")

    fleet.deliver = broken  # type: ignore[method-assign]


def failing(operation: str, prefix: str, error: type[Exception]) -> Any:
    def fail(asked: str, key: str) -> None:
        if asked == operation and key.startswith(prefix):
            raise error(f"{key}: no")

    return fail


def open_digest(objects: Objects, identity: str, folder: Path) -> str:
    materialize(objects, identity, folder)
    return open_checkpoint(folder).digest


def disk_free(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize

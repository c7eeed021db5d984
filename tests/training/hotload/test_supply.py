"""The way from what a replica holds to a snapshot: the cheapest that is sure, fetched and checked before anything stops."""

from pathlib import Path
from typing import Any

import pytest
from plain_states import arrays_of, state
from small_disk import small_disk
from small_states import changed

from groundhop.errors import ChecksumError, FencedError, MissingError, SpaceError
from groundhop.training.hotload.journal import Held, Record, Writing
from groundhop.training.hotload.publisher import Publisher
from groundhop.training.hotload.store.objects import Objects, open_objects
from groundhop.training.hotload.store.snapshots import read_index
from groundhop.training.hotload.supply import Depot, held_of


class Store:
    """A store with versions 0 to `last`, each a delta on the one before, and a depot."""

    def __init__(self, folder: Path, last: int, encoding: Any = "xor") -> None:
        self.objects: Objects = open_objects(folder / "store")
        self.folder = folder
        now = state()
        publisher = Publisher(self.objects, folder / "publisher", run_id="run", owner="me", encoding=encoding)
        publisher.start(arrays_of(now))
        for seed in range(last):
            now = changed(now, seed=seed)
            publisher.publish(arrays_of(now))
        self.depot = Depot(self.objects, folder / "agent")

    def held(self, version: int) -> Held:
        return held_of(self.index(version))

    def index(self, version: int) -> Any:
        return read_index(self.objects, f"weight_v{version:06d}")

    def break_part(self, version: int, content: bytes | None) -> None:
        (part,) = self.index(version).parts
        path = self.folder / "store" / part.key
        path.unlink() if content is None else path.write_bytes(content)


def test_one_version_on_is_one_step(tmp_path: Path) -> None:
    store = Store(tmp_path, 2)
    supply = store.depot.prepare(Record(held=store.held(1)), store.index(2))
    assert (supply.target, supply.whole, len(supply.steps)) == (store.held(2), None, 1)
    assert supply.steps[0].base_digest == store.held(1).digest


def test_the_same_version_again_needs_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path, 2)
    assert store.depot.prepare(Record(held=store.held(2)), store.index(2)).empty


def test_missed_versions_are_one_step_where_they_fold(tmp_path: Path) -> None:
    store = Store(tmp_path, 4)
    supply = store.depot.prepare(Record(held=store.held(0)), store.index(4))
    assert [(step.base_digest, step.to) for step in supply.steps] == [(store.held(0).digest, store.held(4))]


def test_missed_versions_that_need_old_bits_are_steps_in_a_row(tmp_path: Path) -> None:
    store = Store(tmp_path, 3, encoding="context")
    supply = store.depot.prepare(Record(held=store.held(0)), store.index(3))
    assert supply.steps[-1].to == store.held(3)
    assert [step.base_digest for step in supply.steps] == [
        store.held(0).digest,
        *(s.to.digest for s in supply.steps[:-1]),
    ]


def test_unknown_weights_need_the_whole(tmp_path: Path) -> None:
    store = Store(tmp_path, 2)
    supply = store.depot.prepare(Record(), store.index(2))
    assert supply.whole is not None
    assert (supply.whole.held, supply.steps) == (store.held(2), ())


def test_a_checkpoint_at_hand_saves_the_whole(tmp_path: Path) -> None:
    store = Store(tmp_path, 3)
    store.depot.keep("weight_v000001")
    supply = store.depot.prepare(Record(), store.index(3))
    assert supply.whole is not None
    assert (supply.whole.held, len(supply.steps), supply.target) == (store.held(1), 1, store.held(3))


def test_half_written_weights_never_get_a_difference(tmp_path: Path) -> None:
    store = Store(tmp_path, 2)
    dirty = Record(held=store.held(1), writing=Writing(txn="t", to=store.held(2)))
    assert store.depot.prepare(dirty, store.index(2)).whole is not None


def test_prepared_weights_are_what_was_written(tmp_path: Path) -> None:
    store = Store(tmp_path, 2)
    prepared = Record(held=store.held(1), writing=Writing(txn="t", to=store.held(2), verified=True))
    assert store.depot.prepare(prepared, store.index(2)).empty


@pytest.mark.parametrize(("content", "error"), [(None, MissingError), (b"half", ChecksumError)])
def test_a_part_that_is_absent_or_cut_is_never_handed_out(
    tmp_path: Path, content: bytes | None, error: type[Exception]
) -> None:
    store = Store(tmp_path, 2)
    store.break_part(2, content)
    with pytest.raises(error):
        store.depot.prepare(Record(held=store.held(1)), store.index(2))


def test_a_snapshot_of_a_publisher_that_was_replaced_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path, 1)
    assert store.depot.read_index("weight_v000001", least_epoch=1).epoch == 1
    with pytest.raises(FencedError):
        store.depot.read_index("weight_v000001", least_epoch=2)


def test_what_nobody_needs_any_more_goes(tmp_path: Path) -> None:
    store = Store(tmp_path, 3)
    store.depot.prepare(Record(held=store.held(0)), store.index(3))
    store.depot.restore(store.index(2))
    (tmp_path / "agent" / "whole" / "weight_v000001").mkdir()
    store.depot.tidy({"weight_v000003"})
    assert [path.name for path in (tmp_path / "agent" / "whole").iterdir()] == [store.depot.kept] == ["weight_v000002"]
    assert {path.name for path in (tmp_path / "agent" / "staged").iterdir()} == {
        "weight_v000003",
        "weight_v000003.fold",
    }


def test_a_full_disk_is_refused_and_costs_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path, 2)
    with small_disk(tmp_path / "disk", 64 * 1024) as disk:
        depot = Depot(store.objects, disk)
        (disk / "other").write_bytes(b"x" * 64 * 1024)
        with pytest.raises(SpaceError):
            depot.prepare(Record(held=store.held(1)), store.index(2))
        assert not [path for path in disk.rglob("*") if path.is_file() and path.name != "other"]
        (disk / "other").unlink()
        assert len(depot.prepare(Record(held=store.held(1)), store.index(2)).steps) == 1


def test_a_checkpoint_at_hand_makes_room_for_what_is_needed(tmp_path: Path) -> None:
    store = Store(tmp_path, 2)
    with small_disk(tmp_path / "disk", 64 * 1024) as disk:
        depot = Depot(store.objects, disk)
        (disk / "whole" / "weight_v000000").mkdir(parents=True)
        (disk / "whole" / "weight_v000000" / "model.safetensors").write_bytes(b"x" * 64 * 1024)
        assert len(depot.prepare(Record(held=store.held(1)), store.index(2)).steps) == 1
        assert depot.kept is None

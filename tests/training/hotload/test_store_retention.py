"""Pruning removes what nobody needs, and never what a live replica or a resumable trainer needs."""

import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from faulty import Faulty
from hypothesis import given, settings
from hypothesis import strategies as st
from test_store_log import commit
from test_store_route import delta, full, reader

from groundhop.cli import main
from groundhop.errors import InputError, MissingError, StoreError
from groundhop.training.hotload.store.index import index_key
from groundhop.training.hotload.store.log import CommitLog
from groundhop.training.hotload.store.objects import Objects, open_objects
from groundhop.training.hotload.store.retention import plan_pruning, prune
from groundhop.training.hotload.store.snapshots import (
    SnapshotIndex,
    SnapshotWriter,
    anchor_of,
    identity_of,
    read_index,
    route,
)


@dataclass(frozen=True)
class Store:
    """A chain from a full snapshot 0 to `head`; some links are full themselves, some have an anchor beside them."""

    indexes: list[SnapshotIndex]
    head: int
    live: set[str]
    resumable: set[str]
    keep_anchors: int


@st.composite
def stores(draw: st.DrawFn) -> Store:
    head = draw(st.integers(0, 12))
    indexes = [full(0)]
    for version in range(1, head + 1):
        match draw(st.sampled_from(["delta"] * 6 + ["full", "anchored", "aborted"])):
            case "full":
                indexes.append(full(version))
            case "anchored":
                indexes += [delta(version), full(version, anchor_of(identity_of(version)))]
            case "aborted":
                attempt = delta(version)
                lost = SnapshotIndex(
                    **{**{f: getattr(attempt, f) for f in attempt.__struct_fields__}, "identity": f"lost-{version}"}
                )
                indexes += [lost, attempt]
            case _:
                indexes.append(delta(version))
    held = st.sets(st.sampled_from([index.identity for index in indexes]), max_size=3)
    return Store(indexes, head, draw(held), draw(held), draw(st.integers(0, 3)))


@given(store=stores())
@settings(max_examples=30, deadline=None)
def test_everything_needed_can_still_be_restored_and_still_moves_on_by_deltas(store: Store) -> None:
    head = identity_of(store.head)
    gone = set(plan_pruning(store.indexes, store.live | {head}, store.resumable, store.keep_anchors))
    before, after = reader(*store.indexes), reader(*(i for i in store.indexes if i.identity not in gone))
    for identity in store.live | store.resumable | {head}:
        assert route(after, None, identity) == route(before, None, identity)
        assert route(after, identity, head) == route(before, identity, head)


@given(store=stores())
@settings(max_examples=20, deadline=None)
def test_the_newest_anchors_stay(store: Store) -> None:
    gone = set(plan_pruning(store.indexes, {identity_of(store.head)}, set(), store.keep_anchors))
    anchors = [index for index in store.indexes if index.kind == "full"]
    kept = [index.identity for index in anchors if index.identity not in gone]
    newest = sorted(anchors, key=lambda index: (index.version, index.identity))[len(anchors) - store.keep_anchors :]
    assert {index.identity for index in newest[-store.keep_anchors :] if store.keep_anchors} <= set(kept)


def test_a_chain_below_the_last_anchor_goes_when_all_are_at_the_head() -> None:
    chain = [full(0), *(delta(v) for v in range(1, 41)), *(full(v, anchor_of(identity_of(v))) for v in (20, 40))]
    gone = plan_pruning(chain, {identity_of(40)}, set(), keep_anchors=1)
    assert gone == [
        index.identity for index in sorted(chain, key=lambda i: (i.version, i.identity)) if index.version < 40
    ]


def test_a_lagging_replica_keeps_the_deltas_that_it_lacks() -> None:
    chain = [full(0), *(delta(v) for v in range(1, 31)), full(20, anchor_of(identity_of(20)))]
    gone = plan_pruning(chain, {identity_of(25), identity_of(30)}, set(), keep_anchors=1)
    assert gone == [identity_of(v) for v in range(21)]


def test_a_resumable_trainer_keeps_its_start_and_the_way_to_it() -> None:
    chain = [full(0), *(delta(v) for v in range(1, 31)), full(20, anchor_of(identity_of(20)))]
    assert plan_pruning(chain, {identity_of(30)}, {identity_of(7)}, keep_anchors=0) == []


def test_first_weights_that_the_store_does_not_hold_keep_what_builds_on_them() -> None:
    chain = [delta(v) for v in range(1, 31)] + [full(v, anchor_of(identity_of(v))) for v in (10, 20, 30)]
    assert plan_pruning(chain, {identity_of(0), identity_of(30)}, set(), keep_anchors=0) == []
    assert identity_of(3) in plan_pruning(chain, {"of another deployment", identity_of(30)}, set(), keep_anchors=0)


def test_nothing_goes_when_nobody_is_named() -> None:
    assert plan_pruning([full(0), delta(1)], set(), set(), keep_anchors=0) == []


def test_a_negative_number_of_anchors_is_refused() -> None:
    with pytest.raises(InputError, match="keep_anchors"):
        plan_pruning([], set(), set(), keep_anchors=-1)


def publish(objects: Objects, log: CommitLog, top: int, anchors: tuple[int, ...]) -> None:
    """A chain with tiny parts, and its log."""
    epoch = log.acquire("trainer", 600)
    for version in range(top + 1):
        base = identity_of(version - 1) if version else None
        kind = "delta" if version else "full"
        with SnapshotWriter(objects, identity_of(version), version=version, kind=kind, base=base) as writer:
            writer.add(SHARD if kind == "full" else b"delta %d" % version)
            writer.finish(digest="")
        log.commit(
            epoch, base, txn=f"t{version}", identity=identity_of(version), version=version, index_sha256="", digest=""
        )
        if version in anchors:
            with SnapshotWriter(objects, anchor_of(identity_of(version)), version=version, kind="full") as writer:
                writer.add(SHARD)
                writer.finish(digest="")


SHARD = (2).to_bytes(8, "little") + b"{}"


def folders(objects: Objects) -> set[str]:
    return {key.partition("/")[0] for key in objects.list("")} - {"log"}


def test_pruned_snapshots_are_gone_and_the_rest_is_whole(objects: Objects) -> None:
    log = CommitLog(objects)
    publish(objects, log, 6, anchors=(4,))
    gone = prune(objects, log, {identity_of(5)}, set(), keep_anchors=1)
    assert gone == [identity_of(version) for version in range(5)]
    assert folders(objects) == {identity_of(5), identity_of(6), anchor_of(identity_of(4))}
    for name in folders(objects):
        assert all(objects.size(part.key) for part in read_index(objects, name).parts)
    assert len(CommitLog(objects).commits()) == 7


def test_a_prune_that_was_killed_is_finished_by_the_next(tmp_path: Path) -> None:
    objects = open_objects(tmp_path)
    log = CommitLog(objects)
    publish(objects, log, 6, anchors=(4,))
    deleted: list[str] = []

    def die(method: str, key: str) -> None:
        if method == "delete":
            deleted.append(key)
            if len(deleted) == 4:
                raise StoreError("killed")

    with pytest.raises(StoreError):
        prune(Faulty(objects, before=die), log, set(), set(), keep_anchors=1)
    prune(objects, log, set(), set(), keep_anchors=1)
    assert folders(objects) == {identity_of(5), identity_of(6), anchor_of(identity_of(4))}


def test_a_reader_never_finds_an_index_whose_parts_were_pruned(tmp_path: Path) -> None:
    objects = open_objects(tmp_path)
    log = CommitLog(objects)
    publish(objects, log, 4, anchors=(3,))

    def look(method: str, key: str) -> None:
        folder = key.partition("/")[0]
        try:
            parts = read_index(objects, folder).parts if method == "delete" else ()
        except MissingError:
            return
        assert all(objects.size(part.key) for part in parts)

    prune(Faulty(objects, after=look), log, set(), set(), keep_anchors=1)
    assert identity_of(0) not in folders(objects)


def test_what_killed_attempts_left_goes_and_what_is_being_written_stays(tmp_path: Path) -> None:
    objects = open_objects(tmp_path)
    log = CommitLog(objects)
    publish(objects, log, 2, anchors=())
    epoch = log.epoch()
    log.abort(epoch, txn="lost", identity="given-up", version=3, reason="a replica was lost")
    strays = {
        "given-up/delta-00001-0123456789abcdef.ghd": False,
        "being-written/delta-00001-0123456789abcdef.ghd": True,
        f"{anchor_of(identity_of(2))}/model-00001-0123456789abcdef.safetensors": True,
        f"{identity_of(2)}/delta-00009-0123456789abcdef.ghd": False,
        f"{identity_of(2)}/README": True,
        "somebody/elses/file": True,
    }
    for key in strays:
        objects.put(key, b"x")
    prune(objects, log, set(), {identity_of(0)}, keep_anchors=1)
    left = set(objects.list(""))
    assert {key: key in left for key in strays} == strays


def test_what_is_committed_while_it_looks_stays(tmp_path: Path) -> None:
    objects = open_objects(tmp_path)
    log = CommitLog(objects)
    publish(objects, log, 2, anchors=())
    identity = identity_of(3)
    writer = SnapshotWriter(objects, identity, version=3, kind="delta", base=identity_of(2))

    def commit_now(method: str, key: str) -> None:
        if (method, key) == ("list", ""):
            writer.finish(digest="")
            CommitLog(objects).commit(
                log.epoch(), identity_of(2), txn="t3", identity=identity, version=3, index_sha256="", digest=""
            )

    with writer:
        writer.add(b"delta 3")
        # Its part lies there when the store is listed, its index does not.
        wait_until_listed(objects, identity)
        prune(Faulty(objects, after=commit_now), log, set(), set(), keep_anchors=1)
    assert all(objects.size(part.key) for part in read_index(objects, identity).parts)


def wait_until_listed(objects: Objects, folder: str) -> None:
    """Until a writer's thread has brought a first part to the store."""
    end = time.monotonic() + 60
    while not objects.list(folder):
        assert time.monotonic() < end
        time.sleep(0.001)


def test_the_command_names_what_it_deletes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    objects = open_objects(tmp_path)
    publish(objects, CommitLog(objects), 4, anchors=(3,))
    command = ["hotload", "prune", str(tmp_path), "--keep-anchors", "1"]
    assert main([*command, "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{tmp_path}: 4 snapshots would go"
    assert len(folders(objects)) == 6
    assert main([*command, "--keep", identity_of(2)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{tmp_path}: 0 snapshots deleted"
    assert main(command) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == [*(identity_of(v) for v in range(4)), f"{tmp_path}: 4 snapshots deleted"]
    assert folders(objects) == {identity_of(4), anchor_of(identity_of(3))}


def test_a_store_without_a_log_is_not_pruned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hotload", "prune", str(tmp_path)]) == 1
    assert "no committed snapshot" in capsys.readouterr().err


def test_the_head_is_never_pruned(tmp_path: Path) -> None:
    objects = open_objects(tmp_path)
    log = CommitLog(objects)
    publish(objects, log, 3, anchors=(3,))
    prune(objects, log, set(), set(), keep_anchors=0)
    assert objects.size(index_key(identity_of(3))) > 0


def test_the_log_outlives_what_it_names(tmp_path: Path) -> None:
    objects = open_objects(tmp_path)
    log = CommitLog(objects)
    publish(objects, log, 3, anchors=(3,))
    prune(objects, log, set(), set(), keep_anchors=0)
    commit(log, log.acquire("trainer", 60), identity_of(3), 4)
    assert [entry.version for entry in CommitLog(objects).commits()] == [0, 1, 2, 3, 4]

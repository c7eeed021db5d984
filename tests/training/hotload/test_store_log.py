"""The commit log: one order for all, one winner a head, and a publisher that was replaced changes nothing more."""

import os
import subprocess
import sys
import textwrap
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from faulty import Faulty
from small_disk import small_disk

from groundhop.errors import (
    ChecksumError,
    ConflictError,
    FencedError,
    GroundhopError,
    InputError,
    SpaceError,
    StoreError,
)
from groundhop.training.hotload.store.log import Abort, Commit, CommitLog, entry_key, read_entry
from groundhop.training.hotload.store.objects import Objects, open_objects


def commit(log: CommitLog, epoch: int, head: str | None, version: int, txn: str = "") -> Commit:
    return log.commit(
        epoch,
        head,
        txn=txn or f"t{version}",
        identity=f"v{version}",
        version=version,
        index_sha256="i" * 64,
        digest="d" * 64,
    )


def committed(log: CommitLog) -> list[str]:
    return [entry.identity for entry in log.commits()]


def test_commits_move_the_head_in_order(objects: Objects) -> None:
    log = CommitLog(objects)
    epoch = log.acquire("trainer", 60)
    assert (epoch, log.head()) == (1, None)
    for version in range(3):
        commit(log, epoch, f"v{version - 1}" if version else None, version)
    head = CommitLog(objects).head()
    assert (head and (head.identity, head.base, head.epoch), committed(CommitLog(objects))) == (
        ("v2", "v1", 1),
        ["v0", "v1", "v2"],
    )


def test_a_reader_that_is_open_sees_what_others_append(objects: Objects) -> None:
    reader, writer = CommitLog(objects), CommitLog(objects)
    assert reader.entries() == []
    commit(writer, writer.acquire("trainer", 60), None, 0)
    assert (reader.epoch(), committed(reader)) == (1, ["v0"])


def test_a_moved_head_is_a_conflict(objects: Objects) -> None:
    log = CommitLog(objects)
    epoch = log.acquire("trainer", 60)
    commit(log, epoch, None, 1)
    for head in (None, "v0"):
        with pytest.raises(ConflictError, match="the head is v1"):
            commit(log, epoch, head, 2)
    assert committed(log) == ["v1"]


@pytest.mark.parametrize("version", [0, 3, 4])
def test_versions_never_start_again(tmp_path: Path, version: int) -> None:
    log = CommitLog(open_objects(tmp_path))
    epoch = log.acquire("trainer", 60)
    commit(log, epoch, None, 4, txn="first")
    with pytest.raises(ConflictError, match="version above 4"):
        commit(log, log.acquire("trainer", 60), "v4", version, txn="second")


def test_a_publisher_that_was_replaced_changes_nothing(objects: Objects) -> None:
    old, new = CommitLog(objects), CommitLog(objects)
    first = old.acquire("one", 60)
    commit(old, first, None, 0)
    second = new.acquire("two", 60, take_over=True)
    with pytest.raises(FencedError, match="two publishes with epoch 2"):
        commit(old, first, "v0", 1)
    with pytest.raises(FencedError):
        old.abort(first, txn="t1", identity="v1", version=1, reason="late")
    commit(new, second, "v0", 1, txn="new")
    assert committed(CommitLog(objects)) == ["v0", "v1"]


def test_a_running_lease_is_not_taken_unasked(objects: Objects) -> None:
    CommitLog(objects).acquire("one", 3600)
    with pytest.raises(ConflictError, match="one publishes here"):
        CommitLog(objects).acquire("two", 60)
    assert [CommitLog(objects).acquire("two", 60, take_over=True), CommitLog(objects).acquire("two", 60)] == [2, 3]


def test_a_lease_that_ran_out_is_free(objects: Objects) -> None:
    CommitLog(objects).acquire("one", 0)
    assert CommitLog(objects).acquire("two", 60) == 2


def test_an_epoch_that_nobody_acquired_is_refused(tmp_path: Path) -> None:
    log = CommitLog(open_objects(tmp_path))
    for epoch in (0, 1, 7):
        with pytest.raises(InputError, match="never acquired"):
            commit(log, epoch, None, 0)


def test_a_transaction_that_is_asked_for_twice_is_committed_once(objects: Objects) -> None:
    log = CommitLog(objects)
    epoch = log.acquire("trainer", 60)
    first = commit(log, epoch, None, 0)
    assert (commit(CommitLog(objects), epoch, None, 0), committed(log)) == (first, ["v0"])
    with pytest.raises(ConflictError, match="other content"):
        commit(log, epoch, "v0", 1, txn="t0")


def test_an_aborted_transaction_cannot_be_committed(objects: Objects) -> None:
    log = CommitLog(objects)
    epoch = log.acquire("trainer", 60)
    log.abort(epoch, txn="t0", identity="v0", version=0, reason="a replica was lost")
    log.abort(epoch, txn="t0", identity="v0", version=0, reason="again")
    with pytest.raises(ConflictError, match="a replica was lost"):
        commit(log, epoch, None, 0)
    commit(log, epoch, None, 0, txn="next")
    with pytest.raises(ConflictError, match="committed as v0"):
        log.abort(epoch, txn="next", identity="v0", version=0, reason="too late")
    assert [type(entry) for entry in log.entries()][1:] == [Abort, Commit]


@pytest.mark.parametrize("landed", [True, False])
def test_a_lost_answer_is_settled_by_looking(objects: Objects, landed: bool) -> None:
    def lose(method: str, key: str) -> None:
        if (method, key) == ("create", entry_key(1)):
            raise StoreError("the connection was reset")

    epoch = CommitLog(objects).acquire("trainer", 60)
    with pytest.raises(StoreError):
        commit(CommitLog(Faulty(objects, after=lose) if landed else Faulty(objects, before=lose)), epoch, None, 0)
    assert committed(CommitLog(objects)) == (["v0"] if landed else [])
    commit(CommitLog(objects), epoch, None, 0)
    assert committed(CommitLog(objects)) == ["v0"]


def test_a_write_that_is_answered_as_taken_by_itself_counts(tmp_path: Path) -> None:
    """S3 clients try again by themselves; the second try then finds the slot taken by the first."""

    class Twice(Faulty):
        def create(self, key: str, data: bytes) -> bool:
            return super().create(key, data) and super().create(key, data)

    log = CommitLog(Twice(open_objects(tmp_path)))
    commit(log, log.acquire("trainer", 60), None, 0)
    assert (len(log.entries()), committed(log)) == (2, ["v0"])


def test_a_commit_that_finds_no_space_did_not_happen(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 1 << 14) as folder:
        log = CommitLog(open_objects(folder / "store"))
        epoch = log.acquire("trainer", 60)
        (folder / "ballast").write_bytes(bytes(os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize))
        with pytest.raises(SpaceError):
            commit(log, epoch, None, 0)
        (folder / "ballast").unlink()
        assert (CommitLog(log.objects).head(), commit(log, epoch, None, 0).identity) == (None, "v0")


def race(log: CommitLog, epoch: int, name: str, heads: int) -> int:
    """Try to commit each head after what one sees. Returns how often that succeeded."""
    won = 0
    while (head := log.head()) is None or head.version < heads:
        version = head.version + 1 if head else 0
        try:
            log.commit(
                epoch,
                head.identity if head else None,
                txn=f"{name}-{version}",
                identity=f"{name}-{version}",
                version=version,
                index_sha256=name,
                digest="",
            )
            won += 1
        except ConflictError:
            pass
    return won


def test_of_committers_in_one_epoch_one_wins_each_head(objects: Objects) -> None:
    epoch = CommitLog(objects).acquire("trainer", 600)
    with ThreadPoolExecutor(3) as pool:
        won = list(pool.map(lambda name: race(CommitLog(objects), epoch, name, 6), ["a", "b", "c"]))
    versions = [entry.version for entry in CommitLog(objects).commits()]
    assert (versions, sum(won)) == (list(range(7)), 7)


RACER = """
    import sys
    from groundhop.errors import ConflictError, FencedError
    from groundhop.training.hotload.store.log import CommitLog
    from groundhop.training.hotload.store.objects import open_objects
    name, url = sys.argv[1:]
    log = CommitLog(open_objects(url))
    won = fenced = 0
    epoch = log.acquire(name, 600, take_over=True)
    print("ready", flush=True)
    sys.stdin.readline()
    while (head := log.head()) is None or head.version < 12:
        version = head.version + 1 if head else 0
        try:
            log.commit(epoch, head.identity if head else None, txn=f"{name}-{version}-{epoch}", identity=f"{name}-{version}",
                       version=version, index_sha256=name, digest="")
            won += 1
        except FencedError:
            fenced += 1
            epoch = log.acquire(name, 600, take_over=True)
        except ConflictError:
            pass
    print(won, fenced)
"""


def test_two_processes_that_both_publish_make_one_chain(store_url: str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(RACER)]
    racers = [
        subprocess.Popen([*command, name, store_url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name in ("one", "two")
    ]
    for racer in racers:
        assert racer.stdout
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin
        racer.stdin.write("go\n")
        racer.stdin.flush()
    counts = [[int(word) for word in racer.communicate()[0].split()] for racer in racers]
    chain = CommitLog(open_objects(store_url)).commits()
    winners = Counter(entry.index_sha256 for entry in chain)
    assert [entry.version for entry in chain] == list(range(13))
    assert [entry.base for entry in chain[1:]] == [entry.identity for entry in chain[:-1]]
    assert [counts[0][0], counts[1][0]] == [winners["one"], winners["two"]]


def test_every_flipped_byte_of_an_entry_is_noticed(tmp_path: Path) -> None:
    log = CommitLog(open_objects(tmp_path))
    commit(log, log.acquire("trainer", 60), None, 0)
    raw = log.objects.get(entry_key(1))
    accepted = []
    for at in range(len(raw)):
        damaged = bytearray(raw)
        damaged[at] ^= 1
        try:
            read_entry(bytes(damaged), "entry")
            accepted.append(at)
        except GroundhopError:
            pass
    assert accepted == []


def test_a_damaged_or_foreign_entry_stops_readers_and_writers(objects: Objects) -> None:
    log = CommitLog(objects)
    epoch = log.acquire("trainer", 60)
    commit(log, epoch, None, 0)
    raw = objects.get(entry_key(1))
    objects.put(entry_key(1), raw.replace(b'"v0"', b'"v9"'))
    with pytest.raises(ChecksumError):
        CommitLog(objects).head()
    objects.put(entry_key(1), raw)
    objects.put(entry_key(2), raw)
    with pytest.raises(InputError, match="does not follow"):
        commit(CommitLog(objects), epoch, "v0", 1)


def test_a_long_log_is_read_whole(objects: Objects) -> None:
    log = CommitLog(objects)
    epoch = log.acquire("trainer", 60)
    for version in range(25):
        commit(log, epoch, f"v{version - 1}" if version else None, version)
    assert committed(CommitLog(objects)) == [f"v{version}" for version in range(25)]


def test_a_log_with_a_hole_is_refused(objects: Objects) -> None:
    log = CommitLog(objects)
    epoch = log.acquire("trainer", 60)
    for version in range(3):
        commit(log, epoch, f"v{version - 1}" if version else None, version)
    objects.delete(entry_key(1))
    with pytest.raises(GroundhopError):
        CommitLog(objects).head()

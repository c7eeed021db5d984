"""A store keeps two promises, on a folder and on S3 alike: objects are whole or absent, and `create` has one winner."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from small_disk import small_disk
from store_servers import free_ports, use_s3

from groundhop.errors import CredentialError, InputError, MissingError, SpaceError, StoreError
from groundhop.training.hotload.store.objects import Objects, open_objects


def test_what_was_put_is_got(objects: Objects) -> None:
    objects.put("a/b", b"one")
    objects.put("a/b", b"three")
    assert (objects.get("a/b"), objects.size("a/b")) == (b"three", 5)


def test_create_leaves_a_taken_key_as_it_is(objects: Objects) -> None:
    assert [objects.create("k", b"first"), objects.create("k", b"second"), objects.get("k")] == [True, False, b"first"]


def test_of_many_creators_at_once_one_wins(objects: Objects) -> None:
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda number: objects.create("race", b"%d" % number), range(8)))
    assert (sum(won), objects.get("race")) == (1, b"%d" % won.index(True))


@pytest.mark.parametrize("method", ["get", "size"])
def test_an_absent_object_is_missing(objects: Objects, method: str) -> None:
    objects.put("other", b"")
    with pytest.raises(MissingError, match="no/such"):
        getattr(objects, method)("no/such")
    with pytest.raises(MissingError):
        objects.get_range("no/such", 0, 4)


def test_a_range_ends_where_the_object_ends(objects: Objects) -> None:
    objects.put("k", b"01234")
    ranges = [(1, 3), (3, 9), (5, 9), (9, 12), (2, 2), (0, 5)]
    assert [objects.get_range("k", *each) for each in ranges] == [b"12", b"34", b"", b"", b"", b"01234"]


def test_a_listing_holds_one_folder_and_not_its_namesakes(objects: Objects) -> None:
    for key in ("a/2", "a/1", "a/deep/3", "ab/4", "b"):
        objects.put(key, b".")
    assert objects.list("a") == ["a/1", "a/2", "a/deep/3"]
    assert objects.list("") == ["a/1", "a/2", "a/deep/3", "ab/4", "b"]
    assert objects.list("none") == []


def test_deleting_twice_is_deleting_once(objects: Objects) -> None:
    objects.put("a/b", b".")
    objects.delete("a/b")
    objects.delete("a/b")
    assert objects.list("") == []


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/../b", "a/.", "..", "a b", "a\\b", "ä", "a" * 901])
def test_no_key_leaves_its_store(objects: Objects, key: str) -> None:
    with pytest.raises(InputError, match="not a key"):
        objects.put(key, b"x")


def test_a_file_of_many_parts_arrives_whole(objects: Objects, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(os.urandom(1 << 20) * 19 + b"end")
    objects.put_file("large", tmp_path / "large")
    assert objects.get("large") == (tmp_path / "large").read_bytes()


def test_a_writer_killed_on_the_way_leaves_nothing_that_can_be_seen(tmp_path: Path) -> None:
    code = f"""
        import os, signal
        from groundhop.training.hotload.store import disk
        disk.os.link = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        disk.DiskObjects(__import__("pathlib").Path({str(tmp_path)!r})).create("a/b", b"x" * 1000)
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    objects = open_objects(tmp_path)
    assert (killed.returncode, objects.list(""), objects.create("a/b", b"y")) == (-signal.SIGKILL, [], True)


def test_a_full_disk_is_said_and_changes_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 1 << 20) as folder:
        objects = open_objects(folder / "store")
        objects.put("a", b"old")
        with pytest.raises(SpaceError, match="No space left"):
            objects.put("a", b"new" * (1 << 20))
        with pytest.raises(SpaceError):
            objects.create("b", b"new" * (1 << 20))
        assert (objects.get("a"), objects.list("")) == (b"old", ["a"])


def test_a_server_that_is_gone_is_a_store_error(monkeypatch: pytest.MonkeyPatch) -> None:
    use_s3(f"http://127.0.0.1:{free_ports(1)[0]}", monkeypatch)
    with pytest.raises(StoreError, match="object k"):
        open_objects("s3://bucket/prefix").get("k")


def test_a_wrong_key_is_a_credential_error(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_s3(s3_server, monkeypatch)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    with pytest.raises(CredentialError):
        open_objects("s3://tests/prefix").put("k", b"x")


def test_a_file_url_and_a_path_are_the_same_store(tmp_path: Path) -> None:
    open_objects(tmp_path / "my store").put("k", b"x")
    assert open_objects(f"file://{tmp_path}/my%20store").get("k") == b"x"


def test_other_schemes_are_refused() -> None:
    with pytest.raises(InputError, match="ftp"):
        open_objects("ftp://host/folder")


def test_a_store_that_was_moved_is_the_same_store(tmp_path: Path) -> None:
    open_objects(tmp_path / "one").put("a/b", b"x")
    shutil.move(tmp_path / "one", tmp_path / "two")
    assert open_objects(tmp_path / "two").list("") == ["a/b"]

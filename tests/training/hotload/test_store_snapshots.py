"""Snapshots are immutable and whole: what a reader gets was checked byte by byte, and comes from one attempt only."""

import json
from collections import Counter
from pathlib import Path

import pytest
from faulty import Faulty
from small_disk import small_disk
from small_states import state, write_folder
from snapshot_builders import publish_full

from groundhop.errors import (
    ChecksumError,
    ConflictError,
    GroundhopError,
    InputError,
    MissingError,
    SpaceError,
    StoreError,
)
from groundhop.training.hotload.store.index import decode_index, index_key
from groundhop.training.hotload.store.objects import Objects, open_objects
from groundhop.training.hotload.store.snapshots import (
    Part,
    SnapshotIndex,
    SnapshotWriter,
    check_identity,
    fetch,
    identity_of,
    read_index,
)


def delta_writer(objects: Objects, identity: str = "v2", **more: object) -> SnapshotWriter:
    return SnapshotWriter(objects, identity, version=2, kind="delta", base="v1", base_digest="b" * 64, **more)  # type: ignore[arg-type]


def write(objects: Objects, *parts: bytes, digest: str = "d" * 64, identity: str = "v2") -> SnapshotIndex:
    with delta_writer(objects, identity) as writer:
        for part in parts:
            writer.add(part)
        return writer.finish(digest=digest, changed=3, total=9)


def fetched(objects: Objects, index: SnapshotIndex, folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in fetch(objects, index, folder, wait_s=0)]


def test_what_was_written_is_read(objects: Objects, tmp_path: Path) -> None:
    index = write(objects, b"one", b"two" * 1000, b"")
    assert read_index(objects, "v2") == index
    assert fetched(objects, index, tmp_path / "in") == [b"one", b"two" * 1000, b""]


def test_the_index_is_the_last_object_to_appear(objects: Objects) -> None:
    order: list[str] = []
    write(Faulty(objects, after=lambda method, key: order.append(key)), b"one", b"two", b"three")
    assert (len(order), order[-1]) == (4, index_key("v2"))


def test_a_reader_never_mixes_a_killed_attempt_with_the_next(objects: Objects, tmp_path: Path) -> None:
    killed = delta_writer(objects)
    killed.add(b"first attempt, shard 1")
    killed.close()
    with pytest.raises(MissingError):
        read_index(objects, "v2")
    index = write(objects, b"second attempt, shard 1", b"second attempt, shard 2")
    late = delta_writer(objects)
    late.add(b"first attempt, shard 2")
    late.close()
    assert fetched(objects, read_index(objects, "v2"), tmp_path / "in") == [
        b"second attempt, shard 1",
        b"second attempt, shard 2",
    ]
    assert read_index(objects, "v2") == index


def test_publishing_the_same_again_is_no_conflict(objects: Objects) -> None:
    first = write(objects, b"one", b"two")
    assert write(objects, b"one", b"two") == first


def test_publishing_other_content_is_a_conflict_and_changes_nothing(objects: Objects, tmp_path: Path) -> None:
    first = write(objects, b"one")
    with pytest.raises(ConflictError, match="v2 is published with other content"):
        write(objects, b"two")
    with pytest.raises(ConflictError):
        write(objects, b"one", digest="e" * 64)
    assert (read_index(objects, "v2"), fetched(objects, first, tmp_path / "in")) == (first, [b"one"])


def test_a_published_configuration_is_not_replaced(objects: Objects, tmp_path: Path) -> None:
    index = publish_full(objects, 0, write_folder(state(), tmp_path / "model"))
    with (
        pytest.raises(ConflictError, match=r"another config\.json"),
        SnapshotWriter(objects, index.identity, version=0, kind="full") as writer,
    ):
        writer.add_file(b"{}", "config.json")
        writer.finish(digest="")
    assert objects.get(f"{index.identity}/config.json") == (tmp_path / "model" / "config.json").read_bytes()


def test_an_upload_that_failed_makes_no_index(objects: Objects) -> None:
    def fail(method: str, key: str) -> None:
        if "delta-00002" in key:
            raise SpaceError("no space left")

    with pytest.raises(SpaceError):
        write(Faulty(objects, before=fail), b"one", b"two", b"three")
    with pytest.raises(MissingError):
        read_index(objects, "v2")


@pytest.mark.parametrize("left", [b"", b"tw"], ids=["absent", "half"])
def test_a_part_that_is_absent_or_half_is_never_handed_out(objects: Objects, tmp_path: Path, left: bytes) -> None:
    index = write(objects, b"one", b"two" * 100)
    objects.delete(index.parts[1].key)
    if left:
        objects.put(index.parts[1].key, left)
    with pytest.raises((MissingError, ChecksumError), match="delta-00002"):
        fetch(objects, index, tmp_path / "in", wait_s=0)
    assert [path for path in (tmp_path / "in").iterdir() if "00002" in path.name] == []
    objects.put(index.parts[1].key, b"two" * 100)
    assert fetched(objects, index, tmp_path / "in") == [b"one", b"two" * 100]


@pytest.mark.parametrize(("bad", "asked"), [(2, 3), (9, 3)], ids=["heals", "stays"])
def test_a_corrupt_part_is_asked_for_three_times(objects: Objects, tmp_path: Path, bad: int, asked: int) -> None:
    index = write(objects, b"content")
    reads: Counter[str] = Counter()

    def flip(key: str, data: bytes) -> bytes:
        reads[key] += 1
        return b"c0ntent" if reads[key] <= bad else data

    faulty = Faulty(objects, read=flip)
    if bad < asked:
        assert fetched(faulty, index, tmp_path / "in") == [b"content"]
    else:
        with pytest.raises(ChecksumError, match="differ from the SHA-256"):
            fetch(faulty, index, tmp_path / "in", wait_s=0)
        assert list((tmp_path / "in").iterdir()) == []
    assert list(reads.values()) == [asked]


def test_a_store_that_fails_now_and_then_is_asked_again(objects: Objects, tmp_path: Path) -> None:
    index = write(objects, b"one", b"two")
    asked: Counter[str] = Counter()

    def fail_once(method: str, key: str) -> None:
        asked[key] += 1
        if method == "get" and asked[key] == 1:
            raise StoreError("reset by peer")

    assert fetched(Faulty(objects, before=fail_once), index, tmp_path / "in") == [b"one", b"two"]


def test_whole_parts_are_not_fetched_twice(objects: Objects, tmp_path: Path) -> None:
    index = write(objects, b"one", b"two")
    paths = fetch(objects, index, tmp_path / "in")
    paths[1].write_bytes(b"tvo")
    asked: list[str] = []
    fetch(Faulty(objects, before=lambda method, key: asked.append(key)), index, tmp_path / "in")
    assert (asked, paths[1].read_bytes()) == ([index.parts[1].key], b"two")


def test_space_is_reserved_before_the_first_byte_travels(objects: Objects, tmp_path: Path) -> None:
    index = write(objects, b"x" * 600_000, b"y" * 600_000)
    asked: list[str] = []
    with small_disk(tmp_path / "small", 1 << 20) as folder:
        with pytest.raises(SpaceError, match="need 1200000 bytes"):
            fetch(Faulty(objects, before=lambda method, key: asked.append(key)), index, folder / "in")
        assert (asked, list((folder / "in").iterdir())) == ([], [])


def test_space_once_reserved_is_not_lost_to_others(objects: Objects, tmp_path: Path) -> None:
    index = write(objects, b"x" * 600_000)
    with small_disk(tmp_path / "small", 1 << 20) as folder:

        def fill(method: str, key: str) -> None:
            (folder / "other").write_bytes(b"z" * 300_000)

        assert len(fetched(Faulty(objects, before=fill), index, folder / "in")[0]) == 600_000


def test_every_flipped_byte_of_an_index_is_noticed(tmp_path: Path) -> None:
    objects = open_objects(tmp_path)
    write(objects, b"one", b"two")
    raw = objects.get(index_key("v2"))
    accepted = []
    for at in range(len(raw)):
        for bit in (1, 32):
            damaged = bytearray(raw)
            damaged[at] ^= bit
            try:
                decode_index(bytes(damaged), "v2", objects)
                accepted.append(at)
            except GroundhopError:
                pass
    assert accepted == []


def test_an_index_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    objects = open_objects(tmp_path)
    write(objects, b"one")
    raw = objects.get(index_key("v2")).rstrip()
    for length in range(0, len(raw), 7):
        with pytest.raises(GroundhopError):
            decode_index(raw[:length], "v2", objects)


def test_the_commit_record_binds_the_index(objects: Objects) -> None:
    with delta_writer(objects) as writer:
        writer.add(b"one")
        index = writer.finish(digest="")
    assert read_index(objects, "v2", writer.index_sha256) == index
    with pytest.raises(ChecksumError, match="commit record"):
        read_index(objects, "v2", "0" * 64)


def test_an_index_under_another_name_is_refused(objects: Objects) -> None:
    write(objects, b"one")
    objects.put(index_key("v3"), objects.get(index_key("v2")))
    with pytest.raises(InputError, match="index of 'v2'"):
        read_index(objects, "v3")


@pytest.mark.parametrize(
    "part",
    [
        {"key": "v1/model"}, {"key": "v2/../log/x"}, {"key": "v2/a/b"}, {"key": "log/1"}, {"key": "v2/.."}, {"key": "v2/"},
        {"name": "../../etc/passwd"}, {"name": "/etc/passwd"}, {"name": "a//b"}, {"size": -1}, {"sha256": "zz"},
    ],
    ids=str,
)  # fmt: skip
def test_parts_outside_the_snapshots_folder_are_refused(objects: Objects, part: dict[str, object]) -> None:
    wrong = Part(**{"key": "v2/model", "size": 1, "sha256": "a" * 64, "name": "", **part})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="cannot use the part"), delta_writer(objects) as writer:
        writer._parts.append(wrong)
        writer.finish(digest="")


@pytest.mark.parametrize("identity", ["", "initial", "log", ".", "..", "a/b", "a b", "x" * 129, "ü", "a\n"])
def test_identities_are_one_plain_segment(identity: str) -> None:
    with pytest.raises(InputError, match="not an identity"):
        check_identity(identity)


@pytest.mark.parametrize("identity", ["a", "x" * 128, "weight_v000001", "a.b-c_D", "..."])
def test_plain_segments_are_identities(identity: str) -> None:
    assert check_identity(identity) == identity


def test_default_identities_sort_like_versions() -> None:
    assert [identity_of(version) for version in (0, 12, 1234567)] == [
        "weight_v000000",
        "weight_v000012",
        "weight_v1234567",
    ]


def test_what_other_writers_of_the_shared_layout_say_is_understood(objects: Objects) -> None:
    metadata = {"version": "000003", "base_version": "000002", "delta_encoding": "xor", "checksum_format": "adler32"}
    document = {"metadata": metadata, "weight_map": {"a": "model-00000-of-00001.safetensors"}}
    objects.put("weight_v000003/model-00000-of-00001.safetensors", b"0123456789")
    objects.put(index_key("weight_v000003"), json.dumps(document).encode())
    index = read_index(objects, "weight_v000003")
    assert (index.kind, index.layout, index.base, index.version) == ("delta", "shared", "weight_v000002", 3)
    assert index.parts == (Part(key="weight_v000003/model-00000-of-00001.safetensors", size=10, sha256=""),)


@pytest.mark.parametrize(
    "word", [{"checksum_format": "blake3"}, {"delta_encoding": "arc_v2"}, {"compression_format": "lz4"}]
)
def test_formats_that_are_not_read_are_named(objects: Objects, word: dict[str, str]) -> None:
    document = {"metadata": {"base_version": "1", "delta_encoding": "xor", **word}, "weight_map": {}}
    objects.put(index_key("v3"), json.dumps(document).encode())
    with pytest.raises(InputError, match=next(iter(word.values()))):
        read_index(objects, "v3")


def test_our_index_says_what_other_readers_of_the_shared_layout_look_for(objects: Objects) -> None:
    with delta_writer(objects, layout="shared") as writer:
        writer.finish(digest="")
    document = json.loads(objects.get(index_key("v2")))
    wanted = {
        "version": "v2", "base_version": "v1", "delta_encoding": "xor", "compression_format": "zstd", "checksum_format": "adler32",
    }  # fmt: skip
    assert (wanted.items() <= document["metadata"].items(), document["weight_map"]) == (True, {})

"""The write-ahead set: what is read back, and what a cut leaves."""

from pathlib import Path

import numpy as np
import pytest

from groundhop.training.hotload.fingerprint import Fingerprint
from groundhop.training.hotload.touched import (
    Attempt,
    End,
    Positions,
    Touched,
    TouchedWriter,
    clear,
    read_touched,
    union,
)

ATTEMPT = Attempt(txn="t1", identity="weight_v000007", version=7, base="weight_v000005", epoch=2)
END = End(digest="d", changed=3, total=9, bytes=12)


def row(positions: Positions, size: int = 4000, name: str = "w", unit: type = np.uint16) -> Touched:
    count = size if positions is None else positions.size
    return Touched(name, size, positions, np.arange(count).astype(unit), Fingerprint(1, 2))


def write(folder: Path, *rows: Touched, attempt: Attempt = ATTEMPT, end: End | None = END) -> Path:
    writer = TouchedWriter(folder, attempt)
    for one in rows:
        writer.append(one)
    if end:
        writer.end(end)
    else:
        writer.sync()
    writer.close()
    return writer.path


@pytest.mark.parametrize(
    ("positions", "size"),
    [
        (None, 4000),
        (np.array([0, 3999]), 4000),
        (np.arange(0, 4000, 3), 4000),
        (np.array([5, (1 << 33) + 1]), 1 << 34),
        (np.empty(0, np.int64), 10),
    ],
    ids=["all", "few", "many", "past 2^32", "none"],
)
@pytest.mark.parametrize("unit", [np.uint8, np.uint16, np.uint32])
def test_rows_are_read_back_as_they_were(tmp_path: Path, positions: Positions, size: int, unit: type) -> None:
    wrote = row(positions, size, unit=unit)
    write(tmp_path, wrote)
    ((read,), (file,)) = [list(read_touched(tmp_path)[0].rows()), read_touched(tmp_path)]
    assert (read.name, read.size, read.fingerprint) == (wrote.name, wrote.size, wrote.fingerprint)
    assert (read.positions is None) == (positions is None)
    assert positions is None or read.positions is None or np.array_equal(read.positions, positions)
    assert np.array_equal(read.values, wrote.values)
    assert (file.attempt, file.end) == (ATTEMPT, END)


def test_a_file_cut_anywhere_gives_the_whole_rows_before_the_cut(tmp_path: Path) -> None:
    path = write(tmp_path, row(np.array([1, 2]), name="a"), row(np.array([3]), name="b"))
    whole = path.read_bytes()
    counts = []
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        files = read_touched(tmp_path)
        counts.append(len(list(files[0].rows())) if files else -1)
        assert not files or files[0].end is None
        path.write_bytes(whole)
    assert counts == sorted(counts)
    assert set(counts) == {-1, 0, 1, 2}


def test_a_flipped_byte_ends_the_file_there(tmp_path: Path) -> None:
    path = write(tmp_path, row(np.array([1, 2]), name="a"), row(np.array([3]), name="b"))
    raw = bytearray(path.read_bytes())
    raw[-len(b"\0" * 150)] ^= 1
    path.write_bytes(raw)
    assert [one.name for one in read_touched(tmp_path)[0].rows()] == ["a"]


def test_the_union_holds_what_any_attempt_may_have_written(tmp_path: Path) -> None:
    write(tmp_path, row(np.array([1, 5])), end=None)
    other = Attempt(txn="t2", identity="weight_v000008", version=8, base="weight_v000005", epoch=2)
    write(tmp_path, row(np.array([5, 9])), row(None, size=3, name="v"), attempt=other)
    together = union(read_touched(tmp_path))
    assert {name: positions.tolist() for name, positions in together.items()} == {"w": [1, 5, 9], "v": [0, 1, 2]}


def test_cleared_attempts_are_gone(tmp_path: Path) -> None:
    write(tmp_path, row(None))
    clear(read_touched(tmp_path))
    assert read_touched(tmp_path) == []

"""What a killed writer leaves behind never costs a whole line."""

from pathlib import Path

import pytest

from groundhop import jsonl
from groundhop.errors import InputError
from groundhop.records import Failure


def failure(item: str) -> Failure:
    return Failure(stage="s", item=item, reason="r")


def test_a_torn_last_line_is_left_out_and_cut_before_the_next_append(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with jsonl.Appender(path) as out:
        out.append(failure("a"))
    with path.open("ab") as torn:
        torn.write(b'{"stage":"s","item":"b","rea')
    assert [row.item for row in jsonl.read(path, Failure)] == ["a"]
    with jsonl.Appender(path) as out:
        out.append(failure("c"))
    assert [row.item for row in jsonl.read(path, Failure)] == ["a", "c"]


def test_a_file_of_one_torn_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"stage"' + b"x" * 200_000)
    jsonl.Appender(path).close()
    assert path.read_bytes() == b""


def test_a_long_torn_tail_keeps_the_lines_before_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with jsonl.Appender(path) as out:
        out.append(failure("a"))
    whole = path.read_bytes()
    with path.open("ab") as torn:
        torn.write(b"y" * 150_000)
    jsonl.Appender(path).close()
    assert path.read_bytes() == whole


def test_a_whole_line_that_is_no_record_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"stage":"s","item":"a","reason":"r"}\n{"stage":"s"}\n')
    with pytest.raises(InputError, match=r"rows\.jsonl, line 2"):
        list(jsonl.read(path, Failure))


def test_packed_and_plain_files_hold_the_same_records(tmp_path: Path) -> None:
    rows = [failure(str(number)) for number in range(1000)]
    jsonl.write(tmp_path / "a.jsonl", rows)
    jsonl.write(tmp_path / "a.jsonl.zst", rows)
    assert (
        list(jsonl.read(tmp_path / "a.jsonl", Failure)) == list(jsonl.read(tmp_path / "a.jsonl.zst", Failure)) == rows
    )

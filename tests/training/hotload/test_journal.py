"""An agent's memory: on disk before anything follows from it, and never half of it."""

import os
from pathlib import Path

import pytest

from groundhop.errors import InputError
from groundhop.training.hotload.journal import MOST_BYTES, Held, Journal, Record


def held(version: int) -> Held:
    return Held(identity=f"weight_v{version:06d}", version=version, digest=f"{version:064x}", epoch=1)


def test_a_journal_that_is_not_there_knows_nothing(tmp_path: Path) -> None:
    assert Journal(tmp_path / "journal.json").record == Record()


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "agent" / "journal.json"
    journal = Journal(path)
    seen = []

    def note() -> None:
        record = Journal(path).record
        assert record == journal.record
        seen.append((record.state, record.live))

    journal.hold(held(1))
    note()
    journal.begin("t", held(2))
    note()
    journal.verify()
    note()
    journal.doubt()
    note()
    assert seen == [("clean", held(1)), ("dirty", None), ("prepared", held(2)), ("dirty", None)]
    assert Journal(path).record.held == held(1)


def test_to_hold_ends_what_was_being_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.json")
    journal.begin("t", held(1))
    journal.hold(held(1))
    assert Journal(tmp_path / "journal.json").record == Record(held=held(1))


def test_a_write_that_was_cut_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "journal.json")
    journal.hold(held(1))

    def cut(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", cut)
    with pytest.raises(OSError, match="no space left"):
        journal.begin("t", held(2))
    assert journal.record == Journal(tmp_path / "journal.json").record == Record(held=held(1))


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"held": 1}', b'{"odd": null}', b"\xff" * 10, b" " * (MOST_BYTES + 1)]
)
def test_what_is_no_journal_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "journal.json").write_bytes(content)
    with pytest.raises(InputError):
        Journal(tmp_path / "journal.json")

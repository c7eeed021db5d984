"""Encrypted rows: exact, or reported by number, and never written in plain."""

import base64
import csv
import io
from pathlib import Path

import pytest

from groundhop.errors import InputError
from groundhop.pipeline.browsecomp import BadRow, Key, decrypt, encrypt, hashed_key, plain_key, read_rows

ROWS = [
    ("Which made-up ferry crossed the Vell in 1911?", "MS Østlys"),
    ("Wie heißt das Schiff auf dem zweiten Bild — laut Aushang?", "Möwe ⚓"),
    ("z" * 300, "7"),
]


def table(rows: list[tuple[str, str, str]], header: tuple[str, ...] = ("problem", "answer", "canary")) -> bytes:
    out = io.StringIO(newline="")
    csv.writer(out).writerows([header, *rows])
    return out.getvalue().encode()


def encrypted(key: Key, canary: str = "canary GUID 11-22") -> list[tuple[str, str, str]]:
    return [(encrypt(problem, key(canary)), encrypt(answer, key(canary)), canary) for problem, answer in ROWS]


@pytest.mark.parametrize("key", [hashed_key, plain_key])
def test_both_schemes_are_read_exactly(key: Key) -> None:
    questions, bad = read_rows(table(encrypted(key)), "set")
    assert ([(q.question, q.answer) for q in questions], bad) == (ROWS, [])
    assert [q.id for q in questions] == ["set-0001", "set-0002", "set-0003"]


def test_the_hashed_scheme_is_sha256_xor_base64() -> None:
    key = bytes.fromhex(
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )  # SHA-256 of "abc", FIPS 180-2
    assert hashed_key("abc") == key
    assert decrypt(base64.b64encode(bytes([key[0] ^ ord("h"), key[1] ^ ord("i")])).decode(), key) == "hi"


def test_a_canary_of_ones_own_in_each_row_is_the_rows_password() -> None:
    rows = [encrypted(hashed_key, f"canary {n}")[n] for n in range(3)]
    questions, bad = read_rows(table(rows), "set")
    assert ([q.answer for q in questions], bad) == ([answer for _, answer in ROWS], [])


@pytest.mark.parametrize("key", [hashed_key, plain_key])
@pytest.mark.parametrize("row", range(3))
def test_a_wrong_canary_is_reported_by_row_and_never_asked(key: Key, row: int) -> None:
    rows = encrypted(key)
    rows[row] = (*rows[row][:2], "canary GUID 11-23")
    questions, bad = read_rows(table(rows), "set")
    assert (len(questions), bad) == (2, [BadRow(row + 1, "wrong_canary")])


def test_empty_cells_and_broken_base64_are_reported_by_row() -> None:
    good = encrypted(hashed_key)
    problem, answer, canary = good[0]
    blank = encrypt("  ", hashed_key(canary))
    rows = [
        good[0],
        (problem, "", canary),
        ("", answer, canary),
        (problem, answer, ""),
        ("!!", answer, canary),
        (problem, blank, canary),
        (problem,),
    ]
    questions, bad = read_rows(table(rows), "set")  # type: ignore[arg-type]
    assert len(questions) == 1
    assert [(b.number, b.reason) for b in bad] == [
        (2, "empty"),
        (3, "empty"),
        (4, "no_canary"),
        (5, "not_base64"),
        (6, "empty"),
        (7, "no_canary"),
    ]


def test_more_columns_and_other_names_are_fine() -> None:
    rows = [("1", *row, "art") for row in encrypted(plain_key)]
    questions, _ = read_rows(table(rows, ("id", "prompt", "answer", "canary", "type")), "x")  # type: ignore[arg-type]
    assert questions[1].answer == "Möwe ⚓"


@pytest.mark.parametrize("data", [b"a,b\n1,2\n", b"", b"\xff\xfe\x00", table([("x", "y", "z")])])
def test_a_file_that_is_no_such_set_is_refused(data: bytes) -> None:
    with pytest.raises(InputError, match="set"):
        read_rows(data, "set")


def test_errors_tell_no_text(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_rows(table([(*encrypted(hashed_key)[0][:2], "wrong")]), "set")
    assert "ferry" not in str(caught.value)

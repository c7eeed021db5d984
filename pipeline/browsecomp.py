"""Read encrypted question sets in memory: BrowseComp's scheme and the one without a hash.

A row holds `problem`, `answer` (or `prompt`) and its own `canary`. Text is base64 of bytes XORed with a key repeated to their
length. BrowseComp (openai/simple-evals, `browsecomp_eval.py`, MIT): the key is SHA-256 of the canary. xbench-DeepSearch: the
key is the canary's own bytes. What is decrypted is never written anywhere.
"""

import base64
import binascii
import csv
import hashlib
import io
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

from groundhop.errors import InputError
from groundhop.records import Question

PROBLEM_COLUMNS = ("problem", "prompt")
Key = Callable[[str], bytes]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be asked, by its number (data rows from 1). Never holds its text."""

    number: int
    reason: str
    """wrong_canary, empty, no_canary or not_base64."""


def hashed_key(canary: str) -> bytes:
    """BrowseComp's key: 32 bytes."""
    return hashlib.sha256(canary.encode("utf-8")).digest()


def plain_key(canary: str) -> bytes:
    """Xbench's key: the canary itself."""
    return canary.encode("utf-8")


def read_rows(data: bytes, name: str) -> tuple[list[Question], list[BadRow]]:
    """Decrypt a whole CSV; rows that cannot be read are reported by number. Ids are `name` and the row's number.

    Raises: InputError when the columns are missing, or no row can be read.
    """
    rows = _table(data, name)
    attempts = [_decrypt_all(rows, key, name) for key in (hashed_key, plain_key)]
    questions, bad = max(attempts, key=lambda attempt: len(attempt[0]))
    if not questions:
        raise InputError(f"{name}: none of {len(rows)} rows can be decrypted with its own canary")
    return questions, bad


def decrypt(text: str, key: bytes) -> str:
    """Undo base64 and XOR. Raises: ValueError (binascii.Error, UnicodeDecodeError) for what is not that."""
    mixed = base64.b64decode(text, validate=True)
    return bytes(a ^ b for a, b in zip(mixed, cycle(key), strict=False)).decode("utf-8")


def encrypt(text: str, key: bytes) -> str:
    """The inverse of `decrypt`, for question sets of one's own."""
    return base64.b64encode(bytes(a ^ b for a, b in zip(text.encode("utf-8"), cycle(key), strict=False))).decode(
        "ascii"
    )


def _table(data: bytes, name: str) -> list[dict[str, str]]:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not a UTF-8 CSV: {error.reason} at byte {error.start}") from error
    reader = csv.DictReader(io.StringIO(text, newline=""))
    columns = set(reader.fieldnames or ())
    if not columns >= {"answer", "canary"} or not columns & set(PROBLEM_COLUMNS):
        raise InputError(f"{name}: need the columns problem, answer and canary, got {sorted(columns)}")
    return [{key: (value or "").strip() for key, value in row.items() if isinstance(key, str)} for row in reader]


def _decrypt_all(rows: Sequence[dict[str, str]], make_key: Key, name: str) -> tuple[list[Question], list[BadRow]]:
    usual = _usual_canary(rows) if make_key is plain_key else None
    questions: list[Question] = []
    bad: list[BadRow] = []
    for number, row in enumerate(rows, start=1):
        try:
            problem, answer = _decrypt_row(row, make_key, usual)
        except _Unreadable as error:
            bad.append(BadRow(number, error.args[0]))
        else:
            questions.append(Question(id=f"{name}-{number:04}", question=problem, answer=answer, writer="benchmark"))
    return questions, bad


class _Unreadable(Exception):
    """Carries the reason alone."""


def _decrypt_row(row: dict[str, str], make_key: Key, usual: str | None) -> tuple[str, str]:
    canary = row["canary"]
    hidden = next((row[column] for column in PROBLEM_COLUMNS if row.get(column)), "")
    if not canary:
        raise _Unreadable("no_canary")
    if not hidden or not row["answer"]:
        raise _Unreadable("empty")
    if usual is not None and canary != usual:
        raise _Unreadable("wrong_canary")
    try:
        problem, answer = (decrypt(text, make_key(canary)).strip() for text in (hidden, row["answer"]))
    except UnicodeDecodeError:
        raise _Unreadable("wrong_canary") from None
    except (binascii.Error, ValueError):
        raise _Unreadable("not_base64") from None
    if not problem or not answer:
        raise _Unreadable("empty")
    if not (_is_text(problem) and _is_text(answer)):
        raise _Unreadable("wrong_canary")
    return problem, answer


def _is_text(text: str) -> bool:
    """Whether every character is assigned and printable: what a wrong key leaves hardly ever is, beyond a few bytes."""
    return all(
        character in "\n\r\t" or unicodedata.category(character)[0] != "C" or character == "\u200d"
        for character in text
    )


def _usual_canary(rows: Sequence[dict[str, str]]) -> str | None:
    """The canary that most rows share. Without a hash, two similar canaries turn text into other printable text."""
    (canary, count), *_ = Counter(row["canary"] for row in rows).most_common(1) or [("", 0)]
    return canary if 2 * count > len(rows) else None

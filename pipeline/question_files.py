"""Read questions that a user brings: JSON lines, or an encrypted benchmark as CSV, from a path or an address."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import httpx
import msgspec

from groundhop.errors import InputError, MissingError, ProviderError
from groundhop.pipeline.browsecomp import read_rows
from groundhop.records import AnswerKind, Question

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """Questions from outside."""

    name: str
    digest: str
    """SHA-256 of the bytes as given."""
    questions: tuple[Question, ...]
    bad: tuple[tuple[str, str, str], ...]
    """Rows that cannot be asked: (row, reason, detail); a benchmark's details hold no text of it."""
    secret: bool
    """Whether nothing of it may be written in plain."""


class _Row(msgspec.Struct):
    """What is read of a line; other fields are left alone."""

    id: str | int
    question: str
    answer: str | int | float
    aliases: tuple[str, ...] = ()
    kind: AnswerKind = "text"


def read_questions(source: str) -> QuestionSet:
    """Read `source`, a path or an http(s) address; `.csv` is an encrypted benchmark, anything else JSON lines.

    Raises: MissingError, ProviderError when it cannot be had; InputError when nothing in it can be asked.
    """
    data, name = _fetch(source)
    digest = hashlib.sha256(data).hexdigest()
    if name.endswith(".csv"):
        stem = name.removesuffix(".csv")
        questions, bad = read_rows(data, stem)
        return QuestionSet(stem, digest, tuple(questions), tuple((f"row {b.number}", b.reason, "") for b in bad), True)
    found: dict[str, Question] = {}
    failed = []
    for where, row in _rows(data):
        if isinstance(row, str):
            failed.append((where, "unreadable", row))
        elif row.id in found:
            failed.append((where, "duplicate_id", row.id))
        else:
            found[row.id] = row
    if not found:
        raise InputError(f"{source} holds no question" + (f": {failed[0][0]}: {failed[0][2]}" if failed else ""))
    return QuestionSet(PurePosixPath(name).stem, digest, tuple(found.values()), tuple(failed), False)


def _fetch(source: str) -> tuple[bytes, str]:
    if not source.startswith(("http://", "https://")):
        try:
            return Path(source).read_bytes(), Path(source).name
        except (FileNotFoundError, IsADirectoryError) as error:
            raise MissingError(f"no file {source}") from error
    try:
        response = httpx.get(source, timeout=TIMEOUT_S, follow_redirects=True)
        response.raise_for_status()
    except httpx.HTTPError as error:
        raise ProviderError(f"{source} cannot be fetched: {error}") from error
    return response.content, PurePosixPath(urlsplit(source).path).name


def _rows(data: bytes) -> Iterator[tuple[str, Question | str]]:
    decoder = msgspec.json.Decoder(_Row)
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except msgspec.MsgspecError as error:
            yield f"row {number}", str(error)
            continue
        yield f"row {number}", _question(row)


def _question(row: _Row) -> Question | str:
    if not row.question.strip() or not str(row.answer).strip():
        return "question or answer is empty"
    return Question(
        id=str(row.id),
        question=row.question,
        answer=str(row.answer),
        aliases=row.aliases,
        kind=row.kind,
    )

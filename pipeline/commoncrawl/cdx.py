"""Look pages up in a release's index through the index server, politely and each query once.

API: https://index.commoncrawl.org/ and pywb's "CDXJ Server API": `showNumPages=true` tells how many pages of rows a
query has, `page=N` gives one as JSON lines; 404 with a message stands for no rows.
"""

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
from msgspec import Struct

from groundhop.errors import ProviderError
from groundhop.pipeline.commoncrawl.captures import Capture, Pattern
from groundhop.pipeline.commoncrawl.client import Client, Response
from groundhop.pipeline.fetch import Failed

MAX_ANSWER = 256 << 20


class Kept(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An answer on the disk."""

    url: str
    status: int
    body: str


class CdxIndex:
    """The index of one release. Answers are kept in `cache`, for a release never changes."""

    def __init__(self, client: Client, base_url: str, release: str, cache: Path, pace_s: float = 1.0) -> None:
        self._client = client
        self._address = f"{base_url.rstrip('/')}/{release}-index"
        self._cache = cache
        self._pace_s = pace_s

    async def look_up(self, pattern: Pattern) -> AsyncIterator[Capture | None]:
        """Yield the successful captures of a pattern; None stands for a row that could not be read.

        Raises: ProviderError when the server does not answer, or answers something else. What was answered before is
        kept, so the same call goes on from there.
        """
        query = {"url": pattern.query, "output": "json", "filter": "=status:200"}
        told = await self._answer({**query, "showNumPages": "true"})
        for number in range(_pages(told)):
            answer = await self._answer({**query, "page": str(number)})
            for line in answer.body.splitlines() if answer.status == 200 else ():
                if line.strip():
                    yield parse_row(line)

    async def _answer(self, query: dict[str, str]) -> Kept:
        url = f"{self._address}?{urlencode(query)}"
        path = self._cache / f"{hashlib.sha256(url.encode()).hexdigest()[:40]}.cdx"
        kept = _read(path, url)
        if kept is not None:
            return kept
        got = await self._client.ask(url, _read_all, pace_s=self._pace_s)
        if isinstance(got, Failed):
            wait = f", asks to wait {got.retry_after_s:g} s" if got.retry_after_s else ""
            raise ProviderError(
                f"the index server did not answer: {got.reason} {got.detail}{wait} - {url} - "
                "run again later: what was answered is kept"
            )
        kept = Kept(url=url, status=got[0], body=got[1].decode("utf-8", "replace"))
        _check(kept)
        _write(path, kept)
        return kept


def parse_row(line: str) -> Capture | None:
    """A row of the index, or None."""
    try:
        row: Any = json.loads(line)
        return Capture(
            url=_text(row["url"]),
            timestamp=_text(row.get("timestamp", "")),
            status=int(row["status"]),
            mime=_text(row.get("mime-detected") or row.get("mime") or ""),
            digest=_text(row.get("digest", "")).removeprefix("sha1:"),
            filename=_text(row["filename"]),
            offset=int(row["offset"]),
            length=int(row["length"]),
            truncated=_text(row.get("truncated") or ""),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"need a string, got {value!r}")
    return value


async def _read_all(response: Response) -> tuple[int, bytes] | Failed:
    if response.status not in (200, 404):
        return Failed("status", str(response.status))
    body = bytearray()
    async for piece in response.pieces():
        body += piece
        if len(body) > MAX_ANSWER:
            return Failed("too_large", f"more than {MAX_ANSWER} bytes")
    return response.status, bytes(body)


def _pages(told: Kept) -> int:
    return 0 if told.status == 404 else int(json.loads(told.body)["pages"])


def _check(answer: Kept) -> None:
    """Refuse what is no answer to the question, before it is kept."""
    shown = f"{answer.status} {answer.body[:200]!r} - {answer.url}"
    if answer.status == 404:
        # An unknown release is 404 too, and must not pass for one without captures.
        if "No Captures found" not in answer.body:
            raise ProviderError(f"the index has no such release: {shown}")
        return
    if "showNumPages=true" in answer.url:
        try:
            pages = json.loads(answer.body)["pages"]
        except (ValueError, TypeError, KeyError):
            pages = None
        if not isinstance(pages, int) or isinstance(pages, bool) or pages < 0:
            raise ProviderError(f"the index server does not say how many pages: {shown}")
        return
    lines = [line for line in answer.body.splitlines() if line.strip()]
    if lines and all(parse_row(line) is None for line in lines):
        raise ProviderError(f"the index server sent no rows: {shown}")


def _read(path: Path, url: str) -> Kept | None:
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=Kept)
    except (FileNotFoundError, ValueError):
        return None
    return kept if kept.url == url else None


def _write(path: Path, answer: Kept) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(msgspec.json.encode(answer))
    temporary.replace(path)

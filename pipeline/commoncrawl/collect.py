"""Bring the chosen pages of one release onto the disk: draw hosts, look captures up, read their records, one by one.

What comes is a WARC file of the crawler's own gzip members, byte for byte. Each step is kept when it is done (drawn
hosts, answers of the index, chosen captures, each record), so a run that was killed goes on where it was.
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import IO, Any

import msgspec
from msgspec import Struct

from groundhop import __version__, jsonl
from groundhop.config import PagesConfig
from groundhop.errors import ConfigError, InputError, ProviderError
from groundhop.pipeline.commoncrawl.captures import (
    Capture,
    Chooser,
    Pattern,
    in_file_order,
    pattern_of,
    unusable,
)
from groundhop.pipeline.commoncrawl.cdx import CdxIndex
from groundhop.pipeline.commoncrawl.client import BASE_S, Client
from groundhop.pipeline.commoncrawl.draw import HostRow, draw_band
from groundhop.pipeline.commoncrawl.ranged import read_range, record_of
from groundhop.pipeline.fetch import Failed
from groundhop.pipeline.warc import Damaged
from groundhop.progress import progress

logger = logging.getLogger(__name__)

WARC = "commoncrawl.warc.gz"
HOSTS = "hosts.jsonl"
CAPTURES = "captures.jsonl"
LEDGER = "records.jsonl"
SUMMARY = "summary.json"
DRAW = "draw.json"
DOWN_AFTER = 3
"""So many records in a row that the server did not give end the run, which may be taken up later."""
_SERVER = frozenset(("unreachable", "timeout", "cut_body", "status"))


class RecordRow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one capture ended."""

    url: str
    filename: str
    offset: int
    length: int
    """Where the record lies on Common Crawl's server."""
    reason: str | None = None
    """None for a record that was stored."""
    detail: str = ""
    temporary: bool = False
    """Whether a later run asks again."""
    warc_end: int
    """Size of the WARC file after this row."""


def collect(config: PagesConfig, folder: Path, *, seed: int = 0, base_s: float = BASE_S) -> Path:
    """Fill `folder`; returns the WARC file. What an earlier run brought is kept.

    Raises: ConfigError; MissingError and InputError for the rank file or the columnar index; ProviderError when a server
    stays silent: run again later.
    """
    if not config.commoncrawl_release:
        raise ConfigError("Common Crawl needs a release, e.g. CC-MAIN-2026-30 - at `$.pages.commoncrawl_release`")
    folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(_collect(config, folder, seed, base_s))
    return folder / WARC


def collect_failures(folder: Path) -> list[RecordRow]:
    """The captures that gave no page, in their order."""
    return [row for row in _latest(folder) if row.reason is not None]


def collect_summary(folder: Path) -> dict[str, Any]:
    """What the index said and what was drawn, as counts."""
    summary: dict[str, Any] = msgspec.json.decode((folder / SUMMARY).read_bytes())
    return summary


async def _collect(config: PagesConfig, folder: Path, seed: int, base_s: float) -> None:
    agent = f"{config.user_agent}/{__version__}" + (f" (+{config.contact})" if config.contact else "")
    async with Client(agent, config.allow_private, base_s=base_s) as client:
        if not (folder / CAPTURES).exists():
            await _choose(config, folder, client, seed)
        await _fetch(config, folder, client)


async def _choose(config: PagesConfig, folder: Path, client: Client, seed: int) -> None:
    """Write the chosen captures and, before them, the counts."""
    patterns = [pattern_of(text) for text in config.commoncrawl]
    summary: dict[str, Any] = {"release": config.commoncrawl_release}
    if config.commoncrawl_ranks is not None:
        drawn = _draw(config, config.commoncrawl_ranks, folder, seed)
        patterns += [_pattern_of_host(row) for row in drawn]
        summary["ranks"] = msgspec.json.decode((folder / DRAW).read_bytes())
    patterns = list(dict.fromkeys(patterns))
    skipped: Counter[str] = Counter()
    chosen: list[Capture] = []
    look_up = _index(config, folder, client)
    with progress("common crawl index", len(patterns)) as shown:
        for pattern in patterns:
            chooser = Chooser(config.commoncrawl_pages_per_pattern, seed)
            async for capture in look_up(pattern):
                reason = (
                    "bad_row" if capture is None else unusable(capture, config.commoncrawl_release, config.max_bytes)
                )
                if capture is None or reason is not None:
                    skipped[reason or "bad_row"] += 1
                else:
                    chooser.add(capture)
            found = chooser.chosen()
            skipped["no_captures"] += not found
            chosen += found
            shown.advance(notes={"captures": len(chosen)})
    chosen = in_file_order(chosen)
    summary |= {
        "patterns": len(patterns),
        "captures": len(chosen),
        "skipped": {reason: number for reason, number in sorted(skipped.items()) if number},
    }
    _replace(folder / SUMMARY, msgspec.json.encode(summary))
    jsonl.write(folder / CAPTURES, chosen)


def _draw(config: PagesConfig, path: Path, folder: Path, seed: int) -> list[HostRow]:
    if not (folder / HOSTS).exists():
        drawn = draw_band(path, config.commoncrawl_band, config.commoncrawl_hosts, seed=seed)
        about = {"file": path.name, "sha256": drawn.sha256, "rows": drawn.rows, "bad": drawn.bad}
        _replace(folder / DRAW, msgspec.json.encode({**about, "hosts": len(drawn.hosts)}))
        jsonl.write(folder / HOSTS, drawn.hosts)
    return list(jsonl.read(folder / HOSTS, HostRow))


def _pattern_of_host(row: HostRow) -> Pattern:
    """Of a domain file all hosts of the domain are wanted, of a host file that host."""
    return Pattern("prefix" if row.n_hosts is None else "domain", row.host, "/")


def _index(config: PagesConfig, folder: Path, client: Client) -> Callable[[Pattern], AsyncIterator[Capture | None]]:
    if not config.commoncrawl_index:
        cache = config.commoncrawl_cache or folder / "index"
        url, release = config.commoncrawl_index_url, config.commoncrawl_release
        return CdxIndex(client, url, release, cache, config.pace_s).look_up
    # Arrow takes as long to import as everything else together.
    from groundhop.pipeline.commoncrawl.columnar import ColumnarIndex

    columnar = ColumnarIndex(config.commoncrawl_index)

    async def look_up(pattern: Pattern) -> AsyncIterator[Capture | None]:
        for capture in columnar.look_up(pattern):
            yield capture

    return look_up


async def _fetch(config: PagesConfig, folder: Path, client: Client) -> None:
    rows = _latest(folder)
    done = {(row.filename, row.offset) for row in rows if not row.temporary}
    captures = list(jsonl.read(folder / CAPTURES, Capture))
    silent, dropped = 0, sum(row.reason is not None for row in rows)
    size = max((row.warc_end for row in jsonl.read_if_there(folder / LEDGER, RecordRow)), default=0)
    with (
        _opened(folder / WARC, size) as warc,
        jsonl.Appender(folder / LEDGER) as ledger,
        progress("common crawl", len(captures), done=len(done)) as shown,
    ):
        for capture in captures:
            if (capture.filename, capture.offset) in done:
                continue
            row = await _one(config, client, capture, warc)
            ledger.append(row)
            dropped += row.reason is not None
            silent = silent + 1 if row.temporary else 0
            shown.advance(notes={"dropped": dropped})
            if silent >= DOWN_AFTER or row.reason == "private_address":
                raise ProviderError(
                    f"{config.commoncrawl_data_url} gives no records: {row.reason} {row.detail} - "
                    "run again later: what came is kept"
                )
        os.fsync(warc.fileno())


async def _one(config: PagesConfig, client: Client, capture: Capture, warc: IO[bytes]) -> RecordRow:
    url = f"{config.commoncrawl_data_url.rstrip('/')}/{capture.filename}"
    got = await read_range(client, url, capture.offset, capture.length)
    reason, detail = None, ""
    if isinstance(got, Failed):
        reason, detail = got.reason, got.detail
    elif isinstance(found := record_of(got, capture, config.max_bytes), Damaged):
        reason, detail = found.reason, found.detail
    else:
        warc.write(got)
        warc.flush()
    return RecordRow(
        url=capture.url,
        filename=capture.filename,
        offset=capture.offset,
        length=capture.length,
        reason=reason,
        detail=detail[:500],
        temporary=reason in _SERVER or reason == "private_address",
        warc_end=warc.tell(),
    )


def _opened(path: Path, size: int) -> IO[bytes]:
    """The WARC file, cut behind its last record that the ledger knows."""
    file = path.open("r+b" if path.exists() else "w+b")
    if file.seek(0, os.SEEK_END) < size:
        file.close()
        raise InputError(f"{path} is shorter than the {size} bytes its ledger tells of: delete its folder")
    file.truncate(size)
    file.seek(size)
    return file


def _latest(folder: Path) -> list[RecordRow]:
    """The last row of each capture, in the order of their files and offsets."""
    last = {(row.filename, row.offset): row for row in jsonl.read_if_there(folder / LEDGER, RecordRow)}
    return [last[place] for place in sorted(last)]


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    temporary.replace(path)

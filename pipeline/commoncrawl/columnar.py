"""Look pages up in the columnar index: Parquet files on the disk, of which only the row groups in question are read.

Schema: https://github.com/commoncrawl/cc-index-table, `cc-index-schema-flat.json`. The files are sorted by `url_surtkey`
(`org,example)/path`), so its statistics tell which row groups can hold a host.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from groundhop.errors import InputError, MissingError
from groundhop.pipeline.commoncrawl.captures import Capture, Pattern

NEEDED = (
    "url_surtkey",
    "url",
    "fetch_time",
    "fetch_status",
    "warc_filename",
    "warc_record_offset",
    "warc_record_length",
)
OPTIONAL = ("content_digest", "content_mime_detected", "content_truncated")
"""Columns that older releases lack."""


class ColumnarIndex:
    """The index of one release in Parquet files or folders of them."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises: MissingError; InputError for files that are no such index."""
        files = [str(file) for path in paths for file in _parquet_files(path)]
        try:
            self._data: Any = ds.dataset(files, format="parquet")
        except (pa.ArrowInvalid, OSError) as error:
            raise InputError(f"{files[0]}: no Parquet file: {error}") from error
        names = set(self._data.schema.names)
        if missing := [name for name in NEEDED if name not in names]:
            raise InputError(f"{files[0]}: no column {', '.join(missing)}: not Common Crawl's columnar index")
        self._columns = [*NEEDED, *(name for name in OPTIONAL if name in names)]

    def look_up(self, pattern: Pattern) -> Iterator[Capture | None]:
        """Yield the captures of a pattern, a batch in memory at a time; None stands for a row that could not be read."""
        key = pc.field("url_surtkey")
        wanted = None
        for first, last in surt_ranges(pattern):
            one = (key >= first) & (key < last)
            wanted = one if wanted is None else wanted | one
        batches = self._data.to_batches(
            columns=self._columns, filter=wanted, batch_size=8192, batch_readahead=1, fragment_readahead=1
        )
        for batch in batches:
            for row in batch.to_pylist():
                capture = _capture(row)
                if capture is None or pattern.matches(capture.url):
                    yield capture


def surt_ranges(pattern: Pattern) -> list[tuple[str, str]]:
    """Half-open ranges of keys that hold all pages of the pattern, and others.

    Keys begin with the labels in reverse, then `)` and the path, or `,` and further labels.
    """
    host = ",".join(pattern.host.split(".")[::-1])
    # Each end is the character that follows the mark in ASCII.
    ranges = [(f"{host})", f"{host}*")]
    return [*ranges, (f"{host},", f"{host}-")] if pattern.kind == "domain" else ranges


def _parquet_files(path: Path) -> list[Path]:
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not files or not files[0].exists():
        raise MissingError(f"no Parquet files at {path}")
    return files


def _capture(row: dict[str, Any]) -> Capture | None:
    time, url, file = row["fetch_time"], row["url"], row["warc_filename"]
    offset, length, status = row["warc_record_offset"], row["warc_record_length"], row["fetch_status"]
    if not (isinstance(url, str) and isinstance(file, str)) or None in (offset, length, status):
        return None
    return Capture(
        url=url,
        timestamp=f"{time:%Y%m%d%H%M%S}" if isinstance(time, datetime) else "",
        status=status,
        mime=row.get("content_mime_detected") or "",
        digest=row.get("content_digest") or "",
        filename=file,
        offset=offset,
        length=length,
        truncated=row.get("content_truncated") or "",
    )

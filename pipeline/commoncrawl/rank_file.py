"""Read Common Crawl's host and domain rank files: gzip of any number of members, hundreds of millions of rows, one pass.

Format: https://commoncrawl.org/web-graphs: a header line that begins with `#`, then tab-separated rows, sorted by
harmonic centrality; host names reversed (`org.wikipedia.en`), a leading `www.` taken off. Domain files have `n_hosts` too.
"""

import hashlib
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from groundhop.errors import InputError, MissingError

HOST_COLUMNS = ("#harmonicc_pos", "#harmonicc_val", "#pr_pos", "#pr_val", "#host_rev")
DOMAIN_COLUMNS = (*HOST_COLUMNS, "#n_hosts")
MAX_LINE = 4096
"""A longer line is no row: a host name has at most 253 characters."""
_PIECE = 1 << 18
_GZIP_MAGIC = b"\x1f\x8b"
_HOST = re.compile(rb"[a-z0-9_-]+(?:\.[a-z0-9_-]+)*")


class RankRow(NamedTuple):
    """One host or domain."""

    host: str
    """In reading order: `en.wikipedia.org`."""
    harmonic_position: int
    """1 is the highest."""
    harmonic: float
    pagerank_position: int
    pagerank: float
    n_hosts: int | None
    """Hosts of a domain; None in host files."""


class RankFile:
    """One pass over a file. What was found on the way is told by the attributes once the pass is over."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = 0
        """Rows that could be read."""
        self.bad: Counter[str] = Counter()
        """Rows that could not, by reason: `columns`, `number`, `position`, `host`, `too_long`."""
        self.sha256 = ""
        """Of the file as it lies on the disk."""

    def __iter__(self) -> Iterator[RankRow]:
        """Yield the rows in file order; bad ones are counted. Raises: MissingError; InputError for a wrong header or gzip."""
        self.rows, self.bad = 0, Counter()
        lines = self._lines()
        columns = self._columns(next(lines, b""))
        for line in lines:
            row = parse_row(line, columns) if line else "too_long"
            if isinstance(row, str):
                self.bad[row] += 1
            else:
                self.rows += 1
                yield row

    def _columns(self, header: bytes) -> int:
        found = tuple(header.decode("utf-8", "replace").rstrip("\r").split("\t"))
        # Only the first name had a `#` in some releases.
        names = tuple(name.lstrip("#") for name in found)
        for wanted in (HOST_COLUMNS, DOMAIN_COLUMNS):
            if header.startswith(b"#") and names == tuple(name[1:] for name in wanted):
                return len(wanted)
        shown = " ".join(found)[:200]
        raise InputError(f"{self.path}: need the header {' '.join(HOST_COLUMNS)} [#n_hosts], got {shown!r}")

    def _lines(self) -> Iterator[bytes]:
        """Lines without their ends; an empty one stands for a line longer than `MAX_LINE`. Empty lines are left out."""
        tail, overlong = b"", False
        for piece in self._unpacked():
            *whole, tail = (tail + piece).split(b"\n")
            if overlong and whole:
                # The rest of the line that was given up.
                whole, overlong = whole[1:], False
            for line in whole:
                if line:
                    yield line if len(line) <= MAX_LINE else b""
            if len(tail) > MAX_LINE or overlong:
                if not overlong:
                    yield b""
                tail, overlong = b"", True
        if tail and not overlong:
            yield tail

    def _unpacked(self) -> Iterator[bytes]:
        digest = hashlib.sha256()
        try:
            file = self.path.open("rb")
        except FileNotFoundError as error:
            raise MissingError(f"no rank file {self.path}") from error
        with file:
            packed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            file.seek(0)
            first = file.read(_PIECE)
            digest.update(first)
            if packed:
                yield from self._gunzipped(first, file, digest)
            else:
                while first:
                    yield first
                    first = file.read(_PIECE)
                    digest.update(first)
        self.sha256 = digest.hexdigest()

    def _gunzipped(self, ahead: bytes, file: IO[bytes], digest: "hashlib._Hash") -> Iterator[bytes]:
        unpacker = zlib.decompressobj(31)
        begun = False
        while ahead:
            if not begun and not ahead.strip(b"\0"):
                ahead = b""  # Zeros may pad the end.
            elif not begun and len(ahead) > 1 and not ahead.startswith(_GZIP_MAGIC):
                raise InputError(f"{self.path}: {ahead[:8]!r} where a gzip member should begin")
            else:
                begun = True
                try:
                    out = unpacker.decompress(ahead, _PIECE)
                except zlib.error as error:
                    raise InputError(f"{self.path}: damaged gzip after {self.rows} rows: {error}") from error
                if out:
                    yield out
                ahead = unpacker.unconsumed_tail
                if unpacker.eof:
                    ahead, unpacker, begun = unpacker.unused_data, zlib.decompressobj(31), False
            if len(ahead) < 2:
                more = file.read(_PIECE)
                digest.update(more)
                ahead += more
                if not more:
                    break
        if begun or ahead:
            # Percentiles of half a file would name other hosts.
            raise InputError(f"{self.path}: ends inside a gzip member after {self.rows} rows: fetch it again")


def parse_row(line: bytes, columns: int) -> RankRow | str:
    """One row, or the reason why it is none."""
    parts = line.rstrip(b"\r").split(b"\t")
    if len(parts) != columns:
        return "columns"
    host = parts[4]
    if len(host) > 253 or _HOST.fullmatch(host) is None:
        return "host"
    try:
        place, harmonic, other, pagerank = int(parts[0]), float(parts[1]), int(parts[2]), float(parts[3])
        n_hosts = int(parts[5]) if columns > 5 else None
    except ValueError:
        return "number"
    if place < 1 or other < 1:
        return "position"
    if not (math.isfinite(harmonic) and math.isfinite(pagerank)):
        return "number"
    return RankRow(reading_order(host.decode("ascii")), place, harmonic, other, pagerank, n_hosts)


def reading_order(reversed_host: str) -> str:
    """`org.wikipedia.en` is `en.wikipedia.org`."""
    return ".".join(reversed_host.split(".")[::-1])

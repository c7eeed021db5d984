"""Draw hosts from a band of popularity in one pass over a rank file, in memory that does not grow with the file.

How long the file is, and so where the band lies, is known only at its end. Each host gets a pseudo-random priority from
its name and the seed; the draw is the hosts of the band with the smallest ones (bottom-k sampling, Cohen and Kaplan
2007). On the way a row is kept if it may still be in the band at the end, and if its priority is so small that it could
be drawn from the shortest file whose band reaches its position. Some thousand rows are kept for a hundred hosts.
"""

import hashlib
import heapq
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from msgspec import Struct

from groundhop.errors import InputError
from groundhop.pipeline.commoncrawl.rank_file import RankFile, RankRow

MAX_KEPT = 200_000
"""Where the sample of one pass would be larger (a band that is narrow beside its position), a second pass is made."""
_TOP = 1 << 64


class HostRow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A host or domain that was drawn."""

    host: str
    percentile: float
    """Position divided by the rows of the file: 0 is the most popular."""
    harmonic_position: int
    pagerank_position: int
    n_hosts: int | None = None
    """Hosts of a domain; None for a host."""


class Draw(NamedTuple):
    """What came of one pass."""

    hosts: list[HostRow]
    """In the order of their positions."""
    rows: int
    bad: dict[str, int]
    """Rows that could not be read, by reason."""
    sha256: str
    passes: int
    """1; 2 for a very narrow band, and where `max_gap` and `wanted` left too little of the sample."""


def draw_band(
    path: Path,
    band: tuple[float, float],
    count: int,
    *,
    seed: int = 0,
    by: Literal["harmonic", "pagerank"] = "harmonic",
    max_gap: float = 1.0,
    wanted: Callable[[str], bool] = lambda _: True,
) -> Draw:
    """Draw `count` hosts evenly from the rank percentiles `band`, or all of the band if it has fewer.

    Positions are those of the file, among all its rows. Hosts whose harmonic percentile lies more than `max_gap` behind
    their PageRank percentile are left out as link farms, and those that `wanted` refuses. The same file, band and seed
    give the same hosts. Raises: MissingError; InputError for a file whose header or gzip is wrong, or without rows;
    ValueError for a band without extent.
    """
    if not 0 <= band[0] < band[1] <= 1:
        raise ValueError(f"need 0 <= band[0] < band[1] <= 1, got {band[0]} and {band[1]}")
    file = RankFile(path)
    sample = _Sample(band, count, seed, by)
    for row in file:
        sample.add(row, file.rows)
    total, passes = file.rows, 1
    if total == 0:
        raise InputError(f"{path}: no row could be read, {dict(file.bad)} are bad")
    inside = [item for item in sample.inside(total) if _fits(item[1], total, max_gap, wanted)]
    if len(inside) < count and not sample.is_whole(total):
        inside, passes = [], 2
        for row in file:
            if sample.is_inside(row, total) and _fits(row, total, max_gap, wanted):
                inside.append((sample.priority(row), row))
                if len(inside) > 4 * count:
                    inside = heapq.nsmallest(count, inside, key=_order)
    chosen = [row for _, row in heapq.nsmallest(count, inside, key=_order)]
    chosen.sort(key=sample.position)
    hosts = [
        HostRow(
            host=row.host,
            percentile=sample.position(row) / total,
            harmonic_position=row.harmonic_position,
            pagerank_position=row.pagerank_position,
            n_hosts=row.n_hosts,
        )
        for row in chosen
    ]
    return Draw(hosts, total, dict(sorted(file.bad.items())), file.sha256, passes)


class _Sample:
    """The rows that may be drawn, for every length that the file may still turn out to have."""

    def __init__(self, band: tuple[float, float], count: int, seed: int, by: str) -> None:
        self._low, self._high = band
        self._key = seed.to_bytes(16, "big", signed=True)
        self._place = RankRow._fields.index(f"{by}_position")
        # Of a file that ends where the band ends at a position, so many rows of the band are expected to be kept.
        expected = (4 * count + 64) * self._high / (self._high - self._low)
        self._scale = 0 if expected > MAX_KEPT else int(expected * _TOP)
        self._kept: list[tuple[int, RankRow]] = []
        self._prune_at = 4096

    def add(self, row: RankRow, rows: int) -> None:
        """Enter a row. `rows` were read so far, so the file has at least as many."""
        position: int = row[self._place]  # type: ignore[assignment]
        if not self._scale or position < self._low * rows:
            return
        priority = self.priority(row)
        if priority * position < self._scale:
            self._kept.append((priority, row))
            if len(self._kept) >= self._prune_at:
                self._kept = [item for item in self._kept if self.position(item[1]) >= self._low * rows]
                self._prune_at = 2 * len(self._kept) + 4096

    def inside(self, total: int) -> list[tuple[int, RankRow]]:
        """The rows of the band under the bound below which none was passed over."""
        return [
            item for item in self._kept if self.is_inside(item[1], total) and item[0] * self._high * total < self._scale
        ]

    def is_inside(self, row: RankRow, total: int) -> bool:
        """Whether a row of a file of `total` rows lies in the band."""
        return self._low * total <= self.position(row) <= self._high * total

    def is_whole(self, total: int) -> bool:
        """Whether every row of the band was kept."""
        return _TOP * self._high * total < self._scale

    def position(self, row: RankRow) -> int:
        """The position that the band is measured in."""
        place: int = row[self._place]  # type: ignore[assignment]
        return place

    def priority(self, row: RankRow) -> int:
        """64 bits that depend on the host's name and the seed alone."""
        return int.from_bytes(hashlib.blake2b(row.host.encode(), digest_size=8, key=self._key).digest(), "big")


def _fits(row: RankRow, total: int, max_gap: float, wanted: Callable[[str], bool]) -> bool:
    return (row.harmonic_position - row.pagerank_position) / total <= max_gap and wanted(row.host)


def _order(item: tuple[int, RankRow]) -> tuple[int, str]:
    # Names settle ties, so that nothing hangs on the order of the file.
    return item[0], item[1].host

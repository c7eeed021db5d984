"""Crawl politely into a WARC file: robots first, one request at a time and a pause for each host, killed and taken up again.

The ledger `crawl.jsonl` holds one row a finished address. A row says where the WARC file ended after it, so a killed
crawl knows what to cut off, and which links it found, so the frontier grows again without fetching anything twice.
"""

import asyncio
import heapq
import logging
import random
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import Struct

from groundhop import __version__, jsonl
from groundhop.config import PagesConfig
from groundhop.pipeline.encoding import decode
from groundhop.pipeline.fetch import Answer, Failed, Fetcher
from groundhop.pipeline.links import anchors, parse_html
from groundhop.pipeline.robots import Robots, reserves, robots_of, tdm_reserved
from groundhop.pipeline.urls import host_of, url_key
from groundhop.pipeline.warc import Damaged, Stored, WarcAppender, read_warc
from groundhop.progress import Progress, progress

logger = logging.getLogger(__name__)

AT_ONCE = 16
"""Requests under way, each to another host."""
ATTEMPTS = 3
MAX_WAIT_S = 120.0
"""A longer Retry-After or Crawl-delay is cut to this."""
ROBOTS_FOR_S = 24 * 3600.0
"""RFC 9309, 2.4: a robots file should not be used for longer."""
LEDGER = "crawl.jsonl"
WARC = "crawl.warc.gz"


class CrawlRow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one address ended."""

    url: str
    depth: int
    reason: str | None = None
    """None for a stored page; else why there is none."""
    detail: str = ""
    temporary: bool = False
    """Whether a later run asks again."""
    final: str | None = None
    """Where redirects led to; None without any."""
    links: tuple[str, ...] = ()
    """Where a stored page leads, nofollow links left out."""
    warc_end: int
    """Size of the WARC file after this row."""


@dataclass(frozen=True, slots=True)
class Job:
    """An address to fetch."""

    url: str
    depth: int
    attempt: int = 1


class Frontier:
    """What is still to be fetched: first come first served within a host, never two at once, never sooner than its pace."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._queues: dict[str, deque[Job]] = {}
        self._ready: list[tuple[float, int, str]] = []
        self._busy: set[str] = set()
        self._count = 0

    def knows(self, url: str) -> bool:
        """Whether an address with this key was taken or is known to be done."""
        return url_key(url) in self._known

    def know(self, url: str) -> None:
        """Never take this address."""
        self._known.add(url_key(url))

    def add(self, job: Job) -> bool:
        """Take an address unless one with its key was taken before."""
        key = url_key(job.url)
        if key in self._known:
            return False
        self._known.add(key)
        self.put_back(job, not_before=0.0)
        return True

    def put_back(self, job: Job, not_before: float) -> None:
        """Queue a job; its host rests until `not_before` (monotonic seconds)."""
        host = host_of(job.url)
        queue = self._queues.setdefault(host, deque())
        queue.append(job)
        if host not in self._busy and len(queue) == 1:
            self._push(host, not_before)

    def release(self, host: str, not_before: float) -> None:
        """Say that a host's request ended and when the next may begin."""
        self._busy.discard(host)
        if self._queues.get(host):
            self._push(host, not_before)

    def pop(self, now: float) -> Job | None:
        """The next job whose host may be asked now, or None."""
        if not self._ready or self._ready[0][0] > now:
            return None
        host = heapq.heappop(self._ready)[2]
        self._busy.add(host)
        return self._queues[host].popleft()

    def wait_s(self, now: float) -> float | None:
        """Seconds until a host is ready; None when none waits."""
        return max(0.0, self._ready[0][0] - now) if self._ready else None

    def _push(self, host: str, when: float) -> None:
        self._count += 1
        heapq.heappush(self._ready, (when, self._count, host))


@dataclass(slots=True)
class Site:
    """What is known of one origin's rules."""

    robots: Robots
    until: float
    reserved: tuple[tuple[str, bool], ...] = ()
    """TDM reservations of the whole site: path pattern and whether rights are reserved."""


@dataclass(slots=True)
class Crawl:
    """One crawl under way."""

    config: PagesConfig
    folder: Path
    fetcher: Fetcher
    seed: int = 0
    retry_base_s: float = 5.0
    frontier: Frontier = field(default_factory=Frontier)
    sites: dict[str, Site] = field(default_factory=dict)
    stored: int = 0
    hosts: frozenset[str] = frozenset()

    async def run(self, warc: WarcAppender, ledger: jsonl.Appender, shown: Progress) -> None:
        """Fetch until the frontier is empty or enough pages are stored."""
        active: dict[asyncio.Task[tuple[Job, Answer | Failed, float]], Job] = {}
        while True:
            now = time.monotonic()
            while len(active) < self._room() and (job := self.frontier.pop(now)):
                active[asyncio.create_task(self._visit(job))] = job
            wait = self.frontier.wait_s(time.monotonic())
            if active:
                # Without room for another request only the end of one is worth waking up for.
                until = wait if len(active) < self._room() else None
                done, _ = await asyncio.wait(active, timeout=until, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    del active[task]
                    self._finish(*task.result(), warc, ledger)
                    shown.advance(notes={"stored": self.stored})
            elif wait is None or self._room() == 0:
                return
            else:
                await asyncio.sleep(wait)

    def _room(self) -> int:
        """How many requests may be under way: no more than pages are wanted still."""
        return max(0, min(AT_ONCE, self.config.crawl_pages - self.stored))

    async def _visit(self, job: Job) -> tuple[Job, Answer | Failed, float]:
        refusal = await self._may(job.url)
        follow = partial(self._may_follow, job)
        got = refusal if refusal is not None else await self.fetcher.fetch(job.url, may=follow, accept=is_html_type)
        site = self.sites.get(_origin(job.url))
        delay = (site.robots.delay_s(self.config.user_agent) if site else None) or 0.0
        return job, got, max(self.config.pace_s, min(delay, MAX_WAIT_S))

    async def _may_follow(self, job: Job, url: str) -> Failed | None:
        if job.depth == 0:
            # A start address may lead to the host that a site really lives on.
            self.hosts |= {host_of(url)}
        if self.config.same_host and host_of(url) not in self.hosts:
            return Failed("other_host", url)
        if url_key(url) != url_key(job.url) and self.frontier.knows(url):
            return Failed("redirect", url)
        refusal = await self._may(url)
        if refusal is None:
            self.frontier.know(url)
        return refusal

    async def _may(self, url: str) -> Failed | None:
        site = await self._site(_origin(url))
        if site.robots.state == "unreachable":
            return Failed("robots_unreachable", _origin(url), temporary=True)
        return None if site.robots.allows(self.config.user_agent, url) else Failed("forbidden", "robots.txt")

    async def _site(self, origin: str) -> Site:
        site = self.sites.get(origin)
        if site is None or time.monotonic() > site.until:
            got = await self.fetcher.fetch(f"{origin}/robots.txt", may=_any_host)
            robots = _robots_from(got)
            # Unreachable is for this once: the next address of the site asks again.
            for_s = 0.0 if robots.state == "unreachable" else ROBOTS_FOR_S
            site = Site(robots, time.monotonic() + for_s)
            if robots.state != "unreachable":
                policy = await self.fetcher.fetch(f"{origin}/.well-known/tdmrep.json", may=_any_host)
                site.reserved = tdm_reserved(policy.body) if isinstance(policy, Answer) and policy.status == 200 else ()
            self.sites[origin] = site
        return site

    def _finish(
        self, job: Job, got: Answer | Failed, pace_s: float, warc: WarcAppender, ledger: jsonl.Appender
    ) -> None:
        now = time.monotonic()
        host = host_of(job.url)
        if isinstance(got, Failed) and got.temporary and job.attempt < ATTEMPTS:
            wait = self._wait_s(job, got)
            self.frontier.put_back(Job(job.url, job.depth, job.attempt + 1), now + max(wait, pace_s))
            self.frontier.release(host, now + max(wait, pace_s))
            return
        row = store(job, got, warc, self.sites)
        ledger.append(row)
        self.take(row)
        self.frontier.release(host, now + pace_s)

    def _wait_s(self, job: Job, failed: Failed) -> float:
        asked = failed.retry_after_s if failed.retry_after_s is not None else self.retry_base_s * 2 ** (job.attempt - 1)
        # Spread over up to a tenth more, so that many crawlers told the same do not come back together.
        spread = 1.0 + 0.1 * random.Random(f"{self.seed} {job.url} {job.attempt}").random()
        return min(asked, MAX_WAIT_S) * spread

    def resume(self, rows: Sequence[CrawlRow]) -> None:
        """Stand where a crawl with these rows stood, and ask again what failed for the time being."""
        for row in rows:
            if not row.temporary:
                self.frontier.know(row.url)
        for url in self.config.crawl:
            self.frontier.add(Job(url, 0))
        for row in rows:
            self.take(row)
            if row.temporary:
                self.frontier.add(Job(row.url, row.depth))

    def take(self, row: CrawlRow) -> None:
        """Enter a finished row: count it and queue where it leads."""
        if row.final is not None:
            self.frontier.know(row.final)
            if row.depth == 0:
                self.hosts |= {host_of(row.final)}
        self.stored += row.reason is None
        if row.reason is None and row.depth < self.config.crawl_depth:
            for link in row.links:
                if not self.config.same_host or host_of(link) in self.hosts:
                    self.frontier.add(Job(link, row.depth + 1))


def store(job: Job, got: Answer | Failed, warc: WarcAppender, sites: Mapping[str, Site]) -> CrawlRow:
    """Write what came to the WARC file, redirects first, and make its ledger row."""
    for source, status, target in got.redirects:
        warc.append(Stored(source, status, (("Location", target),), b""), _now())
    final = got.redirects[-1][2] if got.redirects else None
    if isinstance(got, Failed):
        return CrawlRow(
            url=job.url,
            depth=job.depth,
            reason=got.reason,
            detail=got.detail[:500],
            temporary=got.temporary,
            warc_end=warc.size,
        )
    if got.status != 200:
        return CrawlRow(url=job.url, depth=job.depth, reason="status", detail=str(got.status), warc_end=warc.size)
    headers = got.headers
    site = sites.get(_origin(got.url))
    if site is not None and reserves(site.reserved, got.url) and got.header("tdm-reservation") is None:
        headers = (*headers, ("tdm-reservation", "1"))
    stored = Stored(got.url, got.status, headers, got.body)
    warc.append(stored, _now())
    return CrawlRow(url=job.url, depth=job.depth, final=final, links=links_of(stored), warc_end=warc.size)


def links_of(stored: Stored) -> tuple[str, ...]:
    """Where a page leads, each address once; empty for a page that asks not to be followed."""
    root = parse_html(decode(stored.body, stored.header("Content-Type")).text)
    if root is None:
        return ()
    asked = [m.get("content") or "" for m in root.iter("meta") if (m.get("name") or "").lower() == "robots"]
    if any("nofollow" in part.strip().lower().split() for content in asked for part in content.split(",")):
        return ()
    return tuple(dict.fromkeys(anchor.url for anchor in anchors(root, stored.url) if not anchor.nofollow))


def is_html_type(content_type: str) -> bool:
    """Whether a body of this type is worth reading; no type may be a page."""
    return content_type.partition(";")[0].strip().lower() in ("", "text/html", "application/xhtml+xml")


def crawl(config: PagesConfig, folder: Path, *, seed: int = 0, retry_base_s: float = 5.0) -> Path:
    """Crawl from `config.crawl` into `folder`; what an earlier, killed run fetched is kept. Returns the WARC file."""
    folder.mkdir(parents=True, exist_ok=True)
    _recover(folder)
    asyncio.run(_crawl(config, folder, seed, retry_base_s))
    return folder / WARC


def crawl_failures(folder: Path) -> list[CrawlRow]:
    """The addresses of a crawl that gave no page and no redirect, in the order in which they ended."""
    rows = _latest(jsonl.read_if_there(folder / LEDGER, CrawlRow))
    return [row for row in rows if row.reason not in (None, "redirect")]


async def _crawl(config: PagesConfig, folder: Path, seed: int, retry_base_s: float) -> None:
    every = jsonl.read_if_there(folder / LEDGER, CrawlRow)
    rows, size = _latest(every), max((row.warc_end for row in every), default=0)
    agent = f"{config.user_agent}/{__version__}" + (f" (+{config.contact})" if config.contact else "")
    warc = WarcAppender(folder / WARC, size, _now(), {"software": f"groundhop {__version__}", "robots": "obeyed"})
    hosts = frozenset(host_of(url) for url in config.crawl)
    done = sum(row.reason is None for row in rows)
    with jsonl.Appender(folder / LEDGER) as ledger, progress("crawl", config.crawl_pages, done=done) as shown:
        async with Fetcher(agent, config.max_bytes, config.allow_private) as fetcher:
            work = Crawl(config, folder, fetcher, seed=seed, retry_base_s=retry_base_s, hosts=hosts)
            work.resume(rows)
            await work.run(warc, ledger, shown)
    warc.close()


def _latest(rows: Iterable[CrawlRow]) -> list[CrawlRow]:
    """The last row of each address: one that failed for the time being may have been asked again."""
    last: dict[str, CrawlRow] = {}
    for row in rows:
        last.pop(row.url, None)
        last[row.url] = row
    return list(last.values())


def _recover(folder: Path) -> None:
    """Enter into the ledger what a killed crawl had written to its WARC file but not entered."""
    path = folder / WARC
    rows = jsonl.read_if_there(folder / LEDGER, CrawlRow)
    end = max((row.warc_end for row in rows), default=0)
    if not path.exists() or path.stat().st_size <= end:
        return
    found: list[CrawlRow] = []
    first: str | None = None
    for stored in read_warc(path):
        if isinstance(stored, Damaged) or stored.pointer is None or stored.pointer.offset < end:
            continue
        first = first or stored.url
        if stored.status == 200:
            depth = min((row.depth + 1 for row in rows if first in row.links), default=0)
            final = stored.url if first != stored.url else None
            upto = stored.pointer.offset + stored.pointer.length
            found.append(CrawlRow(url=first, depth=depth, final=final, links=links_of(stored), warc_end=upto))
            first = None
    with jsonl.Appender(folder / LEDGER) as ledger:
        for row in found:
            ledger.append(row)


def _robots_from(got: Answer | Failed) -> Robots:
    if isinstance(got, Answer):
        return robots_of(got.status, got.body)
    # RFC 9309, 2.3.1.2: a file that redirects never reach is one that is not there.
    return robots_of(404 if got.reason in ("redirect_loop", "bad_redirect") else None, b"")


async def _any_host(_: str) -> Failed | None:
    return None


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme.lower()}://{parts.netloc.rpartition('@')[2]}"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

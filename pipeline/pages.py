"""Make the page store of a run: pages from WARC files, JSON lines, Common Crawl and a crawl, extracted in parallel, one a key.

Each item's outcome goes to a ledger in the order of the sources, so that a killed run goes on behind the last line
of it, and the final file does not depend on where it was killed or on how many workers there were.
"""

import hashlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from groundhop import jsonl
from groundhop.config import PagesConfig
from groundhop.pipeline.commoncrawl.collect import WARC as COMMONCRAWL_WARC
from groundhop.pipeline.commoncrawl.collect import collect, collect_failures, collect_summary
from groundhop.pipeline.crawl import WARC, crawl, crawl_failures
from groundhop.pipeline.encoding import decode
from groundhop.pipeline.extract import extract
from groundhop.pipeline.robots import opt_outs
from groundhop.pipeline.spread import spread
from groundhop.pipeline.urls import host_of, resolve, url_key
from groundhop.pipeline.warc import Damaged, Stored, read_warc
from groundhop.progress import progress
from groundhop.records import Failure, Link, Page
from groundhop.runs import StageFolder

logger = logging.getLogger(__name__)

PAGES_FILE = "pages.jsonl.zst"
LEDGER_FILE = "ledger.jsonl"
_HTML_TYPES = ("text/html", "application/xhtml+xml")


class Drop(NamedTuple):
    """Why an item gave no page."""

    item: str
    reason: str
    """`not_html`, `status`, `redirect`, `too_large`, `thin`, `empty`, `opted_out`, `bad_url`, `duplicate`, or what
    the WARC reader or the crawl says."""
    detail: str = ""


class LedgerRow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The outcome of one item: a page, or why there is none."""

    page: Page | None = None
    failure: Failure | None = None


def page_from_html(
    html: bytes,
    url: str,
    content_type: str | None = None,
    *,
    stored: Stored | None = None,
    min_chars: int = 0,
    respect_opt_outs: bool = True,
    user_agent: str = "groundhop",
) -> Page | Drop:
    """Make a page of a decoded body, or say why it gives none. `stored` adds headers, licence, source and pointer."""
    if not host_of(url):
        return Drop(url, "bad_url", "no web address")
    if not _is_html(content_type, html):
        return Drop(url, "not_html", content_type or "no content type, and no markup at its start")
    found = extract(decode(html, content_type).text, url)
    if found is None or not found.text:
        return Drop(url, "empty", "no text")
    signals = opt_outs(stored.headers if stored else (), found.metas, user_agent)
    if signals and respect_opt_outs:
        return Drop(url, "opted_out", ", ".join(signals))
    if len(found.text) < min_chars:
        return Drop(url, "thin", f"{len(found.text)} characters of main text, need {min_chars}")
    return Page(
        url=url,
        key=url_key(url),
        host=host_of(url),
        title=found.title,
        text=found.text,
        links=found.links,
        digest=hashlib.sha256(html).hexdigest(),
        licence=stored.licence if stored else None,
        source=stored.source if stored else None,
        canonical=found.canonical,
        opt_outs=signals,
        warc=stored.pointer if stored else None,
    )


def trusted_canonical(page: Page) -> str | None:
    """The key that a page's own canonical link may give it; None where the page's own key must stay.

    Trusted only within the host, never for the root, and only if it differs by the query alone: sites exist whose
    every page names the home page as canonical.
    """
    if page.canonical is None:
        return None
    key = url_key(page.canonical)
    own, _, query = page.key.partition("?")
    is_root = key.count("/") <= 3 and key.endswith("/")
    return key if query and not is_root and key != page.key and key.partition("?")[0] == own else None


def read_pages(path: Path) -> Iterator[Page]:
    """Yield the pages of a finished file in the order of their keys. Raises: MissingError, InputError."""
    return jsonl.read(path, Page)


class JsonRow(Struct, frozen=True, kw_only=True):
    """A line of a JSONL source; other fields are ignored."""

    url: str
    html: str
    licence: str | None = None
    source_repo: str | None = None
    source: str | None = None


def read_jsonl(path: Path) -> Iterator[Stored | Damaged]:
    """Yield the rows of a JSONL source as responses; lines that cannot be read are reported, not fatal."""
    decoder = msgspec.json.Decoder(JsonRow)
    headers = (("Content-Type", "text/html; charset=utf-8"),)
    for number, raw in enumerate(jsonl.lines(path), start=1):
        try:
            row = decoder.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            yield Damaged(f"{path}, line {number}", "damaged", str(error))
            continue
        body = row.html.encode("utf-8", "replace")
        yield Stored(row.url, 200, headers, body, licence=row.licence, source=row.source or row.source_repo)


def run(config: PagesConfig, folder: StageFolder, *, seed: int = 0) -> None:
    """Fill `folder` with `pages.jsonl.zst`, sorted by key, and `failures.jsonl`.

    Of two pages with one key the first in the order of the sources is kept: WARC files, JSONL files, Common Crawl, crawl.
    """
    if folder.done:
        return
    ledger = folder.path / LEDGER_FILE
    # Once extraction began, the order of its items must stay: what a crawl missed is left to another run.
    if _wants_commoncrawl(config) and not ledger.exists():
        collect(config, folder.path / "commoncrawl", seed=seed)
    if config.crawl and not ledger.exists():
        crawl(config, folder.path / "crawl", seed=seed)
    _extract_all(config, folder.path, ledger)
    counts = _merge(folder, ledger)
    if _wants_commoncrawl(config):
        counts["commoncrawl"] = collect_summary(folder.path / "commoncrawl")
    folder.finish(counts)
    ledger.unlink()


def _wants_commoncrawl(config: PagesConfig) -> bool:
    return bool(config.commoncrawl or config.commoncrawl_ranks)


def _sources(config: PagesConfig, folder: Path) -> Iterator[Stored | Damaged]:
    """All items in their order: WARC files, JSONL files, Common Crawl, crawl."""
    for path in config.warc:
        yield from read_warc(path, config.max_bytes)
    for path in config.jsonl:
        yield from read_jsonl(path)
    if _wants_commoncrawl(config):
        for item in read_warc(folder / "commoncrawl" / COMMONCRAWL_WARC, config.max_bytes):
            yield replace(item, source=config.commoncrawl_release) if isinstance(item, Stored) else item
        missed = collect_failures(folder / "commoncrawl")
        yield from (Damaged(row.url, row.reason or "", row.detail) for row in missed)
    if config.crawl:
        yield from read_warc(folder / "crawl" / WARC, config.max_bytes)
        yield from (Damaged(row.url, row.reason or "", row.detail) for row in crawl_failures(folder / "crawl"))


def _extract_all(config: PagesConfig, folder: Path, ledger: Path) -> None:
    with jsonl.Appender(ledger) as out:
        before = sum(1 for _ in jsonl.read(ledger, msgspec.Raw))
        settings = _Settings(config.max_bytes, config.min_chars, config.respect_opt_outs, config.user_agent)
        work = ((item, settings) for item in islice(_sources(config, folder), before, None))
        dropped = 0
        with progress("pages", None, done=before) as shown:
            for (item, _), row in spread(_outcome, work, workers=config.workers):
                if isinstance(row, Exception):
                    row = _failed(Drop(_name_of(item), "crashed", f"{type(row).__name__}: {row}"))
                out.append(row)
                dropped += row.page is None
                shown.advance(notes={"dropped": dropped})


class _Settings(NamedTuple):
    max_bytes: int
    min_chars: int
    respect_opt_outs: bool
    user_agent: str


def _outcome(task: tuple[Stored | Damaged, _Settings]) -> LedgerRow:
    """What one item gives. Runs in a worker process."""
    item, settings = task
    if isinstance(item, Damaged):
        return _failed(Drop(item.item, item.reason, item.detail))
    if 300 <= item.status < 400 and (target := resolve(item.url, item.header("Location") or "")):
        return _failed(Drop(item.url, "redirect", target))
    if item.status != 200:
        return _failed(Drop(item.url, "status", str(item.status)))
    if len(item.body) > settings.max_bytes:
        return _failed(Drop(item.url, "too_large", f"{len(item.body)} bytes"))
    made = page_from_html(
        item.body,
        item.url,
        item.header("Content-Type"),
        stored=item,
        min_chars=settings.min_chars,
        respect_opt_outs=settings.respect_opt_outs,
        user_agent=settings.user_agent,
    )
    return _failed(made) if isinstance(made, Drop) else LedgerRow(page=made)


def _failed(drop: Drop) -> LedgerRow:
    return LedgerRow(failure=Failure(stage="pages", item=drop.item, reason=drop.reason, detail=drop.detail[:500]))


def _name_of(item: Stored | Damaged) -> str:
    return item.url if isinstance(item, Stored) else item.item


def _is_html(content_type: str | None, body: bytes) -> bool:
    named = (content_type or "").partition(";")[0].strip().lower()
    if named:
        return named in _HTML_TYPES
    return body.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"<"


class _Candidate(NamedTuple):
    key: str
    canonical: str | None
    text: bytes
    """Digest of title and text, for telling whether two pages agree."""
    offset: int


def _merge(folder: StageFolder, ledger: Path) -> dict[str, Any]:
    """Write the final file and the failures. Holds keys and offsets in memory, never the pages."""
    candidates, drops, aliases = _survey(ledger)
    chosen, duplicates = _choose(candidates, aliases)
    names = _Aliases(aliases)
    path = folder.path / PAGES_FILE
    kept = jsonl.write(path, _in_key_order(ledger, chosen, names))
    folder.fail_all([(d.item, d.reason, d.detail) for d in chain(drops, duplicates)])
    links = main = hosts = characters = 0
    seen: set[str] = set()
    for page in read_pages(path):
        links += len(page.links)
        main += sum(link.main for link in page.links)
        characters += len(page.text)
        seen.add(page.host)
    hosts = len(seen)
    return {
        "pages": kept,
        "hosts": hosts,
        "links": links,
        "main_links": main,
        "characters": characters,
        "dropped": dict(sorted(folder.drops.items())),
    }


def _survey(ledger: Path) -> tuple[list[_Candidate], list[Drop], dict[str, str]]:
    candidates: list[_Candidate] = []
    drops: list[Drop] = []
    aliases: dict[str, str] = {}
    decoder = msgspec.json.Decoder(LedgerRow)
    with ledger.open("rb") as file:
        offset = 0
        for line in file:
            row = decoder.decode(line)
            if row.page is not None:
                told = hashlib.sha256(f"{row.page.title}\n{row.page.text}".encode()).digest()
                candidates.append(_Candidate(row.page.key, trusted_canonical(row.page), told, offset))
            elif row.failure is not None:
                drops.append(Drop(row.failure.item, row.failure.reason, row.failure.detail))
                if row.failure.reason == "redirect" and url_key(row.failure.item) != url_key(row.failure.detail):
                    aliases.setdefault(url_key(row.failure.item), url_key(row.failure.detail))
            offset += len(line)
    return candidates, drops, aliases


def _choose(candidates: Iterable[_Candidate], aliases: dict[str, str]) -> tuple[dict[str, int], list[Drop]]:
    """Offset by final key, and what was dropped as duplicate. Adds to `aliases` the keys that gave way to a canonical."""
    chosen: dict[str, int] = {}
    told: dict[str, bytes] = {}
    duplicates: list[Drop] = []
    waiting: list[_Candidate] = []
    for page in candidates:
        if page.canonical is not None:
            waiting.append(page)
        elif page.key in chosen:
            duplicates.append(Drop(page.key, "duplicate", "another page has this key"))
        else:
            chosen[page.key], told[page.key] = page.offset, page.text
    for page in waiting:
        canonical = page.canonical or page.key
        if canonical not in chosen and canonical not in aliases:
            chosen[canonical], told[canonical], aliases[page.key] = page.offset, page.text, canonical
        elif told.get(canonical) == page.text:
            aliases[page.key] = canonical
            duplicates.append(Drop(page.key, "duplicate", f"same text as its canonical {canonical}"))
        elif page.key in chosen:
            duplicates.append(Drop(page.key, "duplicate", "another page has this key"))
        else:
            chosen[page.key], told[page.key] = page.offset, page.text
    return chosen, duplicates


class _Aliases:
    """Follows redirects and adopted canonicals from a link's key to a page's."""

    def __init__(self, aliases: dict[str, str]) -> None:
        self._aliases = aliases

    def final(self, key: str) -> str:
        """The key at the end of the chain; `key` itself where there is none. Loops end at their start."""
        seen = key
        for _ in range(10):
            if seen not in self._aliases:
                return seen
            seen = self._aliases[seen]
        return key

    def rename(self, link: Link) -> Link:
        """The link with the key of the page that it leads to in the end."""
        key = self.final(link.key)
        return link if key == link.key else msgspec.structs.replace(link, key=key)


def _in_key_order(ledger: Path, chosen: dict[str, int], names: _Aliases) -> Iterator[Page]:
    decoder = msgspec.json.Decoder(LedgerRow)
    with ledger.open("rb") as file:
        for key in sorted(chosen):
            file.seek(chosen[key])
            page = decoder.decode(file.readline()).page
            assert page is not None
            yield msgspec.structs.replace(page, key=key, links=tuple(map(names.rename, page.links)))

"""What stands behind the tools: something that searches and returns pages, and the record that every provider answers with."""

import asyncio
import hashlib
import time
from functools import lru_cache
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from groundhop.agents.index import LocalIndex

Request = dict[str, Any]


class Found(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One search result."""

    rank: int
    url: str
    key: str = ""
    """The page's key where the provider knows it."""
    title: str = ""
    snippets: tuple[str, ...] = ()
    published: str | None = None


class TextLink(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A link [start, end) of a page's text."""

    start: int
    end: int
    url: str


class PageText(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A page as a tool shows it; `links` is empty where the text is Markdown and has them written out."""

    url: str
    title: str
    text: str
    links: tuple[TextLink, ...] = ()


class Fetched(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request brought, the same for every provider; this is what the replay store keeps."""

    provider: str
    version: str
    """Digest of a local index, or the version of a wire format."""
    request: Request
    status: int
    """HTTP status; local providers use 200 and 404."""
    fetched_at: float
    """Unix time."""
    latency_ms: float
    results: tuple[Found, ...] = ()
    page: PageText | None = None
    """None for searches, and where there is no such page or nothing to read on it."""
    note: str = ""
    """Why a request that was answered brought nothing, in words for the model."""
    raw_sha256: str = ""
    """Digest of the answer as it came over the wire."""

    @property
    def complete(self) -> bool:
        """Whether this is an answer worth keeping: a page, or a list of results, even an empty one."""
        return self.status == 200 and (self.page is not None or self.request.get("tool") == "search")


class Provider(Protocol):
    """Searches and reads pages.

    Both raise ProviderError when the service fails after retries, CredentialError when it refuses the key.
    """

    name: str
    version: str

    async def fetch(self, request: Request) -> Fetched:
        """Answer a `search_request` or `page_request`."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...


def search_request(query: str, count: int) -> Request:
    """The canonical form of a search."""
    return {"tool": "search", "query": query, "count": count}


def page_request(url: str) -> Request:
    """The canonical form of a page view."""
    return {"tool": "page", "url": url}


def request_hash(provider: str, version: str, request: Request) -> str:
    """SHA-256 (hex) of provider, version and request in canonical JSON."""
    return hashlib.sha256(msgspec.json.encode([provider, version, request], order="sorted")).hexdigest()


class LocalProvider:
    """The index on disk. A link is shown where it leads to a page of the index: others are dead ends here."""

    name = "local"

    def __init__(self, index: LocalIndex) -> None:
        self._index = index
        self.version = index.version
        self._page = lru_cache(maxsize=256)(self._read)

    async def fetch(self, request: Request) -> Fetched:
        """Answer from disk; never fails for the network's reasons."""
        return await asyncio.to_thread(self._answer, request)

    async def close(self) -> None:
        """Nothing to release."""

    def _answer(self, request: Request) -> Fetched:
        start = time.perf_counter()
        results: tuple[Found, ...] = ()
        page = None
        if request["tool"] == "search":
            hits = self._index.search(request["query"], request["count"])
            results = tuple(Found(rank=h.rank, url=h.url, key=h.key, title=h.title, snippets=(h.text,)) for h in hits)
        else:
            page = self._page(request["url"])
        return Fetched(
            provider=self.name,
            version=self.version,
            request=request,
            status=404 if request["tool"] == "page" and page is None else 200,
            fetched_at=time.time(),
            latency_ms=round((time.perf_counter() - start) * 1000, 3),
            results=results,
            page=page,
        )

    def _read(self, url: str) -> PageText | None:
        page = self._index.page(url)
        if page is None:
            return None
        inside = [link for link in page.links if link.main and link.start is not None and link.end is not None]
        known = self._index.known(sorted({link.key for link in inside if link.key != page.key}))
        links = tuple(TextLink(start=a.start or 0, end=a.end or 0, url=a.url) for a in inside if a.key in known)
        return PageText(url=page.url, title=page.title, text=page.text, links=links)

"""You.com Search and Contents.

Wire format: GET https://ydc-index.io/v1/search (query, count) and POST https://ydc-index.io/v1/contents
(urls, formats), key in `X-API-KEY`; documented at https://you.com/docs (API reference: Search, Contents).
"""

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
from msgspec import Struct

from groundhop.agents.pace import Pace
from groundhop.agents.providers import Fetched, Found, PageText, Request
from groundhop.errors import CredentialError, ProviderError
from groundhop.http_retry import retry_after_s

logger = logging.getLogger(__name__)

SEARCH_PATH = "/v1/search"
CONTENTS_PATH = "/v1/contents"
_MAX_COUNT = 100
_LONGEST_WAIT_S = 120.0
_CRAWL_TIMEOUT_S = 20


class _Result(Struct, frozen=True):
    url: str = ""
    title: str | None = None
    description: str | None = None
    snippets: tuple[str, ...] | None = None
    page_age: str | None = None


class _Results(Struct, frozen=True):
    web: tuple[_Result, ...] | None = None
    news: tuple[_Result, ...] | None = None


class _SearchAnswer(Struct, frozen=True):
    results: _Results | None = None


class _Content(Struct, frozen=True):
    url: str = ""
    title: str | None = None
    markdown: str | None = None
    html: str | None = None


class YouProvider:
    """Searches the web and reads pages through You.com, at a bounded pace and with retries."""

    name = "you"
    version = "v1"

    def __init__(
        self,
        key: str,
        *,
        url: str = "https://ydc-index.io",
        requests_per_s: float = 8.0,
        timeout_s: float = 30.0,
        attempts: int = 5,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        if not key:
            raise CredentialError("no You.com key: set the variable that search.you_key_env names")
        self._key = key
        self._url = url.rstrip("/")
        self._timeout = httpx.Timeout(timeout_s)
        self._attempts = attempts
        self._sleep = sleep
        self._pace = Pace(requests_per_s, sleep=sleep)
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def fetch(self, request: Request) -> Fetched:
        """Answer a search or page request.

        Raises: CredentialError for 401, 402 (out of credit) and 403; ProviderError when retries do not help.
        """
        start = time.perf_counter()
        is_search = request["tool"] == "search"
        response = await (self._search(request) if is_search else self._contents(request))
        fetched = Fetched(
            provider=self.name,
            version=self.version,
            request=request,
            status=response.status_code,
            fetched_at=time.time(),
            latency_ms=round((time.perf_counter() - start) * 1000, 3),
            raw_sha256=hashlib.sha256(response.content).hexdigest(),
        )
        if response.status_code != 200:
            return msgspec.structs.replace(fetched, note="the service cannot take this request: change it")
        if is_search:
            return msgspec.structs.replace(fetched, results=_read_results(response.content, request["count"]))
        page = _read_page(response.content, request["url"])
        return msgspec.structs.replace(
            fetched, page=page, note="" if page else "this page could not be read; try another one"
        )

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None and self._loop is asyncio.get_running_loop():
            await self._client.aclose()
        self._client = None

    async def _search(self, request: Request) -> httpx.Response:
        count = max(1, min(_MAX_COUNT, request["count"]))
        return await self._send("GET", SEARCH_PATH, params={"query": request["query"], "count": count})

    async def _contents(self, request: Request) -> httpx.Response:
        body = {"urls": [request["url"]], "formats": ["markdown"], "crawl_timeout": _CRAWL_TIMEOUT_S}
        return await self._send("POST", CONTENTS_PATH, json=body)

    async def _send(self, method: str, path: str, **parts: Any) -> httpx.Response:
        last = ""
        for attempt in range(self._attempts):
            await self._pace.wait()
            wait = 0.5 * 2**attempt
            try:
                response = await self._open().request(method, self._url + path, **parts)
            except httpx.RequestError as error:
                last = f"{path}: {type(error).__name__} {error}"
            else:
                last = f"{path} answered {response.status_code}: {response.text[:200]}"
                if not _worth_asking_again(response, last):
                    return response
                wait = self._as_told(response, wait)
            logger.info("you.com: %s (attempt %d)", last, attempt + 1)
            if attempt + 1 < self._attempts:
                await self._sleep(min(_LONGEST_WAIT_S, wait * (1 + 0.25 * random.random())))
        raise ProviderError(f"You.com failed {self._attempts} times; the last: {last}")

    def _as_told(self, response: httpx.Response, wait: float) -> float:
        told = retry_after_s(response.headers.get("retry-after", ""), time.time())
        if told is None:
            return wait
        if response.status_code == 429:
            # All callers share the limit, so all of them wait.
            self._pace.hold(min(_LONGEST_WAIT_S, told))
        return max(wait, told)

    def _open(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            headers = {"X-API-KEY": self._key, "Accept": "application/json"}
            self._client = httpx.AsyncClient(headers=headers, timeout=self._timeout)
            self._loop = loop
        return self._client


def _worth_asking_again(response: httpx.Response, what: str) -> bool:
    """Raises: CredentialError for what no retry and no other request can help."""
    status = response.status_code
    if status in {401, 403}:
        raise CredentialError(f"You.com refuses the key: {what}")
    if status == 402:
        raise CredentialError(f"You.com: out of credit: {what}")
    if status in {408, 425, 429} or status >= 500:
        return True
    if status in {200, 400, 404, 422}:
        return False
    raise ProviderError(f"You.com: {what}")


def _read_results(body: bytes, count: int) -> tuple[Found, ...]:
    try:
        results = msgspec.json.decode(body, type=_SearchAnswer).results or _Results()
    except msgspec.MsgspecError as error:
        raise ProviderError(f"You.com search answered something else: {error}: {body[:200]!r}") from error
    found = [r for r in (*(results.web or ()), *(results.news or ())) if r.url][:count]
    return tuple(
        Found(
            rank=rank,
            url=r.url,
            title=r.title or "",
            snippets=tuple(s for s in (r.snippets or ()) if s.strip()) or ((r.description,) if r.description else ()),
            published=r.page_age,
        )
        for rank, r in enumerate(found, start=1)
    )


def _read_page(body: bytes, url: str) -> PageText | None:
    """The page, or None where the service answered but read nothing: that is no page without text."""
    try:
        contents = msgspec.json.decode(body, type=tuple[_Content, ...]) if body.strip() else ()
    except msgspec.MsgspecError as error:
        raise ProviderError(f"You.com contents answered something else: {error}: {body[:200]!r}") from error
    content = contents[0] if contents else _Content()
    text = (content.markdown or "").strip()
    return PageText(url=content.url or url, title=content.title or "", text=text) if text else None

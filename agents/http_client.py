"""Ask one of several equal servers over HTTP until one answers: other replica on a dead one, waiting as told when busy."""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import httpx
import msgspec

from groundhop.errors import CredentialError, ServerError
from groundhop.http_retry import retry_after_s

logger = logging.getLogger(__name__)

_LONGEST_WAIT_S = 60.0


class RequestError(ServerError):
    """The server understood and refused: asking again would bring the same."""

    def __init__(self, message: str, status: int = 0, body: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.body = body


class ReplicaClient:
    """POSTs JSON to replicas. May be used from one event loop after another."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        headers: Mapping[str, str] | None = None,
        attempts: int = 6,
        timeout_s: float = 600.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        if not urls:
            raise ServerError("need the address of at least one server, got none")
        self._urls = [url.rstrip("/") for url in urls]
        self._headers = dict(headers or {})
        self._attempts = attempts
        self._sleep = sleep
        self._timeout = httpx.Timeout(timeout_s, connect=10.0)
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def replicas(self) -> int:
        """How many servers there are."""
        return len(self._urls)

    async def post(self, path: str, body: Any, *, replica: int) -> bytes:
        """POST to `replica` (modulo their number), to the next one after each failure.

        Raises: RequestError for a 4xx other than 408, 425 and 429; CredentialError for 401 and 403; ServerError when
        no attempt was answered.
        """
        packed = msgspec.json.encode(body)
        last = ""
        for attempt in range(self._attempts):
            url = self._urls[replica % len(self._urls)] + path
            wait = 0.0
            try:
                response = await self._open().post(url, content=packed, headers={"Content-Type": "application/json"})
                if response.status_code < 300:
                    return response.content
                last = f"{url} answered {response.status_code}: {response.text[:300]}"
                wait = _raise_or_wait(response, last)
            except httpx.RequestError as error:
                last = f"{url}: {type(error).__name__} {error}"
            replica += 1
            # The other replicas are tried at once before anybody waits.
            if wait or (attempt + 1) % len(self._urls) == 0:
                wait = max(wait, 0.25 * 2 ** (attempt // len(self._urls)))
            logger.debug("attempt %d: %s; next in %.1f s", attempt + 1, last, wait)
            if attempt + 1 < self._attempts:
                await self._sleep(min(_LONGEST_WAIT_S, wait * (1 + 0.25 * random.random())))
        raise ServerError(f"no answer after {self._attempts} attempts; the last: {last}")

    async def close(self) -> None:
        """Close the connections of this event loop."""
        if self._client is not None and self._loop is asyncio.get_running_loop():
            await self._client.aclose()
        self._client = None

    def _open(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            limits = httpx.Limits(max_connections=1024, max_keepalive_connections=256)
            self._client = httpx.AsyncClient(
                headers=self._headers, timeout=self._timeout, limits=limits, trust_env=False
            )
            self._loop = loop
        return self._client


def _raise_or_wait(response: httpx.Response, what: str) -> float:
    status = response.status_code
    if status in {401, 403}:
        raise CredentialError(f"the server refuses our key: {what}")
    if status >= 500 or status in {408, 425, 429}:
        header = response.headers.get("retry-after", "")
        return retry_after_s(header, time.time()) or 0.0
    raise RequestError(what, status, response.text)

"""Ask Common Crawl's servers: one request at a time, as slowly as they ask, never into a private network.

The index server is under constant load and blocks who does not slow down at 503
(https://github.com/commoncrawl/cc-index-server/issues/15); the data server answers 503 SlowDown.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import httpcore
import httpx

from groundhop.http_retry import retry_after_s
from groundhop.pipeline.fetch import Failed, PrivateAddressError, guarded_transport

T = TypeVar("T")

ATTEMPTS = 6
BASE_S = 5.0
"""Wait after the first failed try; doubled after each further one."""
MAX_WAIT_S = 900.0
"""A server that asks for a longer pause is not asked again by this run."""
MAX_SECONDS = 300.0
_TEMPORARY = frozenset((408, 425, 429, 500, 502, 503, 504))


@dataclass(slots=True)
class Response:
    """An answer whose body was not read yet."""

    status: int
    headers: httpx.Headers
    _stream: httpx.AsyncByteStream

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes over the wire, content codings and all."""
        async for piece in self._stream:
            yield piece


@dataclass(slots=True)
class Client:
    """Sends one request at a time. Use as `async with`."""

    user_agent: str
    allow_private: bool = False
    attempts: int = ATTEMPTS
    base_s: float = BASE_S
    max_seconds: float = MAX_SECONDS
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _transport: httpx.AsyncHTTPTransport = field(init=False)
    _one: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    _free: dict[str, float] = field(init=False, default_factory=dict)
    """When each server may be asked again."""

    def __post_init__(self) -> None:
        self._transport = guarded_transport(self.allow_private, max_connections=1)

    async def __aenter__(self) -> "Client":
        await self._transport.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._transport.__aexit__(None, None, None)

    async def ask(
        self,
        url: str,
        read: Callable[[Response], Awaitable[T | Failed]],
        *,
        headers: Mapping[str, str] | None = None,
        pace_s: float = 0.0,
    ) -> T | Failed:
        """Send GET, let `read` take what it wants of the answer, and try again while that fails for the time being.

        `pace_s` is the least time between two requests to this server. Never raises for what a server does.
        """
        async with self._one:
            for attempt in range(1, self.attempts + 1):
                await self._wait_turn(url)
                got = await self._once(url, read, headers or {})
                self._free[_server(url)] = time.monotonic() + pace_s
                if not (isinstance(got, Failed) and got.temporary):
                    return got
                wait = max(got.retry_after_s or 0.0, self.base_s * 2 ** (attempt - 1))
                if attempt == self.attempts or (got.retry_after_s or 0.0) > MAX_WAIT_S:
                    return got
                await self.sleep(min(wait, MAX_WAIT_S))
        raise AssertionError("unreachable")

    async def _wait_turn(self, url: str) -> None:
        wait = self._free.get(_server(url), 0.0) - time.monotonic()
        if wait > 0:
            await self.sleep(wait)

    async def _once(
        self, url: str, read: Callable[[Response], Awaitable[T | Failed]], headers: Mapping[str, str]
    ) -> T | Failed:
        try:
            async with asyncio.timeout(self.max_seconds):
                return await self._send(url, read, headers)
        except TimeoutError:
            return Failed("timeout", f"no end after {self.max_seconds:g} s", temporary=True)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpcore.RemoteProtocolError, httpcore.ReadError) as error:
            return Failed("cut_body", f"{type(error).__name__}: {error}", temporary=True)
        except (httpx.TransportError, httpcore.NetworkError, httpcore.TimeoutException, OSError) as error:
            cause = error if isinstance(error, PrivateAddressError) else error.__cause__
            if isinstance(cause, PrivateAddressError):
                return Failed("private_address", str(cause))
            return Failed("unreachable", f"{type(error).__name__}: {error}", temporary=True)
        except (httpx.InvalidURL, UnicodeError) as error:
            return Failed("bad_url", f"{url}: {error}")

    async def _send(
        self, url: str, read: Callable[[Response], Awaitable[T | Failed]], headers: Mapping[str, str]
    ) -> T | Failed:
        # Offsets are those of the file as it is stored, so nothing may be packed on the way.
        about = {"User-Agent": self.user_agent, "Accept": "*/*", "Accept-Encoding": "identity", **headers}
        limits = {"connect": 20.0, "read": self.max_seconds, "write": 20.0, "pool": self.max_seconds}
        request = httpx.Request("GET", url, headers=about, extensions={"timeout": limits})
        response = await self._transport.handle_async_request(request)
        try:
            if response.status_code in _TEMPORARY:
                wait = retry_after_s(response.headers.get("retry-after", ""), time.time())
                return Failed("status", str(response.status_code), temporary=True, retry_after_s=wait)
            stream = response.stream
            assert isinstance(stream, httpx.AsyncByteStream)
            return await read(Response(response.status_code, response.headers, stream))
        finally:
            await response.aclose()


def _server(url: str) -> str:
    return url.partition("://")[2].partition("/")[0]

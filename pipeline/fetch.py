"""Fetch one address safely: bounded in size, time and redirects, and never into a private network."""

import asyncio
import io
import ipaddress
import logging
import socket
import time
import zlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import brotli
import httpcore
import httpx
import zstandard

from groundhop.http_retry import retry_after_s
from groundhop.pipeline.urls import resolve

logger = logging.getLogger(__name__)

MAX_REDIRECTS = 10
MAX_SECONDS = 30.0
"""For one address with all its redirects; a body that drips for ever ends here."""
_TEMPORARY = frozenset((408, 425, 429, 500, 502, 503, 504))
_PIECE = 1 << 16
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class Answer:
    """A response, its body decoded, and the redirects that led to it."""

    url: str
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    redirects: tuple[tuple[str, int, str], ...] = ()
    """Address, status and target of each redirect on the way."""

    def header(self, name: str) -> str | None:
        """The first header of that name, case aside."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)


@dataclass(frozen=True, slots=True)
class Failed:
    """Why there is no response."""

    reason: str
    """`too_large`, `timeout`, `redirect_loop`, `bad_redirect`, `private_address`, `forbidden`, `not_html`, `status`,
    `bad_body`, `unreachable`, `robots_unreachable`."""
    detail: str = ""
    temporary: bool = False
    """Whether asking again later may help."""
    retry_after_s: float | None = None
    redirects: tuple[tuple[str, int, str], ...] = ()


class TooLargeError(ValueError):
    """A body decodes to more than the limit."""


class PrivateAddressError(httpcore.ConnectError):
    """A host's address is not on the public internet."""


def is_public(address: str) -> bool:
    """Whether an IP address lies on the public internet; IPv4 addresses inside IPv6 ones are looked at themselves."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast


class GuardedNetwork(httpcore.AsyncNetworkBackend):
    """Resolves a name once, refuses private addresses, and connects to the address that it looked at."""

    def __init__(self, allow_private: bool) -> None:
        self._allow_private = allow_private
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect. Raises: PrivateAddressError, httpcore.ConnectError, httpcore.ConnectTimeout."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"no address for {host}: {error}") from error
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        usable = [a for a in addresses if self._allow_private or is_public(a)]
        if not usable:
            raise PrivateAddressError(f"{host} is at {', '.join(addresses)}")
        for place, address in enumerate(usable):
            try:
                return await self._inner.connect_tcp(  # pyright: ignore[reportAttributeAccessIssue] - an optional import
                    address, port, timeout, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if place == len(usable) - 1:
                    raise
        raise AssertionError("unreachable")

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.AsyncNetworkStream:
        """Refuse: pages do not lie behind sockets in the file system."""
        raise httpcore.ConnectError(f"no socket files: {path}")

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)


def decode_body(wire: bytes, coding: str, limit: int) -> bytes:
    """Undo the content codings of a whole body, last one first, never making more than `limit` bytes of it.

    A body that is not in the coding it claims is taken as it is, as servers exist that decode and forget to say so.
    Raises: TooLargeError; ValueError for a damaged body or a coding that is not known.
    """
    for name in reversed([part.strip().lower() for part in coding.split(",") if part.strip()]):
        if name in ("gzip", "x-gzip"):
            wire = _gunzip(wire, limit) if wire.startswith(b"\x1f\x8b") else wire
        elif name == "deflate":
            wire = _inflate(wire, limit)
        elif name == "br":
            wire = _unbrotli(wire, limit)
        elif name == "zstd":
            wire = _unzstd(wire, limit) if wire.startswith(b"\x28\xb5\x2f\xfd") else wire
        elif name != "identity":
            raise ValueError(f"unknown content coding {name!r}")
    if len(wire) > limit:
        raise TooLargeError(f"more than {limit} bytes")
    return wire


def _unzip(wire: bytes, window: int, limit: int) -> tuple[bytes, bytes]:
    unpacker = zlib.decompressobj(window)
    try:
        out = unpacker.decompress(wire, limit + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(out) > limit:
        raise TooLargeError(f"more than {limit} bytes")
    if not unpacker.eof:
        raise ValueError("the packed body ends early")
    return out, unpacker.unused_data


def _gunzip(wire: bytes, limit: int) -> bytes:
    out = bytearray()
    while wire.startswith(b"\x1f\x8b"):
        piece, wire = _unzip(wire, 31, limit - len(out))
        out += piece
    return bytes(out)


def _inflate(wire: bytes, limit: int) -> bytes:
    try:
        return _unzip(wire, 15, limit)[0]
    except TooLargeError:
        raise
    except ValueError:
        # Some servers send the bare stream without zlib's header.
        return _unzip(wire, -15, limit)[0]


def _unbrotli(wire: bytes, limit: int) -> bytes:
    unpacker, out = brotli.Decompressor(), bytearray()
    try:
        out += unpacker.process(wire, output_buffer_limit=_PIECE)
        while len(out) <= limit and not unpacker.is_finished():
            more = unpacker.process(b"", output_buffer_limit=_PIECE)
            if not more:
                raise ValueError("the packed body ends early")
            out += more
    except brotli.error as error:
        raise ValueError(str(error)) from error
    if len(out) > limit:
        raise TooLargeError(f"more than {limit} bytes")
    return bytes(out)


def _unzstd(wire: bytes, limit: int) -> bytes:
    # The window is what a frame makes the reader allocate: 8 MiB is what browsers grant (RFC 9659).
    unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 23)
    out = bytearray()
    try:
        with unpacker.stream_reader(io.BytesIO(wire), read_across_frames=True) as reader:
            while len(out) <= limit and (piece := reader.read(_PIECE)):
                out += piece
        if len(out) <= limit and not _ends_whole(unpacker, wire):
            raise ValueError("the packed body ends early")
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    if len(out) > limit:
        raise TooLargeError(f"more than {limit} bytes")
    return bytes(out)


def _ends_whole(unpacker: zstandard.ZstdDecompressor, wire: bytes) -> bool:
    """Whether the last frame is complete, which the bounded reader does not tell. Only for bodies known to be small."""
    whole = True
    while wire:
        frame = unpacker.decompressobj()
        frame.decompress(wire)
        whole, wire = frame.eof, frame.unused_data
    return whole


def guarded_transport(allow_private: bool, max_connections: int = 64) -> httpx.AsyncHTTPTransport:
    """A pool of connections that refuses private addresses unless told otherwise."""
    # Never through a proxy of the environment: it would resolve names where they cannot be looked at.
    transport = httpx.AsyncHTTPTransport(trust_env=False)
    transport._pool = httpcore.AsyncConnectionPool(
        ssl_context=httpx.create_ssl_context(trust_env=False),
        network_backend=GuardedNetwork(allow_private),
        max_connections=max_connections,
        keepalive_expiry=5.0,
    )
    return transport


async def _anything(_: str) -> Failed | None:
    return None


@dataclass(slots=True)
class Fetcher:
    """Fetches addresses over one pool of connections. Use as `async with`."""

    user_agent: str
    max_bytes: int
    allow_private: bool = False
    max_seconds: float = MAX_SECONDS
    _transport: httpx.AsyncHTTPTransport = field(init=False)

    def __post_init__(self) -> None:
        self._transport = guarded_transport(self.allow_private)

    async def __aenter__(self) -> "Fetcher":
        await self._transport.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._transport.__aexit__(None, None, None)

    async def fetch(
        self,
        url: str,
        *,
        may: Callable[[str], Awaitable[Failed | None]] = _anything,
        accept: Callable[[str], bool] | None = None,
    ) -> Answer | Failed:
        """Fetch `url` as it is written, following redirects by hand.

        `may` is asked before each redirect is followed and refuses by returning why; `accept` is told the content
        type of a good answer before its body is read. Never raises for what a server does.
        """
        hops: list[tuple[str, int, str]] = []
        try:
            async with asyncio.timeout(self.max_seconds):
                return await self._follow(url, may, accept, hops)
        except TimeoutError:
            return Failed("timeout", f"no end after {self.max_seconds:g} s", temporary=True, redirects=tuple(hops))

    async def _follow(
        self,
        url: str,
        may: Callable[[str], Awaitable[Failed | None]],
        accept: Callable[[str], bool] | None,
        hops: list[tuple[str, int, str]],
    ) -> Answer | Failed:
        cookies = httpx.Cookies()
        # A redirect to where we were is a loop only if nothing changed: sites redirect once to see a cookie come back.
        seen = {(url, "")}
        while True:
            got = await self._once(url, cookies, accept)
            if isinstance(got, Failed) or not (300 <= got.status < 400 and got.header("location")):
                return _with_hops(got, hops)
            target = resolve(url, got.header("location") or "")
            if target is None:
                return Failed("bad_redirect", f"{url} leads to {got.header('location')}", redirects=tuple(hops))
            hops.append((url, got.status, target))
            state = (target, "; ".join(sorted(f"{c.name}={c.value}" for c in cookies.jar)))
            if state in seen or len(hops) > MAX_REDIRECTS:
                return Failed("redirect_loop", f"{len(hops)} redirects, the last to {target}")
            seen.add(state)
            if (refusal := await may(target)) is not None:
                return _with_hops(refusal, hops)
            url = target

    async def _once(self, url: str, cookies: httpx.Cookies, accept: Callable[[str], bool] | None) -> Answer | Failed:
        try:
            return await self._ask(url, cookies, accept)
        except TooLargeError as error:
            return Failed("too_large", str(error))
        except PrivateAddressError as error:
            return Failed("private_address", str(error))
        except (
            httpx.TransportError,
            httpcore.NetworkError,
            httpcore.TimeoutException,
            httpcore.ProtocolError,
            OSError,
        ) as error:
            if isinstance(error.__cause__, PrivateAddressError):
                return Failed("private_address", str(error.__cause__))
            return Failed("unreachable", f"{type(error).__name__}: {error}", temporary=True)
        except (ValueError, httpx.InvalidURL, UnicodeError) as error:
            return Failed("bad_body", f"{type(error).__name__}: {error}")

    async def _ask(self, url: str, cookies: httpx.Cookies, accept: Callable[[str], bool] | None) -> Answer | Failed:
        request = self._request(url, cookies)
        response = await self._transport.handle_async_request(request)
        try:
            response.request = request
            cookies.extract_cookies(response)
            headers = tuple((k, v) for k, v in response.headers.multi_items())
            status = response.status_code
            if status in _TEMPORARY:
                wait = retry_after_s(response.headers.get("retry-after", ""), time.time())
                return Failed("status", str(status), temporary=True, retry_after_s=wait)
            if 300 <= status < 400:
                return Answer(url, status, headers, b"")
            kind = response.headers.get("content-type", "")
            if accept is not None and status == 200 and not accept(kind):
                return Failed("not_html", kind)
            wire = bytearray()
            async for piece in response.stream:  # type: ignore[union-attr]
                wire += piece
                if len(wire) > self.max_bytes:
                    raise TooLargeError(f"more than {self.max_bytes} bytes on the wire")
            body = decode_body(bytes(wire), response.headers.get("content-encoding", ""), self.max_bytes)
            return Answer(url, status, headers, body)
        finally:
            await response.aclose()

    def _request(self, url: str, cookies: httpx.Cookies) -> httpx.Request:
        headers = {
            "User-Agent": self.user_agent,
            "Accept": "text/html,application/xhtml+xml;q=0.9,*/*;q=0.1",
            "Accept-Encoding": "gzip, deflate, br, zstd",
        }
        parts = urlsplit(url)
        target = (parts.path or "/") + (f"?{parts.query}" if "?" in url.partition("#")[0] else "")
        # The target goes out byte for byte as it was found: another spelling may be another page.
        limits = {"connect": 10.0, "read": self.max_seconds, "write": 10.0, "pool": self.max_seconds}
        request = httpx.Request(
            "GET", url, headers=headers, extensions={"target": target.encode("ascii", "replace"), "timeout": limits}
        )
        cookies.set_cookie_header(request)
        return request


def _with_hops(got: Answer | Failed, hops: list[tuple[str, int, str]]) -> Answer | Failed:
    from dataclasses import replace

    return replace(got, redirects=tuple(hops)) if hops else got

"""Read one WARC record of a large file on a server, and refuse everything that is not exactly the record asked for."""

import re
import zlib

from groundhop.pipeline.commoncrawl.captures import Capture
from groundhop.pipeline.commoncrawl.client import Client, Response
from groundhop.pipeline.fetch import Failed
from groundhop.pipeline.urls import url_key
from groundhop.pipeline.warc import Damaged, Stored, record_from
from groundhop.records import WarcPointer

MAX_SKIP = 256 << 20
"""Bytes that are read and thrown away, at most, where a server ignores Range."""
_CONTENT_RANGE = re.compile(r"bytes\s+(\d+)-(\d+)/(?:\d+|\*)", re.IGNORECASE)


async def read_range(client: Client, url: str, offset: int, length: int, *, max_skip: int = MAX_SKIP) -> bytes | Failed:
    """The bytes `offset` to `offset + length - 1` of a file as it is stored, whether the server knows Range or not.

    Failures beside the client's: `wrong_range`, `range_ignored`, `wrong_length`, `status`.
    """

    async def read(response: Response) -> bytes | Failed:
        if response.status == 206:
            return await _read_part(response, offset, length)
        if response.status == 200:
            return await _read_whole(response, offset, length, max_skip)
        reason = "wrong_range" if response.status == 416 else "status"
        return Failed(reason, str(response.status))

    return await client.ask(url, read, headers={"Range": f"bytes={offset}-{offset + length - 1}"})


async def _read_part(response: Response, offset: int, length: int) -> bytes | Failed:
    told = response.headers.get("content-range", "")
    found = _CONTENT_RANGE.fullmatch(told.strip())
    if found is None or int(found[1]) != offset or int(found[2]) != offset + length - 1:
        return Failed("wrong_range", f"asked for {offset}-{offset + length - 1}, got {told!r}")
    return await _exactly(response, 0, length, beyond=False)


async def _read_whole(response: Response, offset: int, length: int, max_skip: int) -> bytes | Failed:
    if offset > max_skip:
        return Failed("range_ignored", f"the server sends the whole file, the record begins at {offset}")
    return await _exactly(response, offset, length, beyond=True)


async def _exactly(response: Response, skip: int, length: int, *, beyond: bool) -> bytes | Failed:
    """`length` bytes after `skip`; `beyond` says whether more may follow them."""
    out, skipped = bytearray(), 0
    async for piece in response.pieces():
        drop = min(len(piece), skip - skipped)
        skipped += drop
        out += piece[drop:]
        if beyond and len(out) >= length:
            return bytes(out[:length])
        if len(out) > length:
            return Failed("wrong_length", f"more than the {length} bytes that were asked for", temporary=True)
    if len(out) != length:
        return Failed("wrong_length", f"{len(out)} of {length} bytes, {skipped} before them", temporary=True)
    return bytes(out)


def record_of(raw: bytes, capture: Capture, max_bytes: int) -> Stored | Damaged:
    """The page in the bytes of a capture, which must be one gzip member that holds one response and nothing else.

    Reasons: `damaged`, `truncated`, `wrong_length`, `too_large`, `revisit_unresolved`, `wrong_record` (of another
    address or another content than the index says).
    """
    plain = _unpack(raw, capture, max_bytes)
    if isinstance(plain, Damaged):
        return plain
    head, mark, rest = plain.partition(b"\r\n\r\n")
    headers = _headers(head)
    told = headers.get("content-length", "")
    if not mark or not head.startswith(b"WARC/") or not told.isdigit():
        return Damaged(capture.url, "damaged", "no WARC record at this place")
    if len(rest) < int(told):
        return Damaged(capture.url, "truncated", f"the record holds {len(rest)} of {told} bytes")
    if rest[int(told) :].strip(b"\r\n"):
        # A block that goes on behind its length would be a page cut short.
        return Damaged(capture.url, "wrong_length", f"{len(rest) - int(told)} bytes behind a block of {told}")
    kind, url = headers.get("warc-type", ""), headers.get("warc-target-uri", "").strip("<>")
    digest = headers.get("warc-payload-digest", "").removeprefix("sha1:")
    if kind == "revisit":
        return Damaged(capture.url, "revisit_unresolved", f"refers to {headers.get('warc-refers-to-target-uri', '')}")
    if kind != "response":
        return Damaged(capture.url, "damaged", f"a record of type {kind or 'none'}, need a response")
    if url != capture.url and url_key(url) != url_key(capture.url):
        return Damaged(capture.url, "wrong_record", f"the record is of {url or 'no address'}")
    if capture.digest and digest and digest != capture.digest:
        return Damaged(capture.url, "wrong_record", f"digest {digest}, the index has {capture.digest}")
    if cut := headers.get("warc-truncated"):
        return Damaged(capture.url, "truncated", f"the crawler stopped for {cut}")
    pointer = WarcPointer(file=capture.filename, offset=capture.offset, length=capture.length)
    return record_from(plain, pointer, max_bytes)


def _unpack(raw: bytes, capture: Capture, max_bytes: int) -> bytes | Damaged:
    unpacker = zlib.decompressobj(31)
    limit = 2 * max_bytes + (1 << 20)
    try:
        plain = unpacker.decompress(raw, limit)
    except zlib.error as error:
        return Damaged(capture.url, "damaged", f"no gzip member at this place: {error}")
    if not unpacker.eof:
        if len(plain) >= limit:
            return Damaged(capture.url, "too_large", f"unpacks to more than {limit} bytes")
        return Damaged(capture.url, "truncated", f"the gzip member goes on behind its {capture.length} bytes")
    if unpacker.unused_data:
        return Damaged(capture.url, "wrong_length", f"{len(unpacker.unused_data)} bytes behind the gzip member")
    return plain


def _headers(head: bytes) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in head.decode("utf-8", "replace").split("\r\n")[1:]:
        name, _, value = line.partition(":")
        found.setdefault(name.strip().lower(), value.strip())
    return found

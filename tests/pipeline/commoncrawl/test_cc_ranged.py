import asyncio
import gzip
import zlib

import pytest
from tests.pipeline.commoncrawl.ccserver import (
    FILE,
    Archive,
    CommonCrawl,
    Fault,
    busy,
    chunked,
    cut,
    drop,
    html,
    ignore_range,
    part,
    served,
)

from groundhop.pipeline.commoncrawl.captures import Capture
from groundhop.pipeline.commoncrawl.client import MAX_WAIT_S, Client
from groundhop.pipeline.commoncrawl.ranged import read_range, record_of
from groundhop.pipeline.fetch import Failed
from groundhop.pipeline.warc import Damaged, Stored

PATH = f"/{FILE}"


def three() -> Archive:
    archive = Archive()
    for name in ("one", "two", "three"):
        archive.add(f"http://{name}.example/")
    return archive


def read(
    server: CommonCrawl,
    capture: Capture,
    *,
    attempts: int = 1,
    allow_private: bool = True,
    max_skip: int = 1 << 20,
    waits: list[float] | None = None,
) -> bytes | Failed:
    async def sleep(seconds: float) -> None:
        if waits is not None:
            waits.append(seconds)

    async def main() -> bytes | Failed:
        async with Client("groundhop/1", allow_private, attempts=attempts, base_s=1.0, sleep=sleep) as client:
            return await read_range(
                client, f"{server.url}/{capture.filename}", capture.offset, capture.length, max_skip=max_skip
            )

    return asyncio.run(main())


def test_the_range_asked_for_is_that_of_the_compressed_file() -> None:
    archive = three()
    with served(archive) as server:
        got = [read(server, capture) for capture in archive.captures]
    pages = [record_of(raw, capture, 10_000) for raw, capture in zip(got, archive.captures, strict=True)]  # type: ignore[arg-type]
    assert [page.body for page in pages if isinstance(page, Stored)] == [html(c.url) for c in archive.captures]
    first, second, _ = archive.captures
    assert server.ranges[1] == f"bytes={second.offset}-{second.offset + second.length - 1}"
    assert second.offset == first.offset + first.length


def with_fault(fault: Fault, number: int = 1, **options: int) -> bytes | Failed:
    archive = three()
    with served(archive) as server:
        server.always[PATH] = fault
        return read(server, archive.captures[number], **options)  # type: ignore[arg-type]


def test_a_server_that_ignores_range_gives_the_same_bytes() -> None:
    archive = three()
    second = archive.captures[1]
    assert with_fault(ignore_range) == archive.content[second.offset : second.offset + second.length]


def test_a_server_that_ignores_range_is_not_read_to_the_far_end() -> None:
    got = with_fault(ignore_range, 2, max_skip=100)
    assert isinstance(got, Failed) and (got.reason, got.temporary) == ("range_ignored", False)


def test_a_server_that_ignores_range_and_ends_early_is_a_wrong_length() -> None:
    content = three().content
    got = with_fault(lambda handler, _: ignore_range(handler, content[:-30]), 2)
    assert isinstance(got, Failed) and got.reason == "wrong_length"


def test_an_answer_in_chunks_is_put_together() -> None:
    archive = three()
    second = archive.captures[1]
    last = second.offset + second.length
    raw = archive.content[second.offset : last]
    assert with_fault(chunked(raw, f"bytes {second.offset}-{last - 1}/{len(archive.content)}")) == raw


def _told(length: int = 0) -> str:
    second = three().captures[1]
    return f"bytes {second.offset}-{second.offset + second.length - 1 + length}/99999"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (part(b"x" * 50, "bytes 0-49/99999"), "wrong_range"),
        (part(b"x" * 50, ""), "wrong_range"),
        (part(b"x" * 50, _told(1)), "wrong_range"),
        (part(b"x" * 50, _told()), "wrong_length"),
        (part(b"x" * 9000, _told()), "wrong_length"),
        (part(b"", "bytes */5", 416), "wrong_range"),
        (part(b"", "", 404), "status"),
        (part(b"", "", 302), "status"),
        (cut(b"x" * 50, 357, _told()), "cut_body"),
        (chunked(b"x" * 50, _told(), end=b""), "cut_body"),
        (drop, "cut_body"),
        (busy(503), "status"),
        (busy(429), "status"),
    ],
)
def test_each_other_answer_is_a_named_failure(fault: Fault, reason: str) -> None:
    got = with_fault(fault)
    assert isinstance(got, Failed) and got.reason == reason


def test_a_busy_server_is_asked_again_after_as_long_as_it_says() -> None:
    archive, waits = three(), list[float]()
    with served(archive) as server:
        server.faults[PATH] = [busy(503, "7"), busy(429, "30"), drop, busy(503, "soon")]
        got = read(server, archive.captures[0], attempts=6, waits=waits)
    assert isinstance(got, bytes) and waits == [7.0, 30.0, 4.0, 8.0]


def test_a_server_that_asks_for_a_very_long_pause_is_left_alone() -> None:
    archive, waits = three(), list[float]()
    with served(archive) as server:
        server.always[PATH] = busy(503, str(int(MAX_WAIT_S) + 1))
        got = read(server, archive.captures[0], attempts=6, waits=waits)
    assert isinstance(got, Failed) and got.temporary and (waits, len(server.lines)) == ([], 1)


def test_a_private_address_is_refused_without_a_request() -> None:
    archive = three()
    with served(archive) as server:
        got = read(server, archive.captures[0], allow_private=False)
    assert isinstance(got, Failed) and got.reason == "private_address" and server.lines == []


def record(archive: Archive, capture: Capture, max_bytes: int = 1_000_000) -> Stored | Damaged:
    return record_of(archive.content[capture.offset : capture.offset + capture.length], capture, max_bytes)


def reason(archive: Archive, capture: Capture, max_bytes: int = 1_000_000) -> str:
    got = record(archive, capture, max_bytes)
    return got.reason if isinstance(got, Damaged) else "page"


def chunks(body: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in (body[:9], body[9:])) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (chunks(html("x")), (("Transfer-Encoding", "chunked"),)),
        (html("x"), (("Transfer-Encoding", "chunked"),)),
        (chunks(gzip.compress(html("x"))), (("Transfer-Encoding", "chunked"), ("Content-Encoding", "gzip"))),
        (html("x"), (("X-Crawler-Content-Encoding", "gzip"), ("Content-Length", "12"))),
    ],
)
def test_a_record_gives_the_clean_body_however_it_is_framed(body: bytes, headers: tuple) -> None:
    archive = Archive()
    got = record(archive, archive.add("http://a.example/", body, headers=headers))
    assert isinstance(got, Stored) and got.body == html("x")


def test_a_record_of_another_address_or_content_is_never_taken() -> None:
    import msgspec

    archive = Archive()
    capture = archive.add("http://a.example/x")
    other = msgspec.structs.replace(capture, url="http://a.example/y")
    changed = msgspec.structs.replace(capture, digest="A" * 32)
    assert [reason(archive, c) for c in (capture, other, changed)] == ["page", "wrong_record", "wrong_record"]


@pytest.mark.parametrize(
    ("more", "expected"), [(-40, "truncated"), (-1, "truncated"), (1, "wrong_length"), (90, "wrong_length")]
)
def test_a_length_that_is_wrong_in_the_index_is_told(more: int, expected: str) -> None:
    import msgspec

    archive = three()
    first = archive.captures[0]
    assert reason(archive, msgspec.structs.replace(first, length=first.length + more)) == expected


def test_an_offset_that_is_off_by_one_is_damage() -> None:
    import msgspec

    archive = three()
    second = archive.captures[1]
    assert reason(archive, msgspec.structs.replace(second, offset=second.offset + 1)) == "damaged"


def test_a_revisit_and_a_record_cut_by_the_crawler_are_told() -> None:
    archive = Archive()
    revisit = archive.add("http://a.example/", kind="revisit")
    short = archive.add("http://b.example/", truncated="length")
    assert [reason(archive, revisit), reason(archive, short)] == ["revisit_unresolved", "truncated"]


def _member(text: bytes) -> bytes:
    return gzip.compress(text)


_HEAD = b"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: http://a.example/\r\nContent-Length: %d\r\n\r\n"
_BLOCK = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + html("x")


@pytest.mark.parametrize(
    ("member", "expected"),
    [
        (_member(_HEAD % len(_BLOCK) + _BLOCK + b"\r\n\r\n"), "page"),
        (_member(_HEAD % len(_BLOCK) + _BLOCK), "page"),
        (_member(_HEAD % (len(_BLOCK) + 1) + _BLOCK), "truncated"),
        (_member(_HEAD % (len(_BLOCK) - 30) + _BLOCK + b"\r\n\r\n"), "wrong_length"),
        (_member((_HEAD % len(_BLOCK) + _BLOCK + b"\r\n\r\n") * 2), "wrong_length"),
        (_member(b"not a record"), "damaged"),
        (_member(b""), "damaged"),
        (zlib.compress(_HEAD % len(_BLOCK) + _BLOCK), "damaged"),
        (b"<Error><Code>SlowDown</Code></Error>", "damaged"),
        (_member(_HEAD.replace(b"response", b"request") % len(_BLOCK) + _BLOCK), "damaged"),
    ],
)
def test_a_member_must_hold_one_whole_response(member: bytes, expected: str) -> None:
    archive = Archive()
    capture = archive.add_raw("http://a.example/", member)
    assert reason(archive, capture) == expected


def test_a_spoilt_byte_is_damage() -> None:
    archive = three()
    first = archive.captures[0]
    raw = bytearray(archive.content[first.offset : first.offset + first.length])
    raw[len(raw) // 2] ^= 0x55
    got = record_of(bytes(raw), first, 1_000_000)
    assert isinstance(got, Damaged) and got.reason in ("damaged", "truncated", "wrong_length")


def test_a_bomb_is_refused_before_it_unfolds() -> None:
    archive = Archive()
    bomb = archive.add_raw("http://a.example/", gzip.compress(_HEAD % 30_000_000 + bytes(30_000_000)))
    packed = archive.add("http://b.example/", gzip.compress(bytes(3_000_000)), headers=(("Content-Encoding", "gzip"),))
    assert [reason(archive, bomb, 1_000_000), reason(archive, packed, 1_000_000)] == ["too_large", "too_large"]

import asyncio
import gzip
import zlib
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import brotli
import pytest
import zstandard
from tests.pipeline.web import Pages, Reply, Web, html, redirect, serve

from groundhop.pipeline.fetch import Answer, Failed, Fetcher, TooLargeError, decode_body, is_public

TEXT = b"<p>hay and straw</p>" * 50
PACKERS = {"gzip": gzip.compress, "deflate": zlib.compress, "br": brotli.compress, "zstd": zstandard.compress}


def fetch(
    web: Web, *paths: str, max_bytes: int = 1_000_000, allow_private: bool = True, max_seconds: float = 20.0
) -> list[Answer | Failed]:
    async def main() -> list[Answer | Failed]:
        async with Fetcher("groundhop/1", max_bytes, allow_private, max_seconds) as fetcher:
            return [await fetcher.fetch(p if "://" in p else web.url + p) for p in paths]

    return asyncio.run(main())


def one(pages: Pages, path: str, **options: float | bool) -> Answer | Failed:
    with serve(pages) as web:
        return fetch(web, path, **options)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("coding", PACKERS)
def test_each_content_coding_is_undone(coding: str) -> None:
    assert decode_body(PACKERS[coding](TEXT), coding.upper(), 10_000) == TEXT


def test_codings_on_top_of_each_other_are_undone_from_the_last() -> None:
    assert decode_body(brotli.compress(gzip.compress(TEXT)), "gzip, br", 10_000) == TEXT


def test_gzip_of_two_members_and_bare_deflate_are_read() -> None:
    packer = zlib.compressobj(wbits=-15)
    bare = packer.compress(TEXT) + packer.flush()
    assert (decode_body(gzip.compress(TEXT) * 2, "gzip", 10_000), decode_body(bare, "deflate", 10_000)) == (
        TEXT * 2,
        TEXT,
    )


@pytest.mark.parametrize("coding", ["gzip", "zstd", "identity", ""])
def test_a_body_that_only_claims_to_be_packed_is_taken_as_it_is(coding: str) -> None:
    assert decode_body(TEXT, coding, 10_000) == TEXT


@pytest.mark.parametrize("coding", PACKERS)
def test_a_body_of_just_the_limit_is_taken_and_one_byte_more_is_not(coding: str) -> None:
    packed = PACKERS[coding](TEXT)
    assert decode_body(packed, coding, len(TEXT)) == TEXT
    with pytest.raises(TooLargeError):
        decode_body(packed, coding, len(TEXT) - 1)


@pytest.mark.parametrize("coding", PACKERS)
def test_a_bomb_is_refused_before_it_unfolds(coding: str) -> None:
    bomb = PACKERS[coding](bytes(64 << 20))
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak_mb()
    with pytest.raises(TooLargeError):
        decode_body(bomb, coding, 1_000_000)
    assert _peak_mb() - before < 24


def _peak_mb() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) // 1024


@pytest.mark.parametrize("coding", PACKERS)
def test_a_cut_body_is_an_error_not_half_a_page(coding: str) -> None:
    with pytest.raises(ValueError):
        decode_body(PACKERS[coding](TEXT * 40 + bytes(range(256)))[:-9], coding, 100_000)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("192.168.7.7", False),
        ("172.16.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:93.184.216.34", True),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
    ],
)
def test_only_public_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(address) is public


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "2130706433", "0x7f.1"])
def test_private_hosts_are_refused_by_whatever_name(host: str) -> None:
    with serve({"/": html("inside")}) as web:
        (got,) = fetch(web, web.url.replace("127.0.0.1", host) + "/", allow_private=False)
    assert isinstance(got, Failed) and got.reason == "private_address" and web.lines == []


@pytest.mark.parametrize(
    "path", ["/x?wsdl", "/i.php?/topic/5/&do=find", "/p;v=1?q=a+b", "/a//b", "/a?b=2&a=1", "/c%2Fd%7e", "/e?"]
)
def test_the_request_line_is_the_address_as_it_was_found(path: str) -> None:
    with serve({}) as web:
        fetch(web, path)
    assert web.lines == [path]


def test_a_loop_stops_and_is_permanent() -> None:
    pages: Pages = {"/a": redirect("/b"), "/b": redirect("/a"), "/c%2C": redirect("/c%2c"), "/c%2c": redirect("/c%2C")}
    with serve(pages) as web:
        got = fetch(web, "/a", "/c%2C")
    assert [(g.reason, g.temporary) for g in got if isinstance(g, Failed)] == [("redirect_loop", False)] * 2 and len(
        web.lines
    ) < 8


def test_an_endless_row_of_redirects_stops() -> None:
    with serve({f"/{n}": redirect(f"/{n + 1}") for n in range(99)}) as web:
        (got,) = fetch(web, "/0")
    assert isinstance(got, Failed) and got.reason == "redirect_loop" and len(web.lines) < 15


def test_a_redirect_to_itself_that_sets_a_cookie_is_no_loop() -> None:
    def wall(handler: BaseHTTPRequestHandler, _: int) -> Reply:
        return (
            html("in")
            if "been=1" in (handler.headers.get("Cookie") or "")
            else redirect("/wall", Set_Cookie="been=1; Path=/")
        )

    got = one({"/wall": wall}, "/wall")
    assert isinstance(got, Answer) and got.body == b"in" and len(got.redirects) == 1


def test_cookies_do_not_reach_the_next_fetch() -> None:
    cookies: list[str | None] = []

    def page(handler: BaseHTTPRequestHandler, _: int) -> Reply:
        cookies.append(handler.headers.get("Cookie"))
        return Reply(b"x", 200, (("Set-Cookie", "a=1"),))

    with serve({"/x": page}) as web:
        fetch(web, "/x", "/x")
    assert cookies == [None, None]


@pytest.mark.parametrize("target", ["javascript:1", "file:///etc/passwd", "http://", "ftp://f.example/"])
def test_a_redirect_to_no_web_page_is_refused(target: str) -> None:
    got = one({"/r": redirect(target)}, "/r")
    assert isinstance(got, Failed) and (got.reason, got.temporary) == ("bad_redirect", False)


def test_a_bomb_over_the_wire_is_refused_and_the_next_page_comes() -> None:
    bomb = Reply(gzip.compress(bytes(8_000_000)), 200, (("Content-Encoding", "gzip"),))
    with serve({"/bomb": bomb, "/ok": html("ok")}) as web:
        first, second = fetch(web, "/bomb", "/ok")
    assert isinstance(first, Failed) and first.reason == "too_large" and isinstance(second, Answer)


def _endless(handler: BaseHTTPRequestHandler, _: int) -> None:
    handler.send_response_only(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    try:
        while True:
            handler.wfile.write(b"400\r\n" + b"x" * 1024 + b"\r\n")
    except OSError:
        return


def test_a_body_without_end_stops_at_the_size_limit() -> None:
    got = one({"/endless": _endless}, "/endless", max_bytes=50_000)
    assert isinstance(got, Failed) and (got.reason, got.temporary) == ("too_large", False)


def test_a_body_without_end_stops_at_the_time_limit() -> None:
    got = one({"/endless": _endless}, "/endless", max_bytes=10**12, max_seconds=0.3)
    assert isinstance(got, Failed) and (got.reason, got.temporary) == ("timeout", True)


@pytest.mark.parametrize(("status", "header", "wait"), [(429, "7", 7.0), (503, "soon", None), (500, "", None)])
def test_server_trouble_is_temporary_and_says_how_long(status: int, header: str, wait: float | None) -> None:
    got = one({"/x": Reply(b"", status, (("Retry-After", header),))}, "/x")
    assert isinstance(got, Failed) and (got.reason, got.temporary, got.retry_after_s) == ("status", True, wait)


def test_a_dropped_connection_is_temporary() -> None:
    got = one({"/x": lambda handler, n: None}, "/x")
    assert isinstance(got, Failed) and (got.reason, got.temporary) == ("unreachable", True)


def test_a_missing_page_is_an_answer() -> None:
    got = one({}, "/none")
    assert isinstance(got, Answer) and got.status == 404


def test_a_body_that_is_not_wanted_is_not_read() -> None:
    async def main(web: Web) -> Answer | Failed:
        async with Fetcher("groundhop/1", 1000, True) as fetcher:
            return await fetcher.fetch(web.url + "/x", accept=lambda kind: kind == "text/html")

    with serve({"/x": Reply(b"%PDF" * 5000, 200, (("Content-Type", "application/pdf"),))}) as web:
        got = asyncio.run(main(web))
    assert isinstance(got, Failed) and got.reason == "not_html"

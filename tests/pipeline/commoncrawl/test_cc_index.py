import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from tests.pipeline.commoncrawl.ccserver import (
    FILE,
    RELEASE,
    Archive,
    CommonCrawl,
    busy,
    cut,
    drop,
    parquet,
    send,
    served,
    surt,
)

from groundhop.errors import ConfigError, InputError, MissingError, ProviderError
from groundhop.pipeline.commoncrawl.captures import Capture, Chooser, Pattern, pattern_of, unusable
from groundhop.pipeline.commoncrawl.cdx import CdxIndex, parse_row
from groundhop.pipeline.commoncrawl.client import Client
from groundhop.pipeline.commoncrawl.columnar import ColumnarIndex

INDEX = f"/{RELEASE}-index?"


@pytest.mark.parametrize(
    ("text", "pattern", "query"),
    [
        ("example.org", ("prefix", "example.org", "/"), "example.org/*"),
        ("www.Example.org", ("prefix", "example.org", "/"), "example.org/*"),
        ("example.org/*", ("prefix", "example.org", "/"), "example.org/*"),
        ("http://example.org/wiki/*", ("prefix", "example.org", "/wiki/"), "example.org/wiki/*"),
        ("*.example.org", ("domain", "example.org", "/"), "*.example.org"),
        ("https://example.org/", ("page", "example.org", "/"), "example.org/"),
        ("https://example.org", ("page", "example.org", "/"), "example.org/"),
        ("example.org/a?b=1#c", ("page", "example.org", "/a?b=1"), "example.org/a?b=1"),
        ("bücher.example", ("prefix", "xn--bcher-kva.example", "/"), "xn--bcher-kva.example/*"),
    ],
)
def test_a_pattern_is_read_as_its_kind(text: str, pattern: tuple[str, str, str], query: str) -> None:
    got = pattern_of(text)
    assert (tuple(got), got.query) == (pattern, query)


@pytest.mark.parametrize(
    "text", ["", "*", "*.", "a.*.example", "example.*", "*.example.org/x", "*.example.org/*", "/x"]
)
def test_what_is_no_pattern_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"\$\.pages\.commoncrawl"):
        pattern_of(text)


def archive() -> Archive:
    found = Archive()
    for path in ("", "a", "b", "wiki/1", "wiki/2"):
        found.add(f"http://www.one.example/{path}")
    found.add("http://sub.one.example/")
    found.add("http://one.example:8080/")
    found.add("http://none.example/")
    found.add("http://one.example.evil.example/")
    found.add("http://one.example/gone", status="404 Not Found")
    return found


def look_up(
    server: CommonCrawl, cache: Path, text: str, *, waits: list[float] | None = None, attempts: int = 6
) -> list[Capture | None]:
    async def sleep(seconds: float) -> None:
        if waits is not None:
            waits.append(round(seconds, 1))

    async def main() -> list[Capture | None]:
        async with Client("groundhop/1", True, attempts=attempts, base_s=1.0, sleep=sleep) as client:
            index = CdxIndex(client, server.url + "/", RELEASE, cache, pace_s=0.0)
            return [capture async for capture in index.look_up(pattern_of(text))]

    return asyncio.run(main())


def urls(found: list[Capture | None]) -> list[str]:
    return sorted(capture.url for capture in found if capture is not None)


@pytest.mark.parametrize("text", ["one.example", "one.example/wiki/*", "*.one.example", "http://one.example/a"])
def test_the_index_server_and_the_parquet_files_know_the_same_captures(tmp_path: Path, text: str) -> None:
    found = archive()
    with served(found) as server:
        by_server = look_up(server, tmp_path / "cache", text)
    columnar = ColumnarIndex([parquet(tmp_path, found.captures)])
    by_columns = [c for c in columnar.look_up(pattern_of(text)) if c is not None and c.status == 200]
    assert by_server and {(c.filename, c.offset) for c in by_server if c} == {
        (c.filename, c.offset) for c in by_columns
    }
    assert all("evil" not in c.url and "none" not in c.url for c in by_columns)


def test_all_pages_of_rows_are_read_one_request_at_a_time(tmp_path: Path) -> None:
    with served(archive()) as server:
        found = look_up(server, tmp_path, "one.example")
    assert len(urls(found)) == 5 and (len(server.lines), server.most_at_once) == (4, 1)


def test_an_answer_is_kept_and_not_asked_for_again(tmp_path: Path) -> None:
    with served(archive()) as server:
        first = look_up(server, tmp_path, "one.example")
        asked = len(server.lines)
        again = look_up(server, tmp_path, "one.example")
    assert first == again and len(server.lines) == asked


def test_a_look_up_that_broke_off_goes_on_where_it_was(tmp_path: Path) -> None:
    with served(archive()) as server:
        server.always[INDEX + "url=one.example%2F%2A&output=json&filter=%3Dstatus%3A200&page=1"] = busy()
        with pytest.raises(ProviderError, match="run again later"):
            look_up(server, tmp_path, "one.example", attempts=2)
        server.always.clear()
        before = len(server.lines)
        assert len(look_up(server, tmp_path, "one.example")) == 5 and len(server.lines) - before == 2


def test_a_busy_or_broken_index_is_asked_again_as_slowly_as_it_asks(tmp_path: Path) -> None:
    waits: list[float] = []
    with served(archive()) as server:
        server.faults[INDEX] = [busy(503, "12"), busy(429, "3"), drop, cut(b'{"pages"', 40)]
        assert len(look_up(server, tmp_path, "one.example", waits=waits)) == 5
    assert waits == [12.0, 3.0, 4.0, 8.0]


def test_requests_to_the_index_keep_their_pace(tmp_path: Path) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def main(server: CommonCrawl) -> None:
        async with Client("groundhop/1", True, sleep=sleep) as client:
            index = CdxIndex(client, server.url, RELEASE, tmp_path, pace_s=100.0)
            assert [c async for c in index.look_up(pattern_of("http://one.example/a"))]

    with served(archive()) as server:
        asyncio.run(main(server))
    assert len(waits) == 1 and 90 < waits[0] <= 100


def test_no_captures_is_an_answer_and_kept(tmp_path: Path) -> None:
    def none(handler, _) -> None:  # type: ignore[no-untyped-def]
        send(handler, 404, json.dumps({"message": "No Captures found for: absent.example/*"}).encode())

    with served(archive()) as server:
        server.always[INDEX] = none
        assert look_up(server, tmp_path, "absent.example") == [] == look_up(server, tmp_path, "absent.example")
    assert len(server.lines) == 1


def test_an_unknown_release_is_no_release_without_captures(tmp_path: Path) -> None:
    with served(archive()) as server:
        server.always[INDEX] = lambda handler, _: send(handler, 404, b"<html>Not Found</html>")
        with pytest.raises(ProviderError, match="no such release"):
            look_up(server, tmp_path, "one.example")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "body", [b"", b"<html>busy</html>", b"{}", b'{"pages": -1}', b'{"pages": true}', b'{"pages": "5"}', b"7"]
)
def test_an_answer_without_a_count_of_pages_is_refused_and_not_kept(tmp_path: Path, body: bytes) -> None:
    with served(archive()) as server:
        server.always[INDEX] = lambda handler, _: send(handler, 200, body)
        with pytest.raises(ProviderError, match="how many pages"):
            look_up(server, tmp_path, "one.example")
    assert list(tmp_path.iterdir()) == []


def test_an_error_page_in_place_of_rows_is_refused(tmp_path: Path) -> None:
    with served(archive()) as server:
        server.faults[INDEX + "url=one.example%2F%2A&output=json&filter=%3Dstatus%3A200&page="] = [
            lambda handler, _: send(handler, 200, b'{"error": "overloaded"}\n')
        ]
        with pytest.raises(ProviderError, match="no rows"):
            look_up(server, tmp_path, "one.example")


def test_a_row_that_cannot_be_read_costs_only_itself(tmp_path: Path) -> None:
    with served(archive()) as server:
        server.rows.insert(1, '{"url": "http://one.example/half')
        found = look_up(server, tmp_path, "one.example")
    assert found.count(None) == 1 and len(urls(found)) == 5


@pytest.mark.parametrize("field", ["url", "status", "filename", "offset", "length"])
@pytest.mark.parametrize("value", [None, "x y", [], 10**400])
def test_rows_with_wrong_fields_are_none_or_useless(field: str, value: object) -> None:
    row = {"url": "http://a.example/", "status": "200", "filename": FILE, "offset": "0", "length": "9", field: value}
    got = parse_row(json.dumps(row))
    assert got is None or field == "url" or unusable(got, RELEASE, 1000) is not None


def capture(**changes: object) -> Capture:
    plain = Capture(
        url="http://a.example/x",
        timestamp="20260101000000",
        status=200,
        mime="text/html",
        filename=FILE,
        offset=0,
        length=9,
    )
    return msgspec.structs.replace(plain, **changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"mime": ""}, None),
        ({"mime": "application/xhtml+xml"}, None),
        ({"mime": "application/pdf"}, "not_html"),
        ({"status": 301}, "status"),
        ({"truncated": "length"}, "truncated"),
        ({"length": 0}, "bad_row"),
        ({"offset": -1}, "bad_row"),
        ({"length": 10_000_000}, "too_large"),
        ({"filename": f"crawl-data/{RELEASE}/../../secret"}, "bad_row"),
        ({"filename": "http://evil.example/x"}, "bad_row"),
        ({"filename": "/crawl-data/x"}, "bad_row"),
        ({"filename": "crawl-data/CC-MAIN-2020-10/x.warc.gz"}, "other_release"),
    ],
)
def test_captures_that_are_not_worth_fetching_say_why(changes: dict[str, object], reason: str | None) -> None:
    assert unusable(capture(**changes), RELEASE, 1000) == reason


def chosen(captures: list[Capture], limit: int, seed: int = 0) -> list[str]:
    chooser = Chooser(limit, seed)
    for one in captures:
        chooser.add(one)
    return [one.url for one in chooser.chosen()]


def test_the_choice_is_seeded_and_does_not_depend_on_the_order() -> None:
    many = [capture(url=f"http://a.example/{n}", offset=n) for n in range(500)]
    one, other = chosen(many, 20), chosen(many, 20, seed=1)
    assert len(one) == 20 and one == chosen(many[::-1], 20) != other


def test_of_several_captures_of_one_page_the_last_is_kept() -> None:
    old, new = capture(timestamp="20260101000000", offset=1), capture(timestamp="20260103000000", offset=2)
    for order in ([old, new], [new, old]):
        chooser = Chooser(5, 0)
        for one in order:
            chooser.add(one)
        assert chooser.chosen() == [new]


def test_a_row_of_the_columnar_index_says_what_the_index_server_says(tmp_path: Path) -> None:
    found = archive()
    with served(found) as server:
        (by_server,) = look_up(server, tmp_path / "cache", "http://one.example/a")
    (by_columns,) = ColumnarIndex([parquet(tmp_path, found.captures)]).look_up(pattern_of("http://one.example/a"))
    assert by_server == by_columns


def test_an_older_release_lacks_columns_and_is_read(tmp_path: Path) -> None:
    drop_these = ("content_truncated", "content_mime_detected", "content_digest")
    index = ColumnarIndex([parquet(tmp_path, archive().captures, drop_these)])
    assert len(list(index.look_up(Pattern("prefix", "none.example", "/")))) == 1


def test_only_row_groups_that_may_hold_the_host_match() -> None:
    keys = [
        surt(u)
        for u in ("http://one.example/", "http://one.example:81/", "http://a.one.example/", "http://one.examplf/")
    ]
    from groundhop.pipeline.commoncrawl.columnar import surt_ranges

    def inside(pattern: Pattern) -> list[bool]:
        return [any(first <= key < last for first, last in surt_ranges(pattern)) for key in keys]

    assert inside(pattern_of("one.example")) == [True, False, False, False]
    assert inside(pattern_of("*.one.example")) == [True, False, True, False]


def test_files_that_are_no_such_index_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingError):
        ColumnarIndex([tmp_path / "none"])
    with pytest.raises(InputError, match="warc_filename"):
        ColumnarIndex([parquet(tmp_path / "a", archive().captures, ("warc_filename",))])
    (tmp_path / "x.parquet").write_bytes(b"rubbish")
    with pytest.raises(InputError, match="no Parquet file"):
        ColumnarIndex([tmp_path / "x.parquet"])

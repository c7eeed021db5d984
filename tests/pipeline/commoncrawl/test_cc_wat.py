import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from warcio.warcwriter import WARCWriter

from groundhop.pipeline.commoncrawl.wat import WatPage, page_of, read_wat
from groundhop.pipeline.warc import Damaged

URL = "http://a.example/dir/page"


def record(links: list[dict[str, Any]], head: dict[str, Any] | None = None, kind: str = "response") -> dict[str, Any]:
    """As Common Crawl writes it; numbers are strings there."""
    return {
        "Container": {"Filename": "x.warc.gz", "Compressed": True, "Offset": "479"},
        "Envelope": {
            "WARC-Header-Metadata": {"WARC-Type": kind, "WARC-Target-URI": URL, "Content-Length": "24707"},
            "Payload-Metadata": {
                "HTTP-Response-Metadata": {
                    "Headers": {"Content-Type": "text/html"},
                    "Response-Message": {"Status": "200", "Version": "HTTP/1.1", "Reason": "OK"},
                    "HTML-Metadata": {"Head": head or {}, "Links": links},
                }
            },
        },
    }


def anchor(url: str, **more: str) -> dict[str, str]:
    return {"path": "A@/href", "url": url, **more}


def page(links: list[dict[str, Any]], head: dict[str, Any] | None = None) -> WatPage:
    got = page_of(json.dumps(record(links, head)).encode(), URL)
    assert isinstance(got, WatPage)
    return got


def urls(links: list[dict[str, Any]], head: dict[str, Any] | None = None) -> list[str]:
    return [link.url for link in page(links, head).links]


def test_links_are_resolved_against_the_page() -> None:
    assert urls([anchor("x"), anchor("/y#z"), anchor("//b.example/"), anchor("?q=1")]) == [
        "http://a.example/dir/x",
        "http://a.example/y",
        "http://b.example/",
        "http://a.example/dir/page?q=1",
    ]


@pytest.mark.parametrize(
    ("base", "url"),
    [
        ("/sub/dir/", "http://a.example/sub/dir/x"),
        ("myself.html", "http://a.example/dir/x"),
        ("", "http://a.example/dir/x"),
    ],
)
def test_a_base_element_is_followed_and_may_be_relative(base: str, url: str) -> None:
    assert urls([anchor("x")], {"Base": base}) == [url]


def test_only_anchors_and_areas_count_and_only_those_that_lead_to_another_page() -> None:
    links = [
        {"path": "IMG@/src", "url": "/i.png"},
        {"path": "STYLE/#text", "href": "/s.css"},
        {"path": "FORM@/action", "url": "/f"},
        {"path": "AREA@/href", "url": "/map"},
        anchor("#top"),
        anchor(""),
        anchor("mailto:x@y.example"),
        anchor("javascript:void(0)"),
        {"path": "A@/href"},
    ]
    assert urls(links) == ["http://a.example/map"]


@pytest.mark.parametrize(
    ("rel", "nofollow"),
    [("nofollow", True), ("ugc NoFollow", True), ("nofollowers", False), ("noopener", False), ("", False)],
)
def test_nofollow_is_a_word_of_rel(rel: str, nofollow: bool) -> None:
    assert page([anchor("/x", rel=rel)]).links[0].nofollow is nofollow


@pytest.mark.parametrize(("content", "closed"), [("index, nofollow", True), ("none", True), ("noindex", False)])
def test_a_page_that_asks_not_to_be_followed_closes_all_its_links(content: str, closed: bool) -> None:
    assert page([anchor("/x")], {"Metas": [{"name": "Robots", "content": content}]}).links[0].nofollow is closed


def test_text_title_and_status_are_kept() -> None:
    got = page([anchor("/x", text=" a  mill "), anchor("/y", title="from title")], {"Title": "The\n mill"})
    assert (got.url, got.status, got.title, [link.text for link in got.links]) == (
        URL,
        200,
        "The mill",
        ["a mill", "from title"],
    )


def test_records_of_requests_give_nothing() -> None:
    assert page_of(json.dumps(record([], kind="request")).encode(), URL) is None


@pytest.mark.parametrize("block", [b"", b"{", b"[]", b'{"Envelope": 5}', b'{"Envelope": {}}', b"\xff", b"[" * 100_000])
def test_json_that_is_no_such_record_is_damage(block: bytes) -> None:
    got = page_of(block, URL)
    assert isinstance(got, Damaged) and (got.item, got.reason) == (URL, "damaged")


def test_a_page_that_is_no_html_says_so() -> None:
    plain = record([])
    del plain["Envelope"]["Payload-Metadata"]["HTTP-Response-Metadata"]["HTML-Metadata"]
    got = page_of(json.dumps(plain).encode(), URL)
    assert isinstance(got, Damaged) and got.reason == "not_html"


def wat(path: Path, *blocks: bytes) -> Path:
    with path.open("wb") as file:
        writer = WARCWriter(file, gzip=True)
        writer.write_record(writer.create_warcinfo_record("x.wat.gz", {"software": "test"}))
        for block in blocks:
            writer.write_record(
                writer.create_warc_record(
                    URL, "metadata", payload=io.BytesIO(block), warc_content_type="application/json"
                )
            )
    return path


def test_a_wat_file_is_read_record_by_record_and_damage_costs_only_itself(tmp_path: Path) -> None:
    good = json.dumps(record([anchor("/x")])).encode()
    path = wat(tmp_path / "x.wat.gz", good, b"{", good)
    got = list(read_wat(path))
    assert [type(found) for found in got] == [WatPage, Damaged, WatPage]


def test_a_cut_wat_file_is_reported_once(tmp_path: Path) -> None:
    good = json.dumps(record([anchor(f"/x{n}") for n in range(50)])).encode()
    path = wat(tmp_path / "x.wat.gz", good, good)
    path.write_bytes(path.read_bytes()[:-40])
    got = list(read_wat(path))
    assert [getattr(found, "reason", "page") for found in got] == ["page", "truncated"]


def test_a_record_that_is_too_large_is_reported(tmp_path: Path) -> None:
    got = list(read_wat(wat(tmp_path / "x.wat.gz", json.dumps(record([])).encode()), max_bytes=20))
    assert [found.reason for found in got if isinstance(found, Damaged)] == ["too_large"]


def test_a_wat_file_that_is_not_packed_is_read(tmp_path: Path) -> None:
    path = wat(tmp_path / "x.wat.gz", json.dumps(record([anchor("/x")])).encode())
    plain = tmp_path / "x.wat"
    plain.write_bytes(gzip.decompress(path.read_bytes()))
    assert [found.url for found in read_wat(plain) if isinstance(found, WatPage)] == [URL]

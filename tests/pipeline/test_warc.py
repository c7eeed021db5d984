import gzip
import io
import zlib
from pathlib import Path

import pytest
import zstandard
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from groundhop.pipeline.warc import Damaged, Stored, WarcAppender, read_record, read_warc
from groundhop.records import WarcPointer

HTML = b"<p>hay and straw</p>"
DATE = "2020-02-02T02:02:02Z"


def record(
    writer: WARCWriter,
    url: str,
    payload: bytes,
    headers: tuple[tuple[str, str], ...] = (),
    status: str = "200 OK",
    **about: str,
) -> None:
    http = StatusAndHeaders(status, [("Content-Type", "text/html"), *headers], protocol="HTTP/1.1")
    writer.write_record(
        writer.create_warc_record(
            url, "response", payload=io.BytesIO(payload), http_headers=http, warc_headers_dict=about
        )
    )


def warc(path: Path, *items: tuple[str, bytes, tuple[tuple[str, str], ...]], packed: bool = True) -> Path:
    with path.open("wb") as file:
        writer = WARCWriter(file, gzip=packed)
        for url, payload, headers in items:
            record(writer, url, payload, headers)
    return path


def three(path: Path, packed: bool = True) -> Path:
    return warc(path, *((f"http://s{n}.example/", HTML * n, ()) for n in (1, 2, 3)), packed=packed)


def pages(path: Path, max_bytes: int = 1_000_000) -> dict[str, bytes]:
    return {s.url: s.body for s in read_warc(path, max_bytes) if isinstance(s, Stored)}


def damage(path: Path, max_bytes: int = 1_000_000) -> list[str]:
    return [d.reason for d in read_warc(path, max_bytes) if isinstance(d, Damaged)]


def chunked(*parts: bytes, end: bytes = b"0\r\n\r\n", extension: bytes = b"") -> bytes:
    return b"".join(b"%x%s\r\n%s\r\n" % (len(p), extension, p) for p in parts) + end


CHUNKS = ("Transfer-Encoding", "chunked")


@pytest.mark.parametrize(
    ("payload", "headers"),
    [
        (chunked(HTML[:5], HTML[5:]), (CHUNKS,)),
        (chunked(HTML, end=b"0000\r\n\r\n"), (CHUNKS,)),
        (chunked(HTML, end=b""), (CHUNKS,)),
        (chunked(HTML, extension=b";name=x"), (CHUNKS,)),
        (HTML, (CHUNKS,)),
        (chunked(gzip.compress(HTML)), (CHUNKS, ("Content-Encoding", "gzip"))),
        (HTML, (("Content-Encoding", "gzip"),)),
        (zlib.compress(HTML), (("Content-Encoding", "deflate"),)),
        (zstandard.compress(HTML), (("Content-Encoding", "zstd"),)),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_bodies_come_without_transfer_and_content_codings(
    tmp_path: Path, payload: bytes, headers: tuple, packed: bool
) -> None:
    assert pages(warc(tmp_path / "a.warc", ("http://a.example/", payload, headers), packed=packed)) == {
        "http://a.example/": HTML
    }


def test_a_cut_last_member_is_reported_once_and_not_kept(tmp_path: Path) -> None:
    path = three(tmp_path / "a.warc.gz")
    path.write_bytes(path.read_bytes()[:-60])
    assert (sorted(pages(path)), damage(path)) == (["http://s1.example/", "http://s2.example/"], ["truncated"])


def test_a_cut_plain_file_is_reported_once_and_not_kept(tmp_path: Path) -> None:
    path = three(tmp_path / "a.warc", packed=False)
    path.write_bytes(path.read_bytes()[:-30])
    assert (sorted(pages(path)), damage(path)) == (["http://s1.example/", "http://s2.example/"], ["truncated"])


def test_one_gzip_member_for_the_whole_file_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.warc.gz"
    path.write_bytes(gzip.compress(three(tmp_path / "plain.warc", packed=False).read_bytes()))
    got = [s for s in read_warc(path) if isinstance(s, Stored)]
    assert [(s.url, s.pointer) for s in got] == [(f"http://s{n}.example/", None) for n in (1, 2, 3)]


def test_a_spoilt_member_in_the_middle_costs_only_itself(tmp_path: Path) -> None:
    path = three(tmp_path / "a.warc.gz")
    _, second, _ = [s.pointer for s in read_warc(path) if isinstance(s, Stored)]
    raw = bytearray(path.read_bytes())
    assert second is not None
    raw[second.offset + 40 : second.offset + 60] = b"\xff" * 20
    path.write_bytes(raw)
    assert sorted(pages(path)) == ["http://s1.example/", "http://s3.example/"] and "damaged" in damage(path)


@pytest.mark.parametrize("packed", [True, False])
def test_a_pointer_leads_to_its_record_alone(tmp_path: Path, packed: bool) -> None:
    path = three(tmp_path / "a.warc", packed)
    got = [s for s in read_warc(path) if isinstance(s, Stored)]
    again = [read_record(s.pointer) for s in got if s.pointer is not None]
    assert again == got
    if packed:
        member = path.read_bytes()[got[1].pointer.offset :][: got[1].pointer.length]  # type: ignore[union-attr]
        assert gzip.decompress(member).count(b"WARC/1.0\r\n") == 1


def test_a_wrong_pointer_is_damage_not_another_page(tmp_path: Path) -> None:
    path = three(tmp_path / "a.warc.gz")
    assert isinstance(read_record(WarcPointer(file=str(path), offset=7, length=50)), Damaged)


def test_bodies_that_decode_to_too_much_are_reported(tmp_path: Path) -> None:
    bomb = gzip.compress(b"\0" * 3_000_000)
    path = warc(
        tmp_path / "a.warc.gz",
        ("http://bomb.example/", bomb, (("Content-Encoding", "gzip"),)),
        ("http://b.example/", HTML, ()),
    )
    assert (list(pages(path)), damage(path)) == (["http://b.example/"], ["too_large"])


def revisit(writer: WARCWriter, url: str, digest: str) -> None:
    http = StatusAndHeaders("200 OK", [("Content-Type", "text/html")], protocol="HTTP/1.1")
    writer.write_record(writer.create_revisit_record(url, digest, "http://first.example/", DATE, http_headers=http))


def test_a_revisit_comes_with_the_body_it_refers_to(tmp_path: Path) -> None:
    path = tmp_path / "a.warc.gz"
    with path.open("wb") as file:
        writer = WARCWriter(file, gzip=True)
        record(writer, "http://first.example/", HTML)
        digest = next(iter(read_digests(path, file)))
        revisit(writer, "http://second.example/", digest)
        revisit(writer, "http://third.example/", "sha1:NOWHERE")
    assert (pages(path), damage(path)) == (
        {"http://first.example/": HTML, "http://second.example/": HTML},
        ["revisit_unresolved"],
    )


def read_digests(path: Path, file: io.BufferedWriter) -> list[str]:
    file.flush()
    text = gzip.decompress(path.read_bytes()).decode()
    return [line.split(": ", 1)[1] for line in text.split("\r\n") if line.startswith("WARC-Payload-Digest")]


def test_addresses_in_angle_brackets_and_other_statuses_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.warc.gz"
    with path.open("wb") as file:
        writer = WARCWriter(file, gzip=True)
        record(writer, "<http://wget.example/>", HTML)
        record(writer, "http://gone.example/", b"", status="410 Gone")
    assert [(s.url, s.status) for s in read_warc(path) if isinstance(s, Stored)] == [
        ("http://wget.example/", 200),
        ("http://gone.example/", 410),
    ]


def test_an_arc_file_is_read(tmp_path: Path) -> None:
    about = b"1 0 Groundhop\nURL IP-address Archive-date Content-type Archive-length\n"
    head = b"filedesc://a.arc 0.0.0.0 20200202020202 text/plain %d\n%s\n" % (len(about), about)
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + HTML
    path = tmp_path / "a.arc"
    path.write_bytes(
        head + b"http://arc.example/ 127.0.0.1 20200202020202 text/html %d\n" % len(answer) + answer + b"\n"
    )
    assert pages(path) == {"http://arc.example/": HTML}


@pytest.mark.parametrize("raw", [b"", b"not a warc at all\n", b"\x1f\x8b\x08garbage", b"\x1f\x8b"])
def test_a_file_that_is_no_warc_raises_nothing_and_is_reported(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "a.warc.gz"
    path.write_bytes(raw)
    assert pages(path) == {} and bool(damage(path)) is bool(raw)


def appended(path: Path, size: int, *names: str) -> list[WarcPointer]:
    out = WarcAppender(path, size, DATE, {"software": "test"})
    found = [
        out.append(
            Stored(
                f"http://{n}.example/",
                200,
                (("Content-Type", "text/html"), ("Content-Encoding", "gzip")),
                HTML,
                licence="CC0",
                source="s@1",
            ),
            DATE,
        )
        for n in names
    ]
    out.close()
    return found


def test_what_is_written_is_read_again_with_licence_and_source(tmp_path: Path) -> None:
    path = tmp_path / "a.warc.gz"
    (pointer,) = appended(path, 0, "one")
    (got,) = read_warc(path)
    assert isinstance(got, Stored)
    assert (got.url, got.body, got.licence, got.source, got.pointer) == (
        "http://one.example/",
        HTML,
        "CC0",
        "s@1",
        pointer,
    )


def test_a_torn_tail_is_cut_off_and_the_bytes_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    whole, torn = tmp_path / "whole" / "a.warc.gz", tmp_path / "torn" / "a.warc.gz"
    appended(whole, 0, "one", "two")
    (first,) = appended(torn, 0, "one")
    with torn.open("ab") as file:
        file.write(b"\x1f\x8b\x08half a member")
    appended(torn, first.offset + first.length, "two")
    assert torn.read_bytes() == whole.read_bytes()

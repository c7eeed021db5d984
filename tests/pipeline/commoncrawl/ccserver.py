"""Common Crawl's index and data server on the loopback, with a small release and the faults of the real ones."""

import io
import json
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from groundhop.pipeline.commoncrawl.captures import Capture

RELEASE = "CC-MAIN-2026-30"
FILE = f"crawl-data/{RELEASE}/segments/1.2/warc/CC-MAIN-1-00000.warc.gz"
WORDS = "The mill stood by the river for two hundred years and ground the corn of three villages until the flood came. "

Fault = Callable[[BaseHTTPRequestHandler, bytes], None]
"""Writes another answer than the right one; gets the bytes of the whole file (empty for the index)."""


def html(text: str) -> bytes:
    return f"<html><head><title>{text}</title></head><body><main><p>{WORDS * 3}{text}</p></main></body></html>".encode()


class Archive:
    """A WARC file that grows record by record, and the index rows of its records."""

    def __init__(self, filename: str = FILE) -> None:
        self.filename = filename
        self._out = io.BytesIO()
        self._writer = WARCWriter(self._out, gzip=True)
        self.captures: list[Capture] = []

    @property
    def content(self) -> bytes:
        return self._out.getvalue()

    def add(
        self,
        url: str,
        body: bytes | None = None,
        *,
        status: str = "200 OK",
        mime: str = "text/html",
        headers: tuple[tuple[str, str], ...] = (),
        timestamp: str = "20260715010203",
        truncated: str = "",
        kind: str = "response",
    ) -> Capture:
        start = self._out.tell()
        http = StatusAndHeaders(status, [("Content-Type", mime), *headers], protocol="HTTP/1.1")
        # The same records have the same bytes in each test.
        about = {
            "WARC-Date": "2026-07-15T01:02:03Z",
            "WARC-Record-ID": f"<urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'{url} {start}')}>",
        }
        about |= {"WARC-Truncated": truncated} if truncated else {}
        if kind == "revisit":
            record = self._writer.create_revisit_record(
                url, "sha1:AAAA", "http://first.example/", "2020-02-02T02:02:02Z"
            )
        else:
            payload = io.BytesIO(html(url) if body is None else body)
            record = self._writer.create_warc_record(
                url, kind, payload=payload, http_headers=http, warc_headers_dict=about
            )
        self._writer.write_record(record)
        digest = (record.rec_headers.get_header("WARC-Payload-Digest") or "").removeprefix("sha1:")
        capture = Capture(
            url=url,
            timestamp=timestamp,
            status=int(status.split()[0]),
            mime=mime,
            digest=digest,
            filename=self.filename,
            offset=start,
            length=self._out.tell() - start,
            truncated=truncated,
        )
        self.captures.append(capture)
        return capture

    def add_raw(self, url: str, member: bytes) -> Capture:
        """Any bytes in place of a record."""
        start = self._out.tell()
        self._out.write(member)
        capture = Capture(
            url=url, timestamp="20260715010203", status=200, filename=self.filename, offset=start, length=len(member)
        )
        self.captures.append(capture)
        return capture


def index_row(capture: Capture) -> dict[str, str]:
    """As the index server writes it: numbers as strings, absent fields left out."""
    row = {
        "urlkey": surt(capture.url),
        "timestamp": capture.timestamp,
        "url": capture.url,
        "mime": capture.mime,
        "mime-detected": capture.mime,
        "status": str(capture.status),
        "digest": capture.digest,
        "length": str(capture.length),
        "offset": str(capture.offset),
        "filename": capture.filename,
        "languages": "eng",
        "encoding": "UTF-8",
    }
    return row | ({"truncated": capture.truncated} if capture.truncated else {})


def surt(url: str) -> str:
    """`http://www.Example.org/A` is `org,example)/a`."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    labels = re.sub(r"^www\d*\.", "", parts.hostname or "").split(".")
    port = f":{parts.port}" if parts.port else ""
    return (",".join(labels[::-1]) + port + ")" + (parts.path or "/")).lower() + (
        f"?{parts.query}" if parts.query else ""
    )


def parquet(folder: Path, captures: list[Capture], drop: tuple[str, ...] = (), row_group: int = 3) -> Path:
    """The columnar index of these captures, sorted as the real one is, types as in its schema."""
    captures = sorted(captures, key=lambda c: surt(c.url))
    columns = {
        "url_surtkey": [surt(c.url) for c in captures],
        "url": [c.url for c in captures],
        "fetch_time": pa.array([datetime.strptime(c.timestamp, "%Y%m%d%H%M%S") for c in captures], pa.timestamp("ms")),
        "fetch_status": pa.array([c.status for c in captures], pa.int16()),
        "content_digest": [c.digest for c in captures],
        "content_mime_detected": [c.mime or None for c in captures],
        "content_truncated": [c.truncated or None for c in captures],
        "warc_filename": [c.filename for c in captures],
        "warc_record_offset": pa.array([c.offset for c in captures], pa.int32()),
        "warc_record_length": pa.array([c.length for c in captures], pa.int32()),
    }
    path = folder / f"crawl={RELEASE}" / "subset=warc" / "part-0.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({name: values for name, values in columns.items() if name not in drop})
    pq.write_table(table, path, row_group_size=row_group)
    return folder


class CommonCrawl:
    """The running servers: index and data at one address."""

    def __init__(self, *archives: Archive, rows_a_page: int = 2) -> None:
        self.files = {archive.filename: archive.content for archive in archives}
        self.rows: list[Any] = [index_row(capture) for archive in archives for capture in archive.captures]
        self.rows_a_page = rows_a_page
        self.faults: dict[str, list[Fault]] = {}
        """By the start of the request line; each is used once, the first first."""
        self.always: dict[str, Fault] = {}
        self.lines: list[str] = []
        self.ranges: list[str] = []
        self.agents: set[str] = set()
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                with server._lock:
                    server.lines.append(self.path)
                    server.at_once += 1
                    server.most_at_once = max(server.most_at_once, server.at_once)
                    server.agents.add(self.headers.get("User-Agent", ""))
                try:
                    server.answer(self)
                finally:
                    with server._lock:
                        server.at_once -= 1

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        content = self.files.get(handler.path.lstrip("/"), b"")
        for start, faults in self.faults.items():
            if handler.path.startswith(start) and faults:
                return faults.pop(0)(handler, content)
        for start, fault in self.always.items():
            if handler.path.startswith(start):
                return fault(handler, content)
        if handler.path.startswith(f"/{RELEASE}-index?"):
            return self._index(handler)
        if content:
            return self._data(handler, content)
        return send(handler, 404, b"<html>not here</html>")

    def _index(self, handler: BaseHTTPRequestHandler) -> None:
        query = {key: values[0] for key, values in parse_qs(urlsplit(handler.path).query).items()}
        rows = [row for row in self.rows if not isinstance(row, dict) or _wanted(query["url"], row)]
        if query.get("filter") == "=status:200":
            rows = [row for row in rows if not isinstance(row, dict) or row["status"] == "200"]
        pages = -(-len(rows) // self.rows_a_page)
        if "showNumPages" in query:
            return send(handler, 200, json.dumps({"pages": pages, "pageSize": 5, "blocks": pages}).encode() + b"\n")
        first = int(query.get("page", "0")) * self.rows_a_page
        if not rows:
            return send(handler, 404, json.dumps({"message": f"No Captures found for: {query['url']}"}).encode())
        chosen = rows[first : first + self.rows_a_page]
        lines = [json.dumps(row) if isinstance(row, dict) else row for row in chosen]
        return send(handler, 200, "".join(f"{line}\n" for line in lines).encode())

    def _data(self, handler: BaseHTTPRequestHandler, content: bytes) -> None:
        told = handler.headers.get("Range", "")
        self.ranges.append(told)
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", told)
        if found is None:
            return send(handler, 200, content)
        first, last = int(found[1]), min(int(found[2]), len(content) - 1)
        if first >= len(content):
            return send(handler, 416, b"", (("Content-Range", f"bytes */{len(content)}"),))
        return send(
            handler, 206, content[first : last + 1], (("Content-Range", f"bytes {first}-{last}/{len(content)}"),)
        )


def _wanted(pattern: str, row: dict[str, str]) -> bool:
    key = row["urlkey"]
    if pattern.startswith("*."):
        host = surt(pattern[2:]).partition(")")[0]
        return re.match(re.escape(host) + "[,)]", key) is not None
    wanted = surt(pattern.rstrip("*"))
    return key.startswith(wanted) if pattern.endswith("*") else key == wanted


def send(handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: tuple[tuple[str, str], ...] = ()) -> None:
    handler.send_response_only(status)
    for name, value in (*headers, ("Content-Length", str(len(body)))):
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


def busy(status: int = 503, retry_after: str = "0") -> Fault:
    return lambda handler, _: send(handler, status, b"slow down", (("Retry-After", retry_after),))


def drop(handler: BaseHTTPRequestHandler, _: bytes) -> None:
    """Close the connection without an answer."""
    handler.close_connection = True


def ignore_range(handler: BaseHTTPRequestHandler, content: bytes) -> None:
    send(handler, 200, content)


def part(body: bytes, told: str, status: int = 206) -> Fault:
    return lambda handler, _: send(handler, status, body, (("Content-Range", told),))


def cut(body: bytes, promised: int, told: str = "") -> Fault:
    """Send less than Content-Length promises."""

    def fault(handler: BaseHTTPRequestHandler, _: bytes) -> None:
        handler.send_response_only(206 if told else 200)
        if told:
            handler.send_header("Content-Range", told)
        handler.send_header("Content-Length", str(promised))
        handler.end_headers()
        handler.wfile.write(body)
        handler.close_connection = True

    return fault


def chunked(body: bytes, told: str, end: bytes = b"0\r\n\r\n") -> Fault:
    """Send in chunks, without Content-Length."""

    def fault(handler: BaseHTTPRequestHandler, _: bytes) -> None:
        handler.send_response_only(206)
        handler.send_header("Content-Range", told)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for start in range(0, len(body), 100):
            piece = body[start : start + 100]
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        handler.wfile.write(end)
        handler.close_connection = not end

    return fault


@contextmanager
def served(*archives: Archive, **options: Any) -> Iterator[CommonCrawl]:
    server = CommonCrawl(*archives, **options)
    try:
        yield server
    finally:
        server.close()

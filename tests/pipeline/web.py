"""A web server on the loopback for tests of fetching: pages are callables, requests are counted."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Reply(NamedTuple):
    """What a page answers."""

    body: bytes = b""
    status: int = 200
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "text/html; charset=utf-8"),)


Pages = dict[str, Reply | Callable[[BaseHTTPRequestHandler, int], Reply | None]]


def html(text: str) -> Reply:
    return Reply(text.encode())


def redirect(target: str, status: int = 302, **headers: str) -> Reply:
    return Reply(b"", status, (("Location", target), *((k.replace("_", "-"), v) for k, v in headers.items())))


class Web:
    """The running server."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.seen: Counter[str] = Counter()
        self.lines: list[str] = []
        web = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                web.lines.append(self.path)
                web.seen[self.path] += 1
                page = web.pages.get(self.path, Reply(b"", 404))
                reply = page if isinstance(page, Reply) else page(self, web.seen[self.path])
                if reply is None:
                    self.close_connection = True
                    return
                self.send_response_only(reply.status)
                for name, value in (*reply.headers, ("Content-Length", str(len(reply.body)))):
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(reply.body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def serve(pages: Pages) -> Iterator[Web]:
    web = Web(pages)
    try:
        yield web
    finally:
        web.close()

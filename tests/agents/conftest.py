"""A local HTTP server that answers as a test tells it to."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

Answer = tuple[int, dict[str, str], bytes]


@dataclass
class Seen:
    """A request as it came over the wire."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Local:
    """A running server; `seen` holds its requests."""

    url: str
    seen: list[Seen] = field(default_factory=list)


def answer(value: Any, status: int = 200, **headers: str) -> Answer:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return status, {name.replace("_", "-"): text for name, text in headers.items()}, body


@pytest.fixture
def serve() -> Iterator[Callable[..., Local]]:
    """Start a server: a function from request to answer, or a list of answers given in turn (the last one again and again)."""
    servers: list[ThreadingHTTPServer] = []

    def start(behaviour: Callable[[Seen], Answer] | list[Answer]) -> Local:
        local = Local("")
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def respond(self) -> None:
                raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                request = Seen(
                    self.command,
                    self.path,
                    {k.lower(): v for k, v in self.headers.items()},
                    json.loads(raw) if raw else None,
                )
                with lock:
                    local.seen.append(request)
                    turn = len(local.seen) - 1
                status, headers, body = (
                    behaviour(request) if callable(behaviour) else behaviour[min(turn, len(behaviour) - 1)]
                )
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = respond

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        servers.append(server)
        local.url = f"http://127.0.0.1:{server.server_port}"
        return local

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def reply_with() -> Callable[..., Answer]:
    """Make an answer: JSON or bytes, status, headers."""
    return answer

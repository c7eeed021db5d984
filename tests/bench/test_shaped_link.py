"""The link that the live bench measures over, and the limits on what it waits for."""

import importlib.util
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

BENCH = Path(__file__).parents[2] / "bench"
BODY = b"x" * 200_000


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), Answer) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def test_a_link_passes_all_bytes_and_no_faster_than_it_is(server: HTTPServer) -> None:
    link = load("shaped_link").Link(server.server_port, mbit=16.0)
    began = time.monotonic()
    got = httpx.get(f"http://127.0.0.1:{link.port}/", trust_env=False, timeout=60).content
    assert got == BODY
    assert link.bytes > len(BODY)
    assert time.monotonic() - began > 0.9 * len(BODY) / 2e6


def test_who_asks_a_server_that_is_gone_is_hung_up_on(server: HTTPServer) -> None:
    link = load("shaped_link").Link(server.server_port, mbit=16.0)
    server.socket.close()
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{link.port}/", trust_env=False, timeout=60)


def test_a_wait_that_is_too_long_ends_with_the_stacks() -> None:
    code = "from progress import within\nwith within(0.1, 'the thing'):\n    while True: pass"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=BENCH, capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 1
    assert "TimeoutError: the thing: not done after 0.1 s" in ended.stderr
    assert 'File "<string>", line 3' in ended.stderr

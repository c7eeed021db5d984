"""Who may talk to the control plane, and how much at once: token, Host and body limits, as an ASGI middleware."""

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from groundhop.training.hotload.control.wire import BODY_LIMIT, HTTP_STATUS, Code, ErrorBody

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

OPEN_PATHS = frozenset({"/", "/health"})
"""They hold no data: the page asks for it with the token that its reader types in."""
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class Guard:
    """Lets a request through that carries the token; without a token, one that names this machine as its host.

    The second keeps a web page that its owner's name server points at 127.0.0.1 (DNS rebinding) from talking to a control
    plane on the reader's machine. Bodies must be JSON by their type, which a page of another origin cannot send unasked.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with why not."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        refused = self._refuse(scope["path"], headers) or _refuse_body(scope["method"], headers)
        if refused is None:
            await self._app(scope, receive, send)
        else:
            await answer(send, *refused)

    def _refuse(self, path: str, headers: dict[bytes, bytes]) -> tuple[Code, str] | None:
        if self._token is None:
            host = urlsplit(f"//{headers.get(b'host', b'').decode('latin-1')}").hostname
            return None if host in LOOPBACK else ("permission_denied", "without a token only this machine may ask")
        sent = headers.get(b"authorization", b"")
        if path in OPEN_PATHS or hmac.compare_digest(sent, f"Bearer {self._token}".encode()):
            return None
        return "unauthenticated", "a bearer token is needed"


def _refuse_body(method: str, headers: dict[bytes, bytes]) -> tuple[Code, str] | None:
    if method not in ("POST", "PUT", "PATCH"):
        return None
    length = headers.get(b"content-length", b"0")
    if not length.isdigit() or int(length) > BODY_LIMIT:
        return "invalid_argument", f"need a body of at most {BODY_LIMIT} bytes"
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    has_body = length != b"0" or b"transfer-encoding" in headers
    if has_body and kind != b"application/json":
        return "invalid_argument", "need Content-Type: application/json"
    return None


async def answer(send: Send, code: Code, message: str) -> None:
    """Send an error body."""
    body = msgspec.json.encode(ErrorBody(code=code, message=message))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": HTTP_STATUS[code], "headers": headers})
    await send({"type": "http.response.body", "body": body})

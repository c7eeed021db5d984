"""Let nobody without the token talk to a server: vLLM itself guards only part of its routes.

An ASGI middleware for vLLM's `--middleware`. Its development routes (pause, collective_rpc, weight updates) run
commands, so all but the health route need the token where one is set.
"""

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

TOKEN_VARIABLE = "GROUNDHOP_GUARD_TOKEN"
OPEN_PATHS = frozenset({"/health", "/ping"})

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class TokenGuard:
    """Answers 401 to requests without `Authorization: Bearer TOKEN`; does nothing where no token is set."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._token = os.environ.get(TOKEN_VARIABLE, "")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if not self._token or scope["type"] == "lifespan" or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            body = b'{"error": "unauthorized: a bearer token is needed"}'
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def _may_pass(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["path"] in OPEN_PATHS:
            return True
        sent = dict(scope.get("headers", ())).get(b"authorization", b"")
        return hmac.compare_digest(sent, f"Bearer {self._token}".encode())

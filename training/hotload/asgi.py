"""The few parts of ASGI that the gate needs: bounded bodies in, refusals out (asgi.readthedocs.io, HTTP specification 2.3)."""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class Refusal(Exception):
    """Ends a request with a status and a body that says why, in OpenAI's form and with `code` on top. It never leaves the gate."""

    def __init__(self, status: int, code: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.status = status
        error = {"message": message, "type": code, "code": status}
        self.body = json.dumps({"code": code, **more, "error": error | more}).encode()


def headers_of(scope: Scope) -> dict[str, str]:
    """Its headers, names in lower case; the last of several with one name."""
    return {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope.get("headers", ())}


async def read_body(scope: Scope, receive: Receive, most: int) -> bytes:
    """The whole body. Raises: Refusal when it is longer than `most` bytes, by its header or in fact."""
    length = headers_of(scope).get("content-length", "0")
    if not length.isdecimal() or int(length) > most:
        raise Refusal(413, "too_large", f"a body has at most {most} bytes here, this one claims {length[:20]}")
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise Refusal(400, "cancelled", "the client left before its request was whole")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            raise Refusal(413, "too_large", f"a body has at most {most} bytes here")
        if not message.get("more_body", False):
            return b"".join(parts)


def replay(raw: bytes, receive: Receive) -> Receive:
    """Receives `raw` as the whole body, and then what `receive` gives: the client's departure."""
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": raw, "more_body": False}

    return again


def read_object(raw: bytes) -> dict[str, Any]:
    """A JSON object. Raises: Refusal for anything else."""
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, "invalid_argument", f"the body is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise Refusal(400, "invalid_argument", "the body must be a JSON object")
    return content


async def answer(send: Send, status: int, body: bytes) -> None:
    """Send a whole JSON answer."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

"""The way out through the gate: an answer tells its versions, or becomes a refusal where its tokens are of other weights."""

import json
from collections.abc import Awaitable, Callable, Sequence

from groundhop.training.hotload.asgi import Message, Refusal, Send, answer
from groundhop.training.hotload.versions import Seen, Wish

VERSION_HEADER, VERSIONS_HEADER = "x-weight-version", "x-weight-versions"
"""The version of an answer's last token (of a stream: the one in force at its start); all versions, in order."""
_EVENT = b"data: "


class AnswerGate:
    """Stands for `send`. A whole answer is judged before its first byte leaves; a stream at the event that ends it."""

    def __init__(self, send: Send, wish: Wish, seen: Seen, before: str, ask: Callable[[], Awaitable[str]]) -> None:
        """`before`: the version when the request was let in; `ask` tells the present one, for servers without spans."""
        self._send = send
        self._wish = wish
        self._seen = seen
        self._before = before
        self._ask = ask
        self._stream = False
        self._note = b""
        """Member that goes in front of a JSON answer's others, until it is sent."""
        self._ended = False

    async def __call__(self, message: Message) -> None:
        """Send a message on, changed where needed; nothing after a refusal."""
        if self._ended:
            return
        if message["type"] == "http.response.start" and message["status"] == 200:
            await self._start(message)
        elif message["type"] == "http.response.body":
            await self._body(message)
        else:
            await self._send(message)

    async def _start(self, message: Message) -> None:
        headers = {key.lower(): value for key, value in message.get("headers", ())}
        kind = headers.get(b"content-type", b"")
        self._stream = kind.startswith(b"text/event-stream")
        if self._stream:
            headers[VERSION_HEADER.encode()] = self._before.encode()
        else:
            # Without spans: whatever was in force before and after.
            versions = self._seen.versions or list(dict.fromkeys((self._before, await self._ask())))
            if self._breaks(versions):
                await self._refuse(self._wish.conflict(versions[-1], self._seen.spans, versions))
                return
            headers |= {
                VERSION_HEADER.encode(): versions[-1].encode(),
                VERSIONS_HEADER.encode(): ",".join(versions).encode(),
            }
            if kind.startswith(b"application/json") and self._seen.spans:
                self._note = self._member()
            if b"content-length" in headers:
                headers[b"content-length"] = str(int(headers[b"content-length"]) + len(self._note)).encode()
        await self._send({**message, "headers": list(headers.items())})

    async def _body(self, message: Message) -> None:
        body = message.get("body", b"")
        if self._stream and self._seen.spans and body.startswith(_EVENT):
            versions = self._seen.versions
            if self._breaks(versions):
                refusal = self._wish.conflict(versions[-1], self._seen.spans, versions)
                await self._send({**message, "body": _EVENT + refusal.body + b"\n\n", "more_body": False})
                self._ended = True
                return
            body = _insert(body, _EVENT, self._member())
        elif self._note:
            body, self._note = _insert(body, b"", self._note), b""
        await self._send({**message, "body": body})

    def _breaks(self, versions: Sequence[str]) -> bool:
        return bool(self._wish) and not all(self._wish.holds(version) for version in versions)

    async def _refuse(self, refusal: Refusal) -> None:
        self._ended = True
        await answer(self._send, refusal.status, refusal.body)

    def _member(self) -> bytes:
        return b'"weight_versions":' + json.dumps([span.to_json() for span in self._seen.spans]).encode() + b","


def _insert(body: bytes, before: bytes, member: bytes) -> bytes:
    """Put a member in front of an object's others, without reading the object: it may hold megabytes of log-probabilities."""
    start = before + b"{"
    return start + member + body[len(start) :] if body.startswith(start) else body

"""Let a request say which weights it is for, and let each answer say which weights made its tokens.

An ASGI middleware for vLLM's `--middleware`, named before `guard.TokenGuard`, which then stands in front of it. A request names
`exact_version` or `min_required_version`, as a field of its body or as the header `x-exact-version` or
`x-min-required-version`, and gets 409 with the present version when that cannot be had. vLLM never sees these fields.

A swap may come after a request was let in, so the promise is kept at the end: vLLM notes for each output token the version
that was in force (`RequestOutput.outputs[].weight_versions`, vLLM 0.32), the gate reads these spans where the server hands
outputs to its routes, and an answer whose tokens are not what was asked for becomes a 409, too.
"""

import hashlib
import json
from typing import Any

from groundhop.training.hotload.asgi import (
    App,
    Headers,
    Message,
    Receive,
    Refusal,
    Scope,
    Send,
    answer,
    headers_of,
    read_body,
    read_object,
    replay,
)
from groundhop.training.hotload.gate_answer import AnswerGate
from groundhop.training.hotload.versions import Seen, Wish, observe, read_wish, watching

GATE_PATH = "/groundhop/gate"
"""GET tells `closed`, `salt` and `version`; POST sets the first two, each where it is given."""
GENERATION = frozenset({"/v1/chat/completions", "/v1/completions", "/inference/v1/generate"})
"""Routes whose bodies are read and whose answers tell their versions."""
ADMIN = frozenset({
    "/health", "/ping", "/metrics", "/version", "/load", "/server_info", "/pause", "/resume", "/is_paused",
    "/abort_requests", "/collective_rpc", "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine",
    "/start_weight_update", "/start_draft_weight_update", "/update_weights", "/finish_weight_update",
    "/update_weight_version", "/weight_info", "/weight_checker", "/get_world_size", "/reset_prefix_cache",
    "/reset_mm_cache", "/reset_encoder_cache", "/sleep", "/wake_up", "/is_sleeping",
})  # fmt: skip
"""What a closed gate still lets through: nothing of it makes tokens."""
WISHES = {"exact_version": "x-exact-version", "min_required_version": "x-min-required-version"}
MOST_BODY_BYTES = 64 * 2**20
MOST_ADMIN_BYTES = 64 * 1024


class GenerationGate:
    """The middleware. Its state is of one process, so a server must have one API process (vLLM's default)."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._version: str | None = None
        """The label last told by the server; None when it may have changed since."""
        self._changes = 0
        """Requests so far that may have changed the label."""
        self._closed: str | None = None
        """Why nothing is generated here; None when it is."""
        self._salt: str | None = None
        """Keeps keys and values of other weights from requests."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, changed where needed, or refuse it."""
        try:
            if scope["type"] != "http":
                await self._other(scope, receive, send)
            elif scope["path"] == GATE_PATH:
                await self._administer(scope, receive, send)
            elif scope["method"] != "POST":
                await self._app(scope, receive, send)
            elif scope["path"] in ADMIN:
                await self._change(scope, receive, send)
            elif self._closed is not None:
                raise Refusal(503, "unavailable", f"this replica is out of service: {self._closed}")
            elif scope["path"] in GENERATION:
                await self._generate(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        except Refusal as refusal:
            await answer(send, refusal.status, refusal.body)

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" and self._closed is not None:
            await send({"type": "websocket.close", "code": 1013})
        else:
            await self._app(scope, receive, send)

    async def _change(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            self._version = None
            self._changes += 1

    async def _administer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            change = read_object(await read_body(scope, receive, MOST_ADMIN_BYTES))
            odd = [key for key, value in change.items() if key not in ("closed", "salt") or not _is_text(value)]
            if odd:
                raise Refusal(400, "invalid_argument", f"the gate takes `closed` and `salt`, texts or null, not {odd}")
            self._closed = change.get("closed", self._closed)
            self._salt = change.get("salt", self._salt)
        state = {"closed": self._closed, "salt": self._salt, "version": await self._ask(scope)}
        await answer(send, 200, json.dumps(state).encode())

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await read_body(scope, receive, MOST_BODY_BYTES)
        wish, raw = self._read(scope, raw)
        before = await self._admit(scope, wish)
        # Salted after the version was seen: a label is set only after the salt that goes with it.
        raw = self._season(raw)
        seen = Seen()
        observe(getattr(getattr(scope.get("app"), "state", None), "engine_client", None))
        token = watching.set(seen)
        try:
            out = AnswerGate(send, wish, seen, before, lambda: self._ask(scope))
            await self._app({**scope, "headers": _resized(scope, len(raw))}, replay(raw, receive), out)
        finally:
            watching.reset(token)

    def _read(self, scope: Scope, raw: bytes) -> tuple[Wish, bytes]:
        """What is asked for, and the body without our fields."""
        headers = headers_of(scope)
        named: dict[str, Any] = {name: headers[header] for name, header in WISHES.items() if header in headers}
        if any(f'"{name}"'.encode() in raw for name in WISHES):
            content = read_object(raw)
            for name in WISHES.keys() & content.keys():
                value = content.pop(name)
                if value is not None and str(named.setdefault(name, value)) != str(value):
                    raise Refusal(400, "invalid_argument", f"{name} is {value} in the body, {named[name]} in a header")
            raw = json.dumps(content).encode()
        return read_wish(named), raw

    def _season(self, raw: bytes) -> bytes:
        if self._salt is None:
            return raw
        content = read_object(raw)
        own = content.get("cache_salt")
        if own is None or isinstance(own, str):
            content["cache_salt"] = salted(self._salt, own)
        return json.dumps(content).encode()

    async def _admit(self, scope: Scope, wish: Wish) -> str:
        """The version in force. Raises: Refusal when it is not what was asked for; the server is asked before that."""
        version = self._version if self._version is not None else await self._ask(scope)
        if wish and not wish.holds(version):
            version = await self._ask(scope)
            if not wish.holds(version):
                raise wish.conflict(version)
        return version

    async def _ask(self, scope: Scope) -> str:
        """Ask the server behind us what it calls its weights; "" when it does not say."""
        changes, parts = self._changes, list[Message]()

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            parts.append(message)

        target = {"method": "GET", "path": "/weight_info", "raw_path": b"/weight_info", "query_string": b""}
        await self._app({**scope, **target, "headers": _resized(scope, 0)}, receive, send)
        if parts[0]["status"] != 200:
            return ""
        version = str(json.loads(b"".join(part.get("body", b"") for part in parts[1:]))["weight_version"])
        self._version = version if changes == self._changes else None
        return version


def salted(salt: str, own: str | None) -> str:
    """The cache salt of a request under `salt`: other versions, and other salts of its own, share nothing with it."""
    return hashlib.sha256(f"{salt}\n{own or ''}".encode()).hexdigest()[:43]


def _is_text(value: Any) -> bool:
    return value is None or (isinstance(value, str) and len(value) <= 1000)


def _resized(scope: Scope, length: int) -> Headers:
    """The headers of a request with a body of `length` bytes, without ours."""
    ours = {header.encode() for header in WISHES.values()} | {b"content-length", b"transfer-encoding"}
    kept = [(key, value) for key, value in scope.get("headers", ()) if key.lower() not in ours]
    return [*kept, (b"content-length", str(length).encode())]

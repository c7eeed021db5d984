"""A server with vLLM's routes and our worker methods over weights in memory, and faults on demand."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs

import httpx
from small_states import Held

from groundhop.errors import GroundhopError
from groundhop.training.hotload.bits import Bits, Weights
from groundhop.training.hotload.checkpoint import open_checkpoint
from groundhop.training.hotload.delta import apply_delta, prints_of, read_delta
from groundhop.training.hotload.fingerprint import state_digest
from groundhop.training.hotload.gate import GenerationGate

Reply = tuple[int, Any]


def copy_of(weights: Weights) -> Held:
    return Held(dict(weights.specs), {name: weights.bits(name).copy() for name in weights.specs})


def digest_of(weights: Weights) -> str:
    return state_digest(weights.specs, prints_of(weights))


class FakeVllm:
    """An ASGI application. `faults[route or method]` is called before the real thing and may answer in its place."""

    def __init__(self, start: Weights) -> None:
        self.start = copy_of(start)
        self.weights = copy_of(start)
        self.identity: str | None = None
        self.dirty = False
        self.certified = False
        self.label = "default"
        self.paused: str | None = None
        self.running = asyncio.Condition()
        self.cache: set[tuple[str, str]] = set()
        """Prompts in the prefix cache with the salt they came under."""
        self.calls: list[str] = []
        self.counts: Counter[str] = Counter()
        self.faults: dict[str, Callable[[FakeVllm], Reply | None]] = {}
        self.late: Callable[[], None] | None = None
        """Called once the next request has acted, before it is answered."""
        self.state = SimpleNamespace(engine_client=self)
        self.app = GenerationGate(self)
        self.flying = 0
        self.outlast: str | None = None
        """Requests go on until this is the label."""

    def restart(self) -> None:
        """As after a crash: what it was started on, and no memory."""
        self.weights, self.identity, self.label = copy_of(self.start), None, "default"
        self.dirty = self.certified = False
        self.paused = None
        self.app = GenerationGate(self)

    async def generate(self, prompt: str, settings: Any, request_id: str) -> AsyncIterator[Any]:
        """Sixteen tokens; stands still while paused, ends when aborted."""
        made: list[str] = []
        self.flying += 1
        try:
            while len(made) < 16 or self.outlast not in (None, self.label):
                while self.paused == "keep":
                    await asyncio.sleep(0.001)
                if self.paused == "abort":
                    break
                made.append(self.label)
                await asyncio.sleep(0.0005)
        finally:
            self.flying -= 1
        spans = [
            SimpleNamespace(version=v, start=made.index(v), end=made.index(v) + made.count(v))
            for v in dict.fromkeys(made)
        ]
        yield SimpleNamespace(outputs=[SimpleNamespace(index=0, weight_versions=spans, made=made)])

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path, query = scope["path"], parse_qs(scope.get("query_string", b"").decode())
        body = json.loads((await receive())["body"] or b"{}") if scope["method"] == "POST" else {}
        name = body["method"] if path == "/collective_rpc" else path
        self.calls.append(name)
        self.counts[name] += 1
        fault = self.faults.get(name)
        reply = fault(self) if fault else None
        status, content = reply or await self._answer(path, {k: v[0] for k, v in query.items()}, body)
        if self.late:
            late, self.late = self.late, None
            late()
        raw = json.dumps(content).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": raw})

    async def _answer(self, path: str, query: dict[str, str], body: dict[str, Any]) -> Reply:
        match path:
            case "/pause":
                self.paused = query["mode"]
                while self.paused != "keep" and self.flying:
                    await asyncio.sleep(0.001)
            case "/resume":
                self.paused = None
            case "/is_paused":
                return 200, {"is_paused": self.paused is not None}
            case "/weight_info":
                return 200, {"weight_version": self.label}
            case "/update_weight_version":
                self.label = body["new_version"]
            case "/reset_prefix_cache":
                self.cache.clear()
                return 200, {"success": True}
            case "/collective_rpc":
                return 200, {"results": [self._worker(body["method"], *body["args"])]}
            case "/v1/completions":
                self.cache.add((body.get("prompt", ""), body.get("cache_salt", "")))
                (output,) = [output async for output in self.state.engine_client.generate("", None, "")]
                return 200, {"made": output.outputs[0].made}
            case "/health" | "/reset_encoder_cache":
                pass
            case _:
                return 404, {"error": path}
        return 200, {}

    def _worker(self, method: str, *arguments: Any) -> dict[str, Any]:
        try:
            return {"ok": True, "error": "", **getattr(self, f"_{method.removeprefix('groundhop_')}")(*arguments)}
        except (GroundhopError, OSError) as error:
            return {"ok": False, "error": str(error), "digest": ""}

    def _state(self) -> dict[str, Any]:
        digest = digest_of(self.weights) if self.certified else ""
        return {"identity": self.identity, "digest": digest, "dirty": self.dirty, "certified": self.certified}

    def _certify(self, checkpoint: str | None) -> dict[str, Any]:
        self.certified = True
        return {"digest": digest_of(self.weights), "plan_digest": "plan", "layout_signature": "layout", "refused": None}

    def _digest(self) -> dict[str, Any]:
        return {"digest": digest_of(self.weights)}

    def _apply(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.paused is not None, "weights change only while the scheduler stands still"
        if request["operation"] == "differential" and digest_of(self.weights) != request["base_digest"]:
            raise GroundhopError("another base")
        changed = 0
        for part in request["parts"]:
            delta = read_delta(Path(part))
            apply_delta(delta, self.weights)
            changed += sum(entry.changed for entry in delta.entries)
        return self._became(request["identity"], request["digest"], changed)

    def _load(self, folder: str, identity: str, digest: str) -> dict[str, Any]:
        assert self.paused is not None, "weights change only while the scheduler stands still"
        self.weights = copy_of(open_checkpoint(Path(folder)))
        return self._became(identity, digest, 0)

    def _became(self, identity: str, digest: str, changed: int) -> dict[str, Any]:
        found = digest_of(self.weights)
        self.dirty, self.identity = found != digest, identity
        if self.dirty:
            raise GroundhopError(f"{found[:12]} is not {digest[:12]}")
        return {"digest": found, "changed": changed}


def tear(server: FakeVllm) -> Reply:
    """A fault: a write that breaks off half way, with the engine alive."""
    name = next(name for name, spec in server.weights.specs.items() if spec.size)
    bits: Bits = server.weights.bits(name)
    bits[: max(1, bits.size // 2)] ^= 1
    server.dirty = True
    server.faults.clear()
    return 200, {"results": [{"ok": False, "error": "broke off half way", "digest": ""}]}


class Network(httpx.AsyncBaseTransport):
    """Servers by host name, without sockets."""

    def __init__(self, servers: dict[str, FakeVllm]) -> None:
        self._servers = servers

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        server = self._servers[request.url.host]

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await server.app({**scope, "app": server}, receive, send)

        return await httpx.ASGITransport(app=app).handle_async_request(request)

    def client(self, headers: Any = ()) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=self, headers=dict(headers))

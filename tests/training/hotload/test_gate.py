"""Requests that name a version get it or 409; answers tell their versions; a closed gate serves nobody."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from groundhop.training.hotload.gate import GATE_PATH, MOST_BODY_BYTES, GenerationGate, salted
from groundhop.training.hotload.guard import TOKEN_VARIABLE, TokenGuard

CHAT, TOKENS = "/v1/chat/completions", "/inference/v1/generate"


class Engine:
    """Makes four tokens a prompt; `swap` says after how many of them the version becomes 2."""

    def __init__(self) -> None:
        self.version = "1"
        self.swap: int | None = None
        self.keeps_spans = True

    async def generate(self, prompt: str, sampling_params: Any, request_id: str) -> AsyncIterator[Any]:
        made: list[str] = []
        for number in range(4):
            if self.swap == number:
                self.version = "2"
            made.append(self.version)
            spans = self._spans(made) if number == 3 and self.keeps_spans else None
            yield SimpleNamespace(outputs=[SimpleNamespace(index=0, text=prompt, weight_versions=spans)])

    def _spans(self, made: list[str]) -> list[Any]:
        return [
            SimpleNamespace(version=v, start=made.index(v), end=made.index(v) + made.count(v))
            for v in dict.fromkeys(made)
        ]


class Server:
    """As much of vLLM's API server as the gate sees; `bodies` are those that reached it."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.state = SimpleNamespace(engine_client=self.engine)
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path, body = scope["path"], b""
        if scope["method"] == "POST":
            body = (await receive())["body"]
        if path == "/weight_info":
            await self._json(send, {"weight_version": self.engine.version})
        elif path == "/update_weight_version":
            self.engine.version = json.loads(body)["new_version"]
            await self._json(send, {"success": True})
        elif path in (CHAT, TOKENS, "/v1/completions"):
            await self._generate(json.loads(body), send)
        else:
            await self._json(send, {"path": path})

    async def _generate(self, body: dict[str, Any], send: Any) -> None:
        self.bodies.append(body)
        prompts = body.get("prompt", ["a"])
        if body.get("stream"):
            kind = [(b"content-type", b"text/event-stream; charset=utf-8")]
            await send({"type": "http.response.start", "status": 200, "headers": kind})
            async for output in self.engine.generate("a", None, "r"):
                event = f"data: {json.dumps({'text': output.outputs[0].text})}\n\n".encode()
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
            return
        for prompt in prompts:
            async for _ in self.engine.generate(prompt, None, "r"):
                pass
        await self._json(send, {"choices": [{"text": prompt} for prompt in prompts]})

    async def _json(self, send: Any, content: Any) -> None:
        body = json.dumps(content).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def talk(server: Server, act: Callable[[httpx.AsyncClient], Awaitable[Any]], outer: Any = None) -> Any:
    """Run `act` with a client of the server behind its gate; as in vLLM, the server is the scope's `app`."""
    gate = GenerationGate(server)
    front = outer(gate) if outer else gate

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await front({**scope, "app": server}, receive, send)

    async def run() -> Any:
        transport = httpx.ASGITransport(app=application)
        async with httpx.AsyncClient(transport=transport, base_url="http://replica") as client:
            return await act(client)

    return asyncio.run(run())


def post(server: Server, path: str = CHAT, *, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    answer: httpx.Response = talk(server, lambda client: client.post(path, json=body, headers=headers))
    return answer


@pytest.mark.parametrize("path", [CHAT, TOKENS, "/v1/completions"])
@pytest.mark.parametrize("wish", [{"exact_version": 1}, {"exact_version": "1"}, {"min_required_version": 0}])
def test_a_version_that_is_here_is_served(path: str, wish: dict[str, Any]) -> None:
    answer = post(Server(), path, **wish)
    assert (answer.status_code, answer.json()["choices"]) == (200, [{"text": "a"}])


@pytest.mark.parametrize("wish", [{"exact_version": 2}, {"exact_version": 0}, {"min_required_version": 2}])
def test_another_version_gets_409_with_the_present_one(wish: dict[str, Any]) -> None:
    server = Server()
    answer = post(server, **wish)
    body = answer.json()
    assert (answer.status_code, body["code"], body["current_version"]) == (409, "version_not_served", "1")
    assert (body["error"]["current_version"], server.bodies) == ("1", [])


def test_headers_name_versions_too() -> None:
    assert post(Server(), headers={"X-Exact-Version": "2"}).status_code == 409
    assert post(Server(), headers={"X-Min-Required-Version": "1"}).status_code == 200


def test_header_and_body_must_agree() -> None:
    assert post(Server(), headers={"X-Exact-Version": "1"}, exact_version=2).status_code == 400


@pytest.mark.parametrize("wish", [{"min_required_version": "new"}, {"exact_version": True}, {"exact_version": [1]}])
def test_what_is_no_version_is_refused(wish: dict[str, Any]) -> None:
    assert post(Server(), **wish).status_code == 400


def test_a_label_without_a_number_satisfies_no_minimum() -> None:
    server = Server()
    server.engine.version = "torn"
    assert (post(server, min_required_version=0).status_code, post(server).status_code) == (409, 200)


def test_the_server_never_sees_our_fields() -> None:
    server = Server()
    post(server, prompt=["x"], exact_version=1, min_required_version=None, seed=2**70, note="exact_version")
    assert server.bodies == [{"prompt": ["x"], "seed": 2**70, "note": "exact_version"}]


def test_a_label_set_through_the_gate_counts_at_once() -> None:
    async def act(client: httpx.AsyncClient) -> list[int]:
        first = await client.post(CHAT, json={"exact_version": 1})
        await client.post("/update_weight_version", json={"new_version": "7"})
        old, new = (
            await client.post(CHAT, json={"exact_version": 1}),
            await client.post(CHAT, json={"exact_version": 7}),
        )
        return [first.status_code, old.status_code, new.status_code]

    assert talk(Server(), act) == [200, 409, 200]


def test_a_label_set_behind_the_gate_is_asked_for_before_a_refusal() -> None:
    server = Server()

    async def act(client: httpx.AsyncClient) -> int:
        await client.post(CHAT, json={})
        server.engine.version = "2"
        return (await client.post(CHAT, json={"exact_version": 2})).status_code

    assert talk(server, act) == 200


def test_an_answer_tells_the_versions_of_its_tokens() -> None:
    server = Server()
    server.engine.swap = 1
    answer = post(server)
    assert answer.json()["weight_versions"] == [
        {"choice": 0, "version": "1", "start": 0, "end": 1},
        {"choice": 0, "version": "2", "start": 1, "end": 4},
    ]
    assert (answer.headers["x-weight-version"], answer.headers["x-weight-versions"]) == ("2", "1,2")
    assert int(answer.headers["content-length"]) == len(answer.content)


def test_each_prompt_of_a_request_has_its_own_spans() -> None:
    server = Server()
    server.engine.swap = 0
    answer = post(server, "/v1/completions", prompt=["a", "b"])
    assert [span["choice"] for span in answer.json()["weight_versions"]] == [0, 1]


def test_a_swap_after_admission_breaks_an_exact_wish() -> None:
    server = Server()
    server.engine.swap = 2
    answer = post(server, exact_version=1)
    body = answer.json()
    assert (answer.status_code, body["current_version"]) == (409, "2")
    assert [span["version"] for span in body["weight_versions"]] == ["1", "2"]


def test_a_swap_after_admission_keeps_a_minimum() -> None:
    server = Server()
    server.engine.swap = 2
    assert post(server, min_required_version=1).status_code == 200


def test_without_spans_the_versions_before_and_after_count() -> None:
    server = Server()
    server.engine.swap, server.engine.keeps_spans = 2, False
    assert (post(server, exact_version=1).status_code, post(server).headers["x-weight-versions"]) == (409, "2")


def events(answer: httpx.Response) -> list[Any]:
    texts = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


def test_the_last_event_of_a_stream_tells_its_versions() -> None:
    server = Server()
    server.engine.swap = 3
    got = events(post(server, stream=True))
    spans = [{"choice": 0, "version": "1", "start": 0, "end": 3}, {"choice": 0, "version": "2", "start": 3, "end": 4}]
    assert got == [{"text": "a"}] * 3 + [{"weight_versions": spans, "text": "a"}, "[DONE]"]


def test_a_stream_that_breaks_an_exact_wish_ends_in_an_error() -> None:
    server = Server()
    server.engine.swap = 3
    got = events(post(server, stream=True, exact_version=1))
    assert got[:3] == [{"text": "a"}] * 3
    assert (len(got), got[3]["error"]["code"], got[3]["current_version"]) == (4, 409, "2")


def test_a_closed_gate_serves_nobody_and_still_takes_orders() -> None:
    async def act(client: httpx.AsyncClient) -> list[int]:
        await client.post(GATE_PATH, json={"closed": "its weights are torn"})
        paths = [CHAT, "/v1/responses", "/pause", "/collective_rpc"]
        closed = [(await client.post(path, json={})).status_code for path in paths]
        healthy = (await client.get("/health")).status_code
        await client.post(GATE_PATH, json={"closed": None})
        return [*closed, healthy, (await client.post(CHAT, json={})).status_code]

    assert talk(Server(), act) == [503, 503, 200, 200, 200, 200]


def test_a_salt_keeps_versions_and_the_salts_of_requests_apart() -> None:
    server = Server()

    async def act(client: httpx.AsyncClient) -> None:
        for salt in ("v1", "v2", None):
            await client.post(GATE_PATH, json={"salt": salt})
            for own in ({}, {"cache_salt": "mine"}):
                await client.post(CHAT, json=own)

    talk(server, act)
    salts = [body.get("cache_salt") for body in server.bodies]
    assert salts == [salted("v1", None), salted("v1", "mine"), salted("v2", None), salted("v2", "mine"), None, "mine"]
    assert len(set(salts)) == 6


@pytest.mark.parametrize("change", [{"closed": 1}, {"open": True}, []])
def test_the_gate_takes_only_what_it_knows(change: Any) -> None:
    assert talk(Server(), lambda client: client.post(GATE_PATH, json=change)).status_code == 400


def test_a_body_beyond_the_bound_is_refused_before_it_is_read() -> None:
    headers = {"content-length": str(MOST_BODY_BYTES + 1)}
    assert talk(Server(), lambda client: client.post(CHAT, content=b"{}", headers=headers)).status_code == 413


def test_a_body_that_is_longer_than_it_says_is_refused() -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(65):
            yield b" " * 2**20

    assert talk(Server(), lambda client: client.post(CHAT, content=parts())).status_code == 413


def test_the_gates_own_route_needs_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    send: Callable[[httpx.AsyncClient], Any] = lambda client: client.post(GATE_PATH, json={"closed": "x"})  # noqa: E731
    assert talk(Server(), send, outer=TokenGuard).status_code == 401

"""Two real vLLM servers under the control plane, a stream of requests, ten hot-loads, and what goes wrong meanwhile.

An agent is killed while it writes, one joins late, two more hot-loads are strictly on-policy, a server starts anew; in the end all
equals a fresh server.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from msgspec.structs import replace

from groundhop.config import ServeConfig
from groundhop.serve import Servers
from groundhop.training.hotload.checkpoint import open_checkpoint
from groundhop.training.hotload.control.client import ControlClient, ControlFleet
from groundhop.training.hotload.journal import Journal
from groundhop.training.hotload.publisher import Published, Publisher
from groundhop.training.hotload.store.objects import open_objects
from groundhop.training.hotload.store.snapshots import materialize
from groundhop.training.models import prepare

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
pytest.importorskip("vllm")

PROMPT = list(range(20, 60))
LONG = 10 * PROMPT
"""Long enough for whole blocks of the prompt cache, which have 128 tokens on the CPU."""
HOT_LOADS = 10
PATIENCE_S = 300.0
COMMAND = "import sys; from groundhop.cli import main; sys.exit(main(sys.argv[1:]))"


def config(replicas: int) -> ServeConfig:
    return ServeConfig(replicas=replicas, ready_s=600, device="cpu", kv_cache_bytes=64_000_000, max_num_seqs=8)


class Relay:
    """Passes bytes on to a server, and calls `seen` once when `word` goes by."""

    def __init__(self, url: str) -> None:
        self._target = httpx.URL(url)
        self.word: bytes | None = None
        self.seen: Callable[[], None] = lambda: None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop)
        self.url = f"http://127.0.0.1:{server.result(10).sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(self._target.host, self._target.port)
        await asyncio.gather(self._pass(reader, there[1]), self._pass(there[0], writer), return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
            if self.word is not None and self.word in data:
                self.word = None
                self.seen()
        writer.close()


@dataclass
class Sent:
    """A request of the stream and what came back."""

    server: int
    least: int
    """The version that was committed when it was sent."""
    exact: int | None
    status: int
    body: dict[str, Any]


@dataclass
class Site:
    """Store, control plane, servers and agents."""

    folder: Path
    base: Path
    urls: list[str]
    control: str
    publisher: Publisher
    weights: dict[str, Any]
    agents: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    committed: int = 0

    def agent(self, name: str, url: str) -> None:
        """Start an agent, in place of one that is gone."""
        command = ["agent", "--replica", url, "--control", self.control, "--store", str(self.folder / "store")]
        command += ["--folder", str(self.folder / name), "--name", name, "--deployment", "d", "--keep-every", "0"]
        self.agents[name] = spawn(command, self.folder / f"{name}.log")

    def publish(self, seed: int) -> Published:
        """Change about 1 % of the weights, and bring them to all replicas."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        for tensor in self.weights.values():
            chosen = torch.rand(tensor.shape, generator=generator) < 0.01
            tensor[chosen] += (torch.randn(tensor.shape, generator=generator) * 0.1).to(tensor.dtype)[chosen]
        published = self.publisher.publish(self.weights.items())
        self.committed = published.version
        return published

    def until_serving(self, *names: str) -> None:
        """Wait until these replicas serve the head."""
        client, end = ControlClient(self.control), time.monotonic() + PATIENCE_S
        while True:
            view = client.deployment("d")
            states = {r.name: (r.state, r.current_identity) for r in view.replicas}
            if all(states.get(name) == ("serving", view.head) for name in names):
                return
            assert time.monotonic() < end, states
            time.sleep(0.1)


def spawn(arguments: list[str], log: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", COMMAND, "hotload", *arguments]
    return subprocess.Popen(command, stdout=log.open("ab"), stderr=subprocess.STDOUT, env={**os.environ})


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def tensors(folder: Path) -> dict[str, Any]:
    """A checkpoint's tensors as a trainer holds them."""
    import torch

    checkpoint = open_checkpoint(folder)
    assert {spec.dtype for spec in checkpoint.specs.values()} == {"BF16"}
    return {
        name: torch.from_numpy(np.array(checkpoint.bits(name)).view(np.int16)).view(torch.bfloat16).reshape(spec.shape)
        for name, spec in checkpoint.specs.items()
    }


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    monkey = pytest.MonkeyPatch()
    # One thread: two of them spend their time waiting for each other where a model is this small.
    monkey.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path_factory.mktemp("hotload")
    base = prepare("tiny-random", folder)
    port = free_port()
    arguments = ["serve", "--ledger", str(folder / "ledger"), "--port", str(port), "--deployment", "d"]
    plane = spawn([*arguments, "--store", str(folder / "store"), "--offline-after", "60"], folder / "control.log")
    control = f"http://127.0.0.1:{port}"
    fleet = ControlFleet(control, "d", timeout_s=PATIENCE_S)
    publisher = Publisher(
        open_objects(folder / "store"), folder / "publisher", fleet, run_id="run", owner="test", encoding="xor"
    )
    made: Site | None = None
    try:
        with Servers.start(base, config(2), folder / "logs") as servers:
            made = Site(folder, base, servers.urls, control, publisher, tensors(base))
            yield made
    finally:
        monkey.undo()
        for process in (plane, *(made.agents.values() if made else ())):
            process.kill()
            process.wait()


def generate(url: str, tokens: int, **more: Any) -> httpx.Response:
    """Greedy tokens with their versions."""
    settings = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "logprobs": 0}
    body = {"model": "policy", "token_ids": PROMPT, "sampling_params": settings, **more}
    return httpx.post(f"{url}/inference/v1/generate", json=body, trust_env=False, timeout=PATIENCE_S)


def digest(url: str) -> str:
    """Over every live bit, as the worker reads it now."""
    body = {"method": "groundhop_digest", "args": []}
    (answer,) = httpx.post(f"{url}/collective_rpc", json=body, trust_env=False, timeout=60).json()["results"]
    assert answer["ok"], answer
    return str(answer["digest"])


@contextlib.contextmanager
def streaming(site: Site) -> Iterator[list[Sent]]:
    """Requests of 30 and of 200 tokens to both servers, one after another, every third for one version; all are answered at the end."""
    over, sent = threading.Event(), list[Sent]()

    def stream(server: int, tokens: int) -> None:
        number = 0
        while not over.is_set():
            number += 1
            least = site.committed
            exact = least if number % 3 == 0 else None
            answer = generate(site.urls[server], tokens, **({} if exact is None else {"exact_version": exact}))
            sent.append(Sent(server, least, exact, answer.status_code, answer.json()))

    threads = [threading.Thread(target=stream, args=(server, tokens)) for server in (0, 1) for tokens in (30, 200)]
    for thread in threads:
        thread.start()
    try:
        yield sent
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_a_stream_of_requests_goes_through_ten_hot_loads(site: Site) -> None:
    """Nothing is lost, every token's version is told and right, both replicas end on the same bits."""
    relay = Relay(site.urls[1])
    site.agent("a", site.urls[0])
    site.until_serving("a")
    site.publisher.start(open_checkpoint(site.base))
    site.publish(0)
    # The second replica joins two versions late; until then its server makes tokens under its own label.
    site.publish(1)
    site.agent("b", relay.url)
    site.until_serving("a", "b")

    def kill() -> None:
        site.agents["b"].send_signal(signal.SIGKILL)
        site.agents["b"].wait()
        killed.append(Journal(site.folder / "b" / "journal.json").record.state)
        site.agent("b", relay.url)

    killed: list[str] = []
    with streaming(site) as sent:
        for seed in range(2, HOT_LOADS):
            if seed == 5:
                relay.word, relay.seen = b"groundhop_apply", kill
            published = site.publish(seed)
        site.until_serving("a", "b")
    assert killed == ["dirty"]
    assert {digest(url) for url in site.urls} == {published.digest}
    assert len(sent) > 2 * HOT_LOADS
    assert len({span["version"] for one in sent if one.status == 200 for span in spans_of(one)}) > 2
    for one in sent:
        check(one, site.committed)


def spans_of(one: Sent) -> list[dict[str, Any]]:
    return list(one.body["choices"][0]["weight_versions"])


def check(one: Sent, newest: int) -> None:
    """An answer has all its tokens, each of one version in order; a refusal says why and what is there."""
    if one.status == 409:
        assert one.exact is not None
        assert one.body["code"] == "version_not_served"
        assert int(one.body["current_version"]) >= one.exact
        return
    assert one.status == 200, one
    spans, tokens = spans_of(one), one.body["choices"][0]["token_ids"]
    assert one.body["choices"][0]["finish_reason"] == "length"
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
    assert spans[-1]["end"] == len(tokens) in (30, 200)
    versions = [int(span["version"]) for span in spans]
    assert versions == sorted(set(versions))
    assert one.least <= versions[0] <= versions[-1] <= newest
    assert one.exact is None or versions == [one.exact]


def test_a_barrier_lets_no_request_run_over_the_change(site: Site) -> None:
    """Requests in flight are drained, every answer is of one version, and prompts cached under the old weights are forgotten."""
    client = ControlClient(site.control)
    config = client.deployment("d").config
    client.put_deployment("d", replace(config, transition_mode="BARRIER"))
    try:
        # After this one the gate salts no prompt: only the reset keeps the next weights from these keys and values.
        site.publish(HOT_LOADS)
        for url in site.urls:
            before = cached_tokens(url)
            generate(url, 1, token_ids=LONG)
            generate(url, 1, token_ids=LONG)
            assert cached_tokens(url) >= before + 256
        with streaming(site) as sent:
            wait_for_answers(sent)
            published = site.publish(HOT_LOADS + 1)
            assert client.barrier("d", published.identity, wait_s=25.0).ready
            wait_for_answers(sent)
    finally:
        client.put_deployment("d", config)
    assert {digest(url) for url in site.urls} == {published.digest}
    for one in sent:
        check(one, site.committed)
    served = [[int(span["version"]) for span in spans_of(one)] for one in sent if one.status == 200]
    assert {len(versions) for versions in served} == {1}
    assert {versions[0] for versions in served} == {published.version - 1, published.version}


def wait_for_answers(sent: list[Sent]) -> None:
    """Until each server has answered one more request; the next ones are in flight then."""
    seen, end = len(sent), time.monotonic() + PATIENCE_S
    while {one.server for one in sent[seen:] if one.status == 200} != {0, 1}:
        assert time.monotonic() < end
        time.sleep(0.01)


def cached_tokens(url: str) -> float:
    """Prompt tokens so far that a server found in its cache."""
    lines = httpx.get(f"{url}/metrics", trust_env=False, timeout=60).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total"))


def test_the_gate_serves_the_version_that_is_here_and_no_other(site: Site) -> None:
    url, now = site.urls[0], site.committed
    served = generate(url, 4, exact_version=now)
    refused = generate(url, 4, exact_version=now - 1)
    assert (served.status_code, served.headers["x-weight-versions"]) == (200, str(now))
    assert (refused.status_code, refused.json()["current_version"]) == (409, str(now))
    assert generate(url, 4, min_required_version=now + 1).status_code == 409
    chat = {"model": "policy", "messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "ignore_eos": True}
    span = {"choice": 0, "version": str(now), "start": 0, "end": 5}
    answer = httpx.post(f"{url}/v1/chat/completions", json=chat, trust_env=False, timeout=60)
    assert answer.json()["weight_versions"] == [span]
    lines = httpx.post(f"{url}/v1/chat/completions", json={**chat, "stream": True}, trust_env=False, timeout=60).text
    assert lines.count('"weight_versions":') == 1
    assert lines.rstrip().endswith("data: [DONE]")


def test_all_equals_a_fresh_server_and_one_that_starts_anew_catches_up(site: Site) -> None:
    last = site.folder / "last"
    materialize(open_objects(site.folder / "store"), f"weight_v{site.committed:06d}", last)
    site.agents["b"].kill()
    site.agents["b"].wait()
    # One fresh server on the last checkpoint, one that lost everything and starts on the first again.
    starts = ((last, site.folder / "logs-fresh"), (site.base, site.folder / "logs-anew"))
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        starting = [pool.submit(Servers.start, folder, config(1), logs) for folder, logs in starts]
        fresh, anew = (stack.enter_context(one.result()) for one in starting)
        site.agent("b", anew.urls[0])
        site.until_serving("a", "b")
        everyone = [fresh.urls[0], anew.urls[0], *site.urls]
        answers = [generate(url, 64).json()["choices"][0] for url in everyone]
        for other in answers[1:]:
            assert other["token_ids"] == answers[0]["token_ids"]
            assert other["logprobs"] == answers[0]["logprobs"]
        cached = [generate(url, 16, token_ids=LONG).json()["choices"][0]["logprobs"] for url in everyone]
        assert all(one == cached[0] for one in cached)
        sums = [
            httpx.post(f"{url}/weight_checker", json={"action": "checksum"}, trust_env=False, timeout=60).json()
            for url in everyone
        ]
        assert all(one == sums[0] for one in sums)

"""A control plane, fake servers and their agents over real sockets, in one event loop of a background thread."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fake_vllm import FakeVllm, digest_of
from plain_states import arrays_of, state
from small_states import Held, changed

from groundhop.training.hotload.agent import Agent, Settings
from groundhop.training.hotload.control.app import make_app
from groundhop.training.hotload.control.client import AgentClient, ControlClient, ControlFleet
from groundhop.training.hotload.control.ledger import Ledger
from groundhop.training.hotload.control.service import Service
from groundhop.training.hotload.control.wire import DeploymentBody
from groundhop.training.hotload.journal import Journal
from groundhop.training.hotload.publisher import Published, Publisher
from groundhop.training.hotload.replica import Replica, make_client
from groundhop.training.hotload.store.objects import open_objects
from groundhop.training.hotload.supply import Depot

PATIENCE_S = 120.0
AGENT = "import sys; from groundhop.cli import main; sys.exit(main(sys.argv[1:]))"


class Site:
    """Everything around a publisher. Leave it as a context."""

    def __init__(
        self, folder: Path, *, store: str = "", encoding: Any = "xor", anchor_every: int = 20, **config: Any
    ) -> None:
        self.folder, self.store = folder, store or str(folder / "store")
        self.objects = open_objects(self.store)
        self.now = state()
        self.servers: dict[str, FakeVllm] = {}
        self.urls: dict[str, str] = {}
        self.agents: dict[str, Any] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self._sockets: list[uvicorn.Server] = []
        self._ledger = Ledger(folder / "ledger")
        self.service = Service(self._ledger)
        self.service.configure("d", DeploymentBody(heartbeat_s=0.1, **{"offline_after_s": 30.0, **config}))
        self.control = self.listen(make_app(self.service))
        self.fleet = ControlFleet(self.control, "d", timeout_s=PATIENCE_S)
        self.publisher = Publisher(
            self.objects,
            folder / "publisher",
            self.fleet,
            run_id="run",
            owner="me",
            encoding=encoding,
            anchor_every=anchor_every,
        )

    def __enter__(self) -> "Site":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        for name in list(self.agents):
            self.stop(name)
        self.do(self._end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()
        self._ledger.close()

    async def _end(self) -> None:
        for server in self._sockets:
            server.should_exit = server.force_exit = True
        others = asyncio.all_tasks() - {asyncio.current_task()}
        _, left = await asyncio.wait(others, timeout=1.0)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run something in the background loop, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S)

    def listen(self, app: Any) -> str:
        """Serve an ASGI application; returns its address."""
        settings = uvicorn.Config(app, port=0, log_level="error", access_log=False, timeout_graceful_shutdown=1)
        server = uvicorn.Server(settings)
        self._sockets.append(server)
        asyncio.run_coroutine_threadsafe(server.serve(), self.loop)
        self.until(lambda: server.started)
        return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    def until(self, claim: Callable[[], bool]) -> None:
        """Wait for something that other threads and processes bring about."""
        end = time.monotonic() + PATIENCE_S
        while not claim():
            assert time.monotonic() < end, f"not in {PATIENCE_S} s; states are {self.states()}"
            time.sleep(0.01)

    def add(self, name: str, weights: Held | None = None) -> FakeVllm:
        """A server, started on version 0 where nothing else is said."""
        server = self.servers[name] = FakeVllm(weights or state())

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                await server.app({**scope, "app": server}, receive, send)

        settings = uvicorn.Config(app, port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
        front = uvicorn.Server(settings)
        self._sockets.append(front)
        asyncio.run_coroutine_threadsafe(front.serve(), self.loop)
        self.until(lambda: front.started)
        self.urls[name] = f"http://127.0.0.1:{front.servers[0].sockets[0].getsockname()[1]}"
        return server

    def agent(self, name: str, **settings: Any) -> None:
        """An agent of the server `name`, in this process."""

        async def run() -> None:
            folder = self.folder / f"agent-{name}"
            client = AgentClient(self.control, "d", name, time.time_ns())
            async with make_client({}) as connection:
                agent = Agent(
                    Settings("d", name, **settings),
                    Replica(connection, self.urls[name]),
                    client,
                    self.objects,
                    Depot(self.objects, folder),
                    Journal(folder / "journal.json"),
                )
                try:
                    await agent.run()
                finally:
                    await client.close()

        self.agents[name] = asyncio.run_coroutine_threadsafe(run(), self.loop)
        self.until(lambda: name in self.states())

    def stop(self, name: str) -> None:
        """End an agent of this process."""
        future = self.agents.pop(name)
        future.cancel()

    def process(self, name: str) -> subprocess.Popen[bytes]:
        """An agent of the server `name` as users start it; a process that can be killed."""
        command = [sys.executable, "-c", AGENT, "hotload", "agent", "--replica", self.urls[name]]
        command += ["--control", self.control, "--store", self.store, "--deployment", "d"]
        command += ["--folder", str(self.folder / f"agent-{name}"), "--name", name, "--keep-every", "0"]
        log = (self.folder / f"agent-{name}.log").open("ab")
        found = self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ})
        return found

    def kill(self, name: str) -> None:
        """SIGKILL an agent's process."""
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait()

    def states(self) -> dict[str, str]:
        """As the control plane sees the replicas."""
        return {name: replica.state for name, replica in self.service.find("d").replicas.items()}

    def publish(self, seed: int) -> Published:
        """The next version."""
        self.now = changed(self.now, seed=seed)
        return self.publisher.publish(arrays_of(self.now))

    def holds(self, *names: str) -> bool:
        """Whether these servers (all, by default) hold what was published last, run and say so."""
        chosen = [self.servers[name] for name in names or self.servers]
        head = self.service.find("d").head
        label = str(int((head or "0")[-6:]))
        return all(
            server.paused is None and server.label == label and digest_of(server.weights) == digest_of(self.now)
            for server in chosen
        )

    def settled(self, *names: str) -> None:
        """Wait until these servers hold the head and the control plane knows it."""
        self.until(lambda: self.holds(*names) and all(self.states().get(n) == "serving" for n in names or self.servers))

    def complete(self, name: str, **body: Any) -> httpx.Response:
        """A request to a server."""
        return httpx.post(
            f"{self.urls[name]}/v1/completions", json={"prompt": "x", **body}, trust_env=False, timeout=60
        )

    def client(self) -> ControlClient:
        """A reader of the control plane."""
        return ControlClient(self.control)

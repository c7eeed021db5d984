"""Kill the real server with SIGKILL right after its n-th event, start it again, and let two replicas go on: for every n.

Run as a script, `crashes.py FOLDER`, so that each server can be a fork of a process that has imported everything. Prints one
JSON line for each n with where it died and what the end was.
"""

import json
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec

from groundhop.training.hotload.control import serve as serving
from groundhop.training.hotload.control.ledger import Ledger
from groundhop.training.hotload.control.records import Event
from groundhop.training.hotload.control.wire import Current, DeploymentBody, RegisterBody, ReportBody, Task, TaskReply

CONFIG = DeploymentBody(heartbeat_s=5.0, offline_after_s=60.0)
EPOCH = 1_764_439_000_123_456_789
PATIENCE_S = 240.0
MOST_EVENTS = 60
WRITES = ("pausing", "applying", "verifying", "prepared")


class Dying(Ledger):
    """A ledger that ends its process once an event is written."""

    left = 0

    def append(self, deployment: str, event: Event, time: float) -> int:
        sequence = super().append(deployment, event, time)
        Dying.left -= 1
        if Dying.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return sequence


class Server:
    """The server's process, and how to start another one when it is gone."""

    def __init__(self, ledger: Path, port: int, die_after: int) -> None:
        self.ledger, self.port, self.deaths = ledger, port, 0
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10.0)
        self.start(die_after)

    def start(self, die_after: int) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            Dying.left = die_after
            serving.Ledger = Dying  # type: ignore[attr-defined, misc]
            serving.serve(
                self.ledger, host="127.0.0.1", port=self.port, token_variable="NONE", deployment="d", config=CONFIG
            )
            os._exit(0)
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            try:
                self.client.get("/health")
                return
            except httpx.TransportError:
                time.sleep(0.01)
        raise TimeoutError

    def ask(self, method: str, path: str, **more: Any) -> httpx.Response | None:
        """The answer; None where the server died over it. It then runs again."""
        try:
            return self.client.request(method, path, headers={"Content-Type": "application/json"}, **more)
        except httpx.TransportError:
            os.waitpid(self.pid, 0)
            self.deaths += 1
            self.start(0)
            return None

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


class Replica:
    """An agent that keeps its bits' name over the server's deaths."""

    def __init__(self, server: Server, name: str) -> None:
        self.server, self.name, self.current = server, name, Current(identity=None)
        self.left: list[str] = []
        self.task: Task | None = None
        self.register()

    def register(self) -> None:
        about = RegisterBody(deployment="d", name=self.name, epoch=EPOCH, current=self.current)
        while self.server.ask("POST", "/v1/replicas:register", content=msgspec.json.encode(about)) is None:
            pass

    def step(self) -> None:
        """One phase of the standing task."""
        path = f"/v1/replicas/{self.name}"
        query = {"deployment": "d", "epoch": EPOCH, "have": "-", "wait_s": 0}
        answer = self.server.ask("GET", f"{path}/task", params=query)
        if answer is None:
            return
        if answer.status_code == 404:
            self.register()
            return
        task = msgspec.json.decode(answer.content, type=TaskReply).task
        if task is None:
            self.task = None
            return
        if self.task is None or (task.txn, task.action) != (self.task.txn, self.task.action):
            self.task, self.left = task, _phases(task)
        if self.left:
            self._report(path, self.left[0])

    def _report(self, path: str, phase: str) -> None:
        assert self.task is not None
        if phase == "applying":
            self.current = Current(identity=self.current.identity, clean=False, dirty_to=self.task.identity)
        if phase == "serving":
            self.current = Current(identity=self.task.identity)
        body = {"epoch": EPOCH, "txn": self.task.txn, "phase": phase, "cache_reset": phase == "serving"}
        content = msgspec.json.encode(body | {"current": self.current})
        msgspec.json.decode(content, type=ReportBody)
        if self.server.ask("POST", f"{path}:report", params={"deployment": "d"}, content=content) is not None:
            self.left = self.left[1:]


def _phases(task: Task) -> list[str]:
    match task.action:
        case "stage":
            return ["fetching", "staged"]
        case "apply":
            return list(WRITES)
        case "commit":
            return ["serving"]
        case "recover":
            return ["fetching", "staged", *WRITES, "serving"]


def hot_load(server: Server, replicas: list[Replica], body: dict[str, Any]) -> dict[str, Any]:
    """Create (again, where the answer was lost) and drive to the end."""
    content = msgspec.json.encode(body)
    while server.ask("POST", "/v1/hot_loads", content=content) is None:
        pass
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        answer = server.ask("GET", f"/v1/hot_loads/{body['hot_load_id']}")
        if answer is not None:
            found: dict[str, Any] = answer.json()
            if found.get("finished_at") is not None:
                return found
        for replica in replicas:
            replica.step()
    return found


def end_state(server: Server, found: dict[str, Any]) -> dict[str, Any]:
    view: dict[str, Any] = {}
    events: list[dict[str, Any]] = []
    while not view:
        answer = server.ask("GET", "/v1/deployments/d")
        view = answer.json() if answer is not None else {}
    while not events:
        answer = server.ask("GET", "/v1/deployments/d/ledger", params={"limit": 1000})
        events = answer.json() if answer is not None else []
    return {
        "state": found["state"],
        "head": view["head"],
        "announced": view["announced"],
        "replicas": [(one["name"], one["state"], one["current_identity"]) for one in view["replicas"]],
        "commits": [event["body"]["identity"] for event in events if event["kind"] == "Committed"],
        "kinds": [event["kind"] for event in events],
    }


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run(folder: Path) -> None:
    full = {"deployment_id": "d", "hot_load_id": "h1", "identity": "v1", "kind": "full"}
    delta = {"deployment_id": "d", "hot_load_id": "h2", "identity": "v2", "kind": "delta", "base": "v1"}
    port = free_port()
    server = Server(folder / "before", port, 0)
    replicas = [Replica(server, "a"), Replica(server, "b")]
    hot_load(server, replicas, full)
    server.stop()
    for die_after in range(1, MOST_EVENTS):
        for file in folder.glob("now*"):
            file.unlink()
        for file in folder.glob("before*"):
            shutil.copy(file, folder / file.name.replace("before", "now"))
        server = Server(folder / "now", port, die_after)
        for replica in replicas:
            replica.server, replica.current, replica.task = server, Current(identity="v1"), None
        found = hot_load(server, replicas, delta)
        print(json.dumps({"after": die_after, "deaths": server.deaths, **end_state(server, found)}), flush=True)
        server.stop()
        if not server.deaths:
            return


if __name__ == "__main__":
    run(Path(sys.argv[1]))

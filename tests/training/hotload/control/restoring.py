"""A real `groundhop hotload serve`, and replicas without an engine: what they serve is a checkpoint restored from the store."""

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
from crashes import free_port

from groundhop.training.hotload.checkpoint import open_checkpoint
from groundhop.training.hotload.control.wire import Current, Phase, RegisterBody, ReportBody, Task, TaskReply
from groundhop.training.hotload.store.materialize import materialize
from groundhop.training.hotload.store.objects import open_objects

DEPLOYMENT = "rollouts"


class Restoring(threading.Thread):
    """A replica and its agent in one thread; `served` has the digest of every snapshot that it came to serve."""

    def __init__(self, url: str, store: str, name: str, folder: Path) -> None:
        super().__init__(daemon=True)
        self.http = httpx.Client(base_url=url, timeout=60.0, headers={"Content-Type": "application/json"})
        self.store, self.name_, self.folder, self.current = store, name, folder, Current(identity=None)
        self.served: dict[str, str] = {}
        self.stopping = False
        self._ask(
            "POST",
            "/v1/replicas:register",
            RegisterBody(deployment=DEPLOYMENT, name=name, epoch=1, current=self.current),
        )

    def run(self) -> None:
        have = ""
        while not self.stopping:
            query = {"deployment": DEPLOYMENT, "epoch": 1, "have": have, "wait_s": 1}
            answer = self.http.get(f"/v1/replicas/{self.name_}/task", params=query)
            reply = msgspec.json.decode(answer.content, type=TaskReply)
            if reply.task is not None and reply.key != have:
                self._do(reply.task)
            have = reply.key

    def _do(self, task: Task) -> None:
        where = self.folder / task.identity
        if task.action in ("stage", "recover"):
            self._report("fetching", task)
            shutil.rmtree(where, ignore_errors=True)
            materialize(open_objects(self.store), task.identity, where)
            self._report("staged", task)
        if task.action in ("apply", "recover"):
            phases: tuple[Phase, ...] = ("pausing", "applying", "verifying", "prepared")
            for phase in phases:
                self._report(phase, task)
        if task.action in ("commit", "recover"):
            self.current = Current(identity=task.identity, digest=open_checkpoint(where).digest)
            self.served[task.identity] = self.current.digest
            self._report("serving", task)

    def _report(self, phase: Phase, task: Task) -> None:
        report = ReportBody(epoch=1, txn=task.txn, phase=phase, current=self.current, cache_reset=True)
        self._ask("POST", f"/v1/replicas/{self.name_}:report?deployment={DEPLOYMENT}", report)

    def _ask(self, method: str, path: str, body: object) -> None:
        self.http.request(method, path, content=msgspec.json.encode(body)).raise_for_status()


@contextmanager
def control_plane(ledger: Path, store: str) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "groundhop.cli", "hotload", "serve", "--port", str(port), "--ledger", str(ledger)]
    command += ["--deployment", DEPLOYMENT, "--store", store, "--bucket", "weights", "--path-prefix", "run1"]
    process = subprocess.Popen([*command, "--offline-after", "60"])
    url = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None:
            try:
                httpx.get(f"{url}/health")
                break
            except httpx.TransportError:
                continue
        yield url
    finally:
        process.terminate()
        process.wait()

"""cwtrain, unchanged, against the control plane, a real S3 server and replicas that restore every snapshot bit for bit.

Needs a Python that has cwtrain: `python3.12 -m venv V && V/bin/pip install cwtrain`, then GROUNDHOP_CWTRAIN_PYTHON=V/bin/python.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
from crashes import free_port
from store_servers import KEYS, use_s3

from groundhop.training.hotload.checkpoint import open_checkpoint
from groundhop.training.hotload.control.client import ControlClient
from groundhop.training.hotload.control.wire import Current, Phase, RegisterBody, ReportBody, Task, TaskReply
from groundhop.training.hotload.store.materialize import materialize
from groundhop.training.hotload.store.objects import open_objects

HERE = Path(__file__).parent
PYTHON = os.environ.get("GROUNDHOP_CWTRAIN_PYTHON", "")
DEPLOYMENT, STORE = "rollouts", "s3://weights/run1"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="GROUNDHOP_CWTRAIN_PYTHON names no Python with cwtrain (3.12 or newer)"),
]


class Restoring(threading.Thread):
    """A replica without an engine: what it `serves` is a checkpoint folder restored from the store."""

    def __init__(self, url: str, name: str, folder: Path) -> None:
        super().__init__(daemon=True)
        self.http = httpx.Client(base_url=url, timeout=60.0, headers={"Content-Type": "application/json"})
        self.name_, self.folder, self.current = name, folder, Current(identity=None)
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
            materialize(open_objects(STORE), task.identity, where)
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
def control_plane(ledger: Path) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "groundhop.cli", "hotload", "serve", "--port", str(port), "--ledger", str(ledger)]
    command += ["--deployment", DEPLOYMENT, "--store", STORE, "--bucket", "weights", "--path-prefix", "run1"]
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


def test_cwtrain_publishes_full_and_delta_meets_conflicts_and_rolls_back(
    tmp_path: Path, s3_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_s3(s3_server, monkeypatch)
    open_objects("s3://weights").put("ready", b"")
    with control_plane(tmp_path / "ledger") as url:
        replicas = [Restoring(url, name, tmp_path / name) for name in ("a", "b")]
        for replica in replicas:
            replica.start()
        script = [PYTHON, str(HERE / "cwtrain_drive.py"), url, DEPLOYMENT, s3_server, str(tmp_path / "trainer")]
        environment = {**os.environ, **KEYS, "COREWEAVE_API_TOKEN": "unused", "PYTHONPATH": ""}
        done = subprocess.run(script, capture_output=True, text=True, env=environment, timeout=500, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        view = ControlClient(url).deployment(DEPLOYMENT)
        for replica in replicas:
            replica.stopping = True
            replica.join()
    assert json.loads(done.stdout) == {
        "access": "s3://weights/run1/",
        "full": "COMPLETED",
        "delta": ["COMPLETED", ["weight_v000001", "weight_v000002"]],
        "conflict in the store": ["model.safetensors"],
        "conflict in the deployment": "failed_precondition",
        "rollback": ["COMPLETED", "weight_v000002"],
        "the same id again": True,
    }
    trained = {
        identity: open_checkpoint(tmp_path / "trainer" / folder).digest
        for identity, folder in (("weight_v000001", "one"), ("weight_v000002", "two"), ("weight_v000003", "other"))
    }
    assert [replica.served for replica in replicas] == [trained, trained]
    assert (view.head, view.announced) == ("weight_v000002", "weight_v000002")

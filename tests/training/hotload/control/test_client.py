"""Publishers and agents over real sockets: what `ControlFleet` promises a publisher, and what the table shows."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import uvicorn
from crashes import free_port

from groundhop.errors import ConflictError, CredentialError, FencedError, RefusedError, ServerError
from groundhop.training.hotload.control.app import make_app
from groundhop.training.hotload.control.client import AgentClient, ControlClient, ControlFleet
from groundhop.training.hotload.control.ledger import Ledger
from groundhop.training.hotload.control.serve import find_token
from groundhop.training.hotload.control.service import Service
from groundhop.training.hotload.control.status import HEADS, show_once
from groundhop.training.hotload.control.wire import (
    Current,
    DeploymentBody,
    HeartbeatBody,
    LeaseBody,
    Phase,
    RegisterBody,
    ReportBody,
    Task,
)
from groundhop.training.hotload.store.index import SnapshotIndex

TOKEN = "s3cret"
STEPS: dict[str, tuple[Phase, ...]] = {
    "stage": ("fetching", "staged"),
    "apply": ("pausing", "applying", "verifying", "prepared"),
    "commit": ("serving",),
    "recover": ("fetching", "staged", "pausing", "applying", "verifying", "prepared", "serving"),
}


@dataclass
class Fleet:
    """A server and two agents on one event loop in a thread."""

    url: str
    failing: set[str] = field(default_factory=set)
    seen: list[Task] = field(default_factory=list)

    async def live(self, name: str) -> None:
        agent = AgentClient(self.url, "d", name, 1, TOKEN)
        current, have = Current(identity="v0"), ""
        await agent.register(RegisterBody(deployment="d", name=name, epoch=1, current=current))
        while True:
            reply = await agent.task(have, wait_s=5)
            have = reply.key
            await agent.heartbeat(HeartbeatBody(epoch=1, current=current))
            if reply.task is None:
                continue
            self.seen.append(reply.task)
            for phase in STEPS[reply.task.action]:
                if phase == "staged" and name in self.failing:
                    phase = "failed"
                if phase == "serving":
                    current = Current(identity=reply.task.identity)
                report = ReportBody(epoch=1, txn=reply.task.txn, phase=phase, current=current, cache_reset=True)
                if phase == "failed":
                    report = ReportBody(
                        epoch=1, txn=reply.task.txn, phase=phase, current=current, error="shard 1", retry=False
                    )
                await agent.report(report)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    port = free_port()
    service = Service(Ledger(tmp_path / "ledger"))
    service.configure("d", DeploymentBody(offline_after_s=60))
    server = uvicorn.Server(uvicorn.Config(make_app(service, TOKEN), port=port, log_level="error"))
    found = Fleet(f"http://127.0.0.1:{port}")

    async def everything() -> None:
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        agents = [asyncio.create_task(found.live(name)) for name in ("a", "b")]
        await serving
        for agent in agents:
            agent.cancel()
            with contextlib.suppress(asyncio.CancelledError, ServerError):
                await agent

    thread = threading.Thread(target=lambda: asyncio.run(everything()))
    thread.start()
    client = ControlClient(found.url, TOKEN)
    while len(client.deployment("d").replicas) < 2:
        pass
    yield found
    server.force_exit = server.should_exit = True
    thread.join()


def index(identity: str, base: str | None = None, *, epoch: int = 1, operation: str = "differential") -> SnapshotIndex:
    return SnapshotIndex(
        identity=identity,
        version=int(identity[1:]),
        kind="full" if base is None else "delta",
        layout="groundhop",
        base=base,
        base_digest="",
        digest=f"digest of {identity}",
        operation=operation,  # type: ignore[arg-type]
        epoch=epoch,
    )


def test_a_fleet_holds_what_was_hot_loaded(fleet: Fleet) -> None:
    control = ControlFleet(fleet.url, "d", TOKEN)
    assert (control.clean_on("v0"), control.clean_on("v1")) == (True, False)
    control.hot_load(index("v1", "v0"), "differential")
    assert (control.clean_on("v0"), control.clean_on("v1")) == (False, True)
    control.hot_load(index("v1", "v0"), "differential")
    assert {task.identity for task in fleet.seen} == {"v1"}
    assert len(ControlClient(fleet.url, TOKEN).deployment("d").hot_loads) == 1


def test_a_replica_that_does_not_take_it_is_named_and_the_head_stays(fleet: Fleet) -> None:
    control = ControlFleet(fleet.url, "d", TOKEN)
    control.hot_load(index("v1", "v0"), "differential")
    fleet.failing.add("b")
    with pytest.raises(ServerError, match="v2 was not taken up: b: shard 1"):
        control.hot_load(index("v2", "v1"), "differential")
    assert control.clean_on("v1")


def test_an_overwrite_is_taken_though_the_head_moved(fleet: Fleet) -> None:
    control = ControlFleet(fleet.url, "d", TOKEN)
    control.hot_load(index("v1", "v0"), "differential")
    control.hot_load(index("v2", "v1"), "differential")
    with pytest.raises(ConflictError, match="expected head v1, found v2"):
        control.hot_load(index("v3", "v1"), "differential")
    control.hot_load(index("v3", "v1", operation="overwrite"), "overwrite")
    assert control.clean_on("v3")


def test_an_older_publisher_is_fenced(fleet: Fleet) -> None:
    control = ControlFleet(fleet.url, "d", TOKEN)
    control.hot_load(index("v1", "v0", epoch=5), "differential")
    with pytest.raises(FencedError, match="stale publisher epoch 4"):
        control.hot_load(index("v2", "v1", epoch=4), "differential")


def test_a_younger_control_plane_learns_of_the_base_first(fleet: Fleet) -> None:
    control = ControlFleet(fleet.url, "d", TOKEN)
    control.hot_load(index("v9", "v8", operation="overwrite"), "overwrite")
    assert [one.identity for one in ControlClient(fleet.url, TOKEN).deployment("d").hot_loads] == ["v9", "v8"]


def test_the_barrier_waits_for_the_hot_load(fleet: Fleet) -> None:
    client = ControlClient(fleet.url, TOKEN)
    assert not client.barrier("d", "v1", wait_s=0.01).ready
    ControlFleet(fleet.url, "d", TOKEN).hot_load(index("v1", "v0"), "differential")
    assert client.barrier("d", "v1").ready


def test_a_wrong_token_is_a_credential_error_and_an_absent_server_a_server_error(fleet: Fleet) -> None:
    with pytest.raises(CredentialError):
        ControlClient(fleet.url, "wrong").lease("d", LeaseBody(owner="me"))
    with pytest.raises(ServerError, match="no control plane"):
        asyncio.run(AgentClient("http://127.0.0.1:9", "d", "a", 1).task(""))


def test_a_refusal_keeps_its_code(fleet: Fleet) -> None:
    with pytest.raises(RefusedError) as caught:
        ControlClient(fleet.url, TOKEN).deployment("none")
    assert (caught.value.code, caught.value.reason) == ("not_found", "no deployment 'none'")


def test_the_table_for_scripts_has_a_line_for_each_replica(fleet: Fleet) -> None:
    ControlFleet(fleet.url, "d", TOKEN).hot_load(index("v1", "v0"), "differential")
    title, heads, *rows = show_once(ControlClient(fleet.url, TOKEN), None).splitlines()
    assert title.startswith("# d | ASYNC | head v1") and tuple(heads.split("\t")) == HEADS
    assert [row.split("\t")[:3] for row in rows] == [["a", "serving", "v1"], ["b", "serving", "v1"]]


@pytest.mark.parametrize(
    ("host", "refused"), [("127.0.0.1", False), ("::1", False), ("localhost", False), ("0.0.0.0", True)]
)
def test_other_machines_need_a_token(host: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOME_TOKEN", raising=False)
    if refused:
        with pytest.raises(CredentialError, match="set a secret in SOME_TOKEN"):
            find_token(host, "SOME_TOKEN")
    else:
        assert find_token(host, "SOME_TOKEN") is None
    monkeypatch.setenv("SOME_TOKEN", TOKEN)
    assert find_token(host, "SOME_TOKEN") == TOKEN

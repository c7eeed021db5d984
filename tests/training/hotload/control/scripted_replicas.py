"""A control plane in this process under a clock that stands still, and replicas that do what they are told, phase by phase."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from groundhop.training.hotload.control.ledger import Ledger
from groundhop.training.hotload.control.records import Deployment, HotLoad
from groundhop.training.hotload.control.service import Service
from groundhop.training.hotload.control.wire import (
    Current,
    DeploymentBody,
    HeartbeatBody,
    HeartbeatReply,
    HotLoadBody,
    HotLoadView,
    Phase,
    RegisterBody,
    ReportBody,
    ReportReply,
    Task,
)

NAME = "policy"
WRITES: tuple[Phase, ...] = ("pausing", "applying", "verifying", "prepared")


class Plane:
    """A service over a ledger file; `restart` is what a kill leaves."""

    def __init__(self, folder: Path, **config: object) -> None:
        self.path, self.time = folder / "ledger", 1000.0
        self.service = self._open()
        self.service.configure(NAME, DeploymentBody(**config))  # type: ignore[arg-type]

    def _open(self) -> Service:
        self.ledger = Ledger(self.path)
        return Service(self.ledger, clock=lambda: self.time)

    def restart(self) -> None:
        self.ledger.close()
        self.service = self._open()

    def sleep(self, seconds: float, *beating: "Replica") -> None:
        """Let time pass, by half seconds, with these replicas beating."""
        for _ in range(round(seconds * 2)):
            self.time += 0.5
            for replica in beating:
                replica.beat()
            self.service.tick()

    @property
    def state(self) -> Deployment:
        return self.service.find(NAME)

    def states(self) -> dict[str, str]:
        return {name: replica.state for name, replica in self.state.replicas.items()}

    @property
    def newest(self) -> HotLoad:
        return list(self.state.hot_loads.values())[-1]

    def kinds(self) -> list[str]:
        return [entry.kind for entry in self.service.read_ledger(NAME, 0, 100_000)]

    def create(self, identity: str, base: str | None = None, **more: object) -> HotLoadView:
        body = HotLoadBody(
            deployment_id=NAME,
            identity=identity,
            kind="full" if base is None else "delta",
            base=base,
            **more,  # type: ignore[arg-type]
        )
        return asyncio.run(self.service.create(body))[0]

    def serve(self, identity: str, *replicas: "Replica", base: str | None = None) -> HotLoadView:
        """A whole hot-load in which everybody does what they should."""
        created = self.create(identity, base)
        for _ in range(4):
            for replica in replicas:
                replica.work()
        return self.service.view_hot_load(created.hot_load_id)

    def serve_with(self, publisher: str, number: int, head: str | None, replica: "Replica") -> None:
        """A publisher's whole step from the head that it saw."""
        self.create(f"{publisher}{number}", head, expected_head=head)
        for _ in range(3):
            replica.work()


@dataclass
class Replica:
    """An agent and its engine, in a few words."""

    plane: Plane
    name: str
    current: Current = field(default_factory=lambda: Current(identity=None))
    epoch: int = 1

    def register(self) -> "Replica":
        about = RegisterBody(deployment=NAME, name=self.name, epoch=self.epoch, current=self.current)
        self.plane.service.register(about)
        return self

    def beat(self) -> HeartbeatReply:
        return self.plane.service.heartbeat(NAME, self.name, HeartbeatBody(epoch=self.epoch, current=self.current))

    @property
    def task(self) -> Task | None:
        return asyncio.run(self.plane.service.task(NAME, self.name, self.epoch, "-", 0)).task

    def report(self, phase: Phase, task: Task | None = None, **more: object) -> ReportReply:
        task = task or self.task
        body = ReportBody(
            epoch=self.epoch,
            txn=task.txn if task else "",
            phase=phase,
            current=self.current,
            **more,  # type: ignore[arg-type]
        )
        return self.plane.service.report(NAME, self.name, body)

    def dirty(self, task: Task) -> None:
        self.current = Current(identity=self.current.identity, clean=False, dirty_to=task.identity)

    def work(self, until: Phase | None = None) -> None:
        """Do the standing task, and stop after reporting `until`."""
        task = self.task
        if task is None:
            return
        phases: tuple[Phase, ...]
        match task.action:
            case "stage":
                phases = ("fetching", "staged")
            case "apply":
                phases = WRITES
            case "commit":
                phases = ("serving",)
            case "recover":
                phases = ("fetching", "staged", *WRITES, "serving")
        for phase in phases:
            if phase == "applying":
                self.dirty(task)
            if phase == "serving":
                self.current = Current(identity=task.identity)
            self.report(phase, task, cache_reset=phase == "serving")
            if phase == until:
                return


def plane_with(folder: Path, count: int, **config: object) -> tuple[Plane, list[Replica]]:
    plane = Plane(folder, **config)
    return plane, [Replica(plane, name).register() for name in "abcdefgh"[:count]]

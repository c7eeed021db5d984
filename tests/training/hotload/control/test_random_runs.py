"""Random runs with every fault there is, against the invariants of `control-plane.md` 5.5, and an end that must be reached."""

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from scripted_replicas import WRITES, Plane, Replica

from groundhop.errors import RefusedError
from groundhop.training.hotload.control.records import Committed
from groundhop.training.hotload.control.replicas import may_serve
from groundhop.training.hotload.control.wire import Current, Phase, Task

STEPS = 120
PHASES: dict[str, tuple[Phase, ...]] = {
    "stage": ("fetching", "staged"),
    "apply": WRITES,
    "commit": ("serving",),
    "recover": ("fetching", "staged", *WRITES, "serving"),
}


@dataclass
class Machine(Replica):
    """A replica with bits: which snapshot's they are, or nobody's."""

    bits: str | None = None
    paused: bool = False
    gone: bool = False
    task_in_hand: Task | None = None
    left: tuple[Phase, ...] = ()

    def restart(self) -> None:
        """The engine is killed and comes back on what it was started with; its agent is a newer one."""
        self.epoch += 1
        self.bits, self.paused, self.current, self.task_in_hand = None, False, Current(identity=None), None
        self.register()

    def step(self, dice: random.Random, faults: float) -> None:
        """One phase of the task in hand, or its failure."""
        if not self.beat().known:
            self.register()
        task = self.task
        if task is None:
            self.task_in_hand, self.paused = None, self.paused and not self.current.clean
            return
        if self.task_in_hand is None or (task.txn, task.action) != (self.task_in_hand.txn, self.task_in_hand.action):
            self.task_in_hand, self.left = task, PHASES[task.action]
        if self.left and self._enter(task, self.left[0], dice.random() < faults, dice):
            self.left = self.left[1:]

    def _enter(self, task: Task, phase: Phase, fails: bool, dice: random.Random) -> bool:
        if fails and phase in ("staged", "verifying"):
            dirty = phase == "verifying"
            self.report("dirty" if dirty else "failed", task, error="a fault", retry=dice.random() < 0.8)
            self.task_in_hand = None
            return False
        if phase == "pausing":
            self.paused = True
        if phase == "applying" and not self.report(phase, task).accepted:
            return False
        if phase == "applying":
            self.bits = "mixed"
            self.dirty(task)
        if phase == "prepared":
            self.bits = task.identity
        if phase == "serving":
            self.current, self.paused = Current(identity=task.identity), False
        return self.report(phase, task, cache_reset=phase == "serving").accepted


class Run:
    """One run: what happened is drawn from `dice`, what must hold is checked after each step."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.dice = random.Random(seed)
        quorum = self.dice.choice((None, None, 2))
        config = {"stage_timeout_s": 30, "apply_timeout_s": 20, "straggler_s": 5, "quorum": quorum}
        self.plane = Plane(folder, transition_mode=self.dice.choice(("ASYNC", "BARRIER")), **config)
        self.machines = [Machine(self.plane, name) for name in "abc"]
        for machine in self.machines:
            machine.register()
        self.version = 0
        self.seen = 0

    def live(self) -> list[Machine]:
        return [machine for machine in self.machines if not machine.gone]

    def publish(self) -> None:
        self.version += 1
        base = self.plane.state.head if self.dice.random() < 0.7 else None
        try:
            self.plane.create(f"v{self.version}", base)
        except RefusedError as error:
            assert error.code == "failed_precondition"

    def step(self, faults: float) -> None:
        roll = self.dice.random()
        if roll < 0.06:
            self.publish()
        elif roll < 0.06 + faults / 8:
            self.plane.restart()
        elif roll < 0.06 + faults / 4:
            self.dice.choice(self.machines).gone ^= True
        elif roll < 0.06 + faults / 3 and self.plane.state.open is not None and self.plane.newest.committed_at is None:
            self.plane.service.cancel(self.plane.state.open)
        elif roll < 0.06 + faults / 2:
            machine = self.dice.choice(self.machines)
            if not machine.gone:
                machine.restart()
        else:
            self.plane.time += self.dice.choice((0.0, 0.5, 2.0))
            self.plane.service.tick()
            for machine in self.live():
                machine.step(self.dice, faults)
        self.check()

    def check(self) -> None:
        state = self.plane.state
        bits = {machine.name: machine.bits for machine in self.machines}
        for machine in self.machines:
            replica = state.replicas[machine.name]
            # J-I1, J-I4: what serves by the ledger is whole, and holds what the ledger says.
            if may_serve(replica) and not machine.gone:
                assert machine.bits == replica.current.identity and machine.current.clean, machine
            if machine.bits == "mixed":
                assert not may_serve(replica)
        # J-I3: the head is the last commit's, and each commit's replicas held its bits when it was written.
        for entry in self.plane.ledger._entries("policy", self.seen, -1):
            self.seen = entry.sequence
            if isinstance(entry.event, Committed):
                self.head = entry.event.identity
                assert {bits[name] for name in entry.event.replicas if not self.machine(name).gone} <= {self.head}
        assert state.head == getattr(self, "head", None)
        # J-I5: at most one is open.
        assert [one.id for one in state.hot_loads.values() if one.finished_at is None] == (
            [state.open] if state.open else []
        )

    def machine(self, name: str) -> Machine:
        return next(machine for machine in self.machines if machine.name == name)

    def come_to_rest(self) -> None:
        for machine in self.machines:
            machine.gone = False
        for _ in range(400):
            self.plane.time += 1.0
            for machine in self.machines:
                machine.step(self.dice, 0.0)
            self.plane.service.tick()
            self.check()
            states = {replica.state for replica in self.plane.state.replicas.values()}
            if (
                self.plane.state.open is None
                and states == {"serving"}
                and self.plane.state.announced == self.plane.state.head
            ):
                return
        raise AssertionError(self.plane.states())


@pytest.mark.parametrize("seed", range(16))
def test_no_fault_breaks_an_invariant_and_all_come_to_the_head_in_the_end(tmp_path: Path, seed: int) -> None:
    run = Run(tmp_path, seed)
    for _ in range(STEPS):
        run.step(0.25)
    if run.plane.state.head is None or run.plane.state.open is None:
        run.publish()
    run.come_to_rest()
    assert {machine.bits for machine in run.machines} == {run.plane.state.head}

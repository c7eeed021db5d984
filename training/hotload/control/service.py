"""The control plane without HTTP: takes requests, writes events, wakes who waits.

All of it runs in one event loop, and between reading a state and appending an event nothing is awaited, so no two requests
act on one state. Appending waits for the disk on purpose: nothing may follow from an event that is not durable.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

from msgspec.structs import replace

from groundhop.errors import StoreError
from groundhop.training.hotload.control import admission, rules, views
from groundhop.training.hotload.control.admission import refuse
from groundhop.training.hotload.control.ledger import Ledger
from groundhop.training.hotload.control.records import (
    Configured,
    Deployment,
    Drifted,
    Event,
    Finished,
    HotLoad,
    Registered,
    Reported,
    WentOffline,
)
from groundhop.training.hotload.control.states import evolve
from groundhop.training.hotload.control.wire import (
    BarrierReply,
    DeploymentBody,
    DeploymentView,
    HeartbeatBody,
    HeartbeatReply,
    HotLoadBody,
    HotLoadView,
    LeaseBody,
    LeaseReply,
    LedgerEntry,
    RegisterBody,
    RegisterReply,
    ReplicaView,
    ReportBody,
    ReportReply,
    Task,
    TaskReply,
)

logger = logging.getLogger(__name__)

LONGEST_POLL_S = 60.0
LONGEST_SLEEP_S = 3600.0
RETRY_S = 1.0
DRIFT_BEATS = 2
"""Beats in a row that must disagree with the ledger before they are believed: one may have crossed a report."""


class Snapshot(NamedTuple):
    """What a store says about a snapshot; empty where it does not say."""

    index_sha256: str
    digest: str
    version: int | None


Look = Callable[[DeploymentBody, HotLoadBody], Awaitable[Snapshot | None]]
"""Looks a snapshot up in the deployment's store, None where there is none to look into. Raises: RefusedError for missing files."""


async def look_nowhere(config: DeploymentBody, body: HotLoadBody) -> Snapshot | None:
    """Trust the publisher; agents check all files before they touch a weight."""
    return None


_BEGAN = time.time() - time.monotonic()


def steady_time() -> float:
    """Unix time that never jumps while the process lives."""
    return _BEGAN + time.monotonic()


class Service:
    """Deployments, their ledger, and everybody who waits for a change."""

    def __init__(self, ledger: Ledger, *, look: Look = look_nowhere, clock: Callable[[], float] = steady_time) -> None:
        """Take up what the ledger holds: attempts without a commit are aborted, those with one roll forward."""
        self._ledger = ledger
        self._look = look
        self._clock = clock
        self._deployments = ledger.load()
        self._owner = {id_: name for name, found in self._deployments.items() for id_ in found.hot_loads}
        self._beats: dict[tuple[str, str], float] = {}
        self._strange: dict[tuple[str, str], int] = {}
        self._changed: dict[str, asyncio.Event] = {}
        self._hurry = asyncio.Event()
        for name, found in list(self._deployments.items()):
            # Nobody could beat while there was nobody to listen.
            self._beats |= {(name, replica): clock() for replica in found.replicas}
            event = rules.after_restart(found)
            if event is not None:
                self._append(name, event)
            self._follow(name)

    # --- publishers and readers

    def configure(self, name: str, config: DeploymentBody) -> DeploymentView:
        """Create or reconfigure. Raises: RefusedError while a hot-load runs."""
        found = self._deployments.get(name)
        if found is not None and found.open is not None and found.config != config:
            raise refuse("failed_precondition", f"hot-load {found.open} is already in progress on {name}")
        if found is None:
            self._write(name, Configured(config=config), Deployment(name=name, config=config))
        elif found.config != config:
            self._append(name, Configured(config=config))
        self._follow(name)
        return self.view(name)

    def names(self) -> list[str]:
        """All deployments."""
        return sorted(self._deployments)

    def find(self, name: str) -> Deployment:
        """A deployment's state. Raises: RefusedError, `not_found`."""
        found = self._deployments.get(name)
        if found is None:
            raise refuse("not_found", f"no deployment {name!r}")
        return found

    def find_hot_load(self, hot_load_id: str) -> tuple[Deployment, HotLoad]:
        """A hot-load and its deployment. Raises: RefusedError, `not_found`."""
        owner = self._owner.get(hot_load_id)
        if owner is None:
            raise refuse("not_found", f"no hot-load {hot_load_id!r}")
        deployment = self._deployments[owner]
        return deployment, deployment.hot_loads[hot_load_id]

    def view(self, name: str) -> DeploymentView:
        """A deployment for people. Raises: RefusedError, `not_found`."""
        beats = {replica: beat for (deployment, replica), beat in self._beats.items() if deployment == name}
        return views.view_deployment(self.find(name), self._clock(), beats)

    def view_hot_load(self, hot_load_id: str) -> HotLoadView:
        """A hot-load. Raises: RefusedError, `not_found`."""
        return views.view_hot_load(*self.find_hot_load(hot_load_id))

    def view_replicas(self, hot_load_id: str) -> tuple[ReplicaView, ...]:
        """The replicas of a hot-load. Raises: RefusedError, `not_found`."""
        return views.view_hot_load_replicas(*self.find_hot_load(hot_load_id), self._clock())

    def list_hot_loads(self, name: str | None, identity: str | None) -> list[HotLoad]:
        """Hot-loads, newest first."""
        chosen = self._deployments.values() if name is None else [self.find(name)]
        found = [hot_load for one in chosen for hot_load in one.hot_loads.values()]
        wanted = [hot_load for hot_load in found if identity in (None, hot_load.body.identity)]
        return sorted(wanted, key=lambda hot_load: hot_load.created_at, reverse=True)

    def read_ledger(self, name: str, after: int, limit: int) -> list[LedgerEntry]:
        """The deployment's events. Raises: RefusedError, `not_found`."""
        self.find(name)
        return self._ledger.read(name, after, limit)

    def lease(self, name: str, body: LeaseBody) -> LeaseReply:
        """Take or renew the publisher's lease. Raises: RefusedError."""
        now = self._clock()
        event = admission.lease(self.find(name), body, now)
        deployment = self._append(name, event)
        return LeaseReply(epoch=event.epoch, ttl_s=event.until - now, head=deployment.head)

    async def create(self, asked: HotLoadBody) -> tuple[HotLoadView, bool]:
        """Start a hot-load, or find the one that the same request started; the flag says which. Raises: RefusedError."""
        replay = self._replay(asked)
        if replay is None:
            seen = await self._look(self.find(asked.deployment_id).config, asked)
            # Another request with this id may have come in meanwhile.
            replay = self._replay(asked)
        if replay is not None:
            return self.view_hot_load(replay.id), True
        body = asked if seen is None else _fill(asked, seen)
        hot_load_id = asked.hot_load_id or str(uuid.uuid4())
        event = admission.admit(self.find(asked.deployment_id), asked, body, hot_load_id, self._clock())
        self._append(asked.deployment_id, event)
        self._owner[hot_load_id] = asked.deployment_id
        self._follow(asked.deployment_id)
        return self.view_hot_load(hot_load_id), False

    def cancel(self, hot_load_id: str) -> HotLoadView:
        """Give a hot-load up; nothing is rolled back. Raises: RefusedError once it is committed or over."""
        deployment, hot_load = self.find_hot_load(hot_load_id)
        if hot_load.state != "canceled":
            if hot_load.committed_at is not None or hot_load.finished_at is not None:
                how = "committed" if hot_load.committed_at is not None else hot_load.state
                raise refuse("failed_precondition", f"hot-load {hot_load_id} is {how}: start another one to go back")
            self._append(
                deployment.name, Finished(id=hot_load_id, state="canceled", reason="canceled", code="canceled")
            )
            self._follow(deployment.name)
        return self.view_hot_load(hot_load_id)

    async def wait_hot_load(self, hot_load_id: str, wait_s: float) -> HotLoadView:
        """A hot-load, once it is over or after `wait_s`."""
        deployment, _ = self.find_hot_load(hot_load_id)
        await self._until(deployment.name, lambda found: found.hot_loads[hot_load_id].finished_at is not None, wait_s)
        return self.view_hot_load(hot_load_id)

    async def barrier(self, name: str, identity: str, wait_s: float) -> BarrierReply:
        """Wait until every live replica serves `identity` with clean caches, or `wait_s`. Raises: RefusedError."""
        self.find(name)
        ready = await self._until(name, lambda found: rules.is_open(found, identity), wait_s)
        found = self.find(name)
        serving = sorted(key for key, replica in found.replicas.items() if replica.state == "serving")
        waiting = rules.waiting_for(found, identity)
        return BarrierReply(ready=ready, identity=identity, replicas=tuple(serving), waiting_for=waiting)

    # --- agents

    def register(self, about: RegisterBody) -> RegisterReply:
        """An agent takes charge of a replica. Raises: RefusedError, `aborted` for an agent that a newer one replaced."""
        deployment = self.find(about.deployment)
        known = deployment.replicas.get(about.name)
        if known is not None and known.about.epoch > about.epoch:
            raise refuse("aborted", f"a newer agent of {about.name} has registered: this one must stop")
        self._beat(about.deployment, about.name)
        if known is None or known.about != about or known.state == "offline" or known.current != about.current:
            self._append(about.deployment, Registered(about=about))
            self._follow(about.deployment)
        config = deployment.config
        return RegisterReply(
            heartbeat_s=config.heartbeat_s,
            offline_after_s=config.offline_after_s,
            store=config.store,
            head=self.find(about.deployment).head,
        )

    def heartbeat(self, deployment: str, name: str, body: HeartbeatBody) -> HeartbeatReply:
        """A replica lives. Raises: RefusedError as `register`."""
        if not self._is_known(deployment, name, body.epoch):
            return HeartbeatReply(known=False, task_key="")
        self._beat(deployment, name)
        replica = self.find(deployment).replicas[name]
        idle = replica.state in ("serving", "lagging", "dirty", "recovering")
        strange = idle and (replica.current.identity, replica.current.clean) != (
            body.current.identity,
            body.current.clean,
        )
        self._strange[deployment, name] = self._strange.get((deployment, name), 0) + 1 if strange else 0
        if self._strange[deployment, name] >= DRIFT_BEATS:
            self._strange[deployment, name] = 0
            self._append(deployment, Drifted(name=name, current=body.current))
            self._follow(deployment)
        return HeartbeatReply(known=True, task_key=rules.key_of(self._task(deployment, name)))

    async def task(self, deployment: str, name: str, epoch: int, have: str, wait_s: float) -> TaskReply:
        """A replica's task, once it is another than `have` or after `wait_s`. Raises: RefusedError, `not_found` where unknown."""
        if not self._is_known(deployment, name, epoch):
            raise refuse("not_found", f"replica {name} is not registered")
        self._beat(deployment, name)

        def differs(_: Deployment) -> bool:
            return rules.key_of(self._task(deployment, name)) != have or not self._is_known(deployment, name, epoch)

        await self._until(deployment, differs, wait_s)
        self._is_known(deployment, name, epoch)
        task = self._task(deployment, name)
        return TaskReply(key=rules.key_of(task), task=task)

    def report(self, deployment: str, name: str, body: ReportBody) -> ReportReply:
        """A replica went on. Raises: RefusedError as `register`."""
        accepted = False
        if self._is_known(deployment, name, body.epoch):
            self._beat(deployment, name)
            found = self.find(deployment)
            before = found.replicas[name]
            if body.txn and (body.txn, body.phase) == (before.txn, before.state):
                # Its answer was lost, and it came again.
                accepted = True
            elif rules.accepts(found, name, body):
                accepted = True
                self._append(deployment, Reported(name=name, report=body))
                self._follow(deployment)
        return ReportReply(accepted=accepted, task_key=rules.key_of(self._task(deployment, name)))

    # --- time

    async def run(self) -> None:
        """Notice silence and run-out times; sleeps until the next of them. Runs until cancelled."""
        while True:
            self._hurry.clear()
            try:
                wake_at = self.tick()
            except StoreError:
                # Nothing changed; what is due stays due. The disk may get its space back.
                logger.exception("control: the ledger cannot be written, trying again in %.0f s", RETRY_S)
                await asyncio.sleep(RETRY_S)
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), max(wake_at - self._clock(), 0.0))

    def tick(self) -> float:
        """Do what the time calls for; gives the time at which to look again."""
        now = self._clock()
        wake_at = now + LONGEST_SLEEP_S
        for name in self.names():
            patience = self._deployments[name].config.offline_after_s
            for key, replica in list(self._deployments[name].replicas.items()):
                silent_at = self._beats.setdefault((name, key), now) + patience
                if replica.state != "offline" and silent_at <= now:
                    logger.warning("control: %s/%s is silent for %.1f s: offline", name, key, patience)
                    self._append(name, WentOffline(name=key))
                elif replica.state != "offline":
                    wake_at = min(wake_at, silent_at)
            self._follow(name)
            self._wake(name)
            later = [moment for moment in rules.deadlines(self._deployments[name]) if moment > now]
            wake_at = min([wake_at, *later])
        return wake_at

    # --- inside

    def _replay(self, asked: HotLoadBody) -> HotLoad | None:
        if asked.hot_load_id is None or asked.hot_load_id not in self._owner:
            return None
        return admission.find_replay(self.find_hot_load(asked.hot_load_id)[1], asked)

    def _is_known(self, deployment: str, name: str, epoch: int) -> bool:
        replica = self.find(deployment).replicas.get(name)
        if replica is not None and replica.about.epoch > epoch:
            raise refuse("aborted", f"a newer agent of {name} has registered: this one must stop")
        return replica is not None and replica.about.epoch == epoch and replica.state != "offline"

    def _beat(self, deployment: str, name: str) -> None:
        self._beats[deployment, name] = self._clock()

    def _task(self, deployment: str, name: str) -> Task | None:
        found = self._deployments[deployment]
        return rules.task_of(found, name, self._clock()) if name in found.replicas else None

    def _append(self, name: str, event: Event) -> Deployment:
        return self._write(name, event, self._deployments[name])

    def _write(self, name: str, event: Event, before: Deployment) -> Deployment:
        """THE way in which anything changes: first the ledger, then the state, then everybody who waits."""
        now = self._clock()
        sequence = self._ledger.append(name, event, now)
        after = evolve(before, event, now)
        self._deployments[name] = after
        with contextlib.suppress(StoreError):
            self._ledger.save(after, sequence)
        self._wake(name)
        self._hurry.set()
        return after

    def _follow(self, name: str) -> None:
        while (event := rules.follow(self._deployments[name], self._clock())) is not None:
            logger.info("control: %s: %s", name, _say(event))
            self._append(name, event)

    def _wake(self, name: str) -> None:
        waiting = self._changed.pop(name, None)
        if waiting is not None:
            waiting.set()

    async def _until(self, name: str, claim: Callable[[Deployment], bool], wait_s: float) -> bool:
        """Wait for a claim about a deployment to hold; whether it does."""
        loop = asyncio.get_running_loop()
        end = loop.time() + min(max(wait_s, 0.0), LONGEST_POLL_S)
        while not claim(self.find(name)):
            left = end - loop.time()
            if left <= 0:
                return False
            changed = self._changed.setdefault(name, asyncio.Event())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), left)
        return True


def _fill(asked: HotLoadBody, seen: Snapshot) -> HotLoadBody:
    """What was asked, completed by what the store says. Raises: RefusedError where the two differ."""
    pairs: Iterable[tuple[str, object, object]] = (
        ("index_sha256", asked.index_sha256, seen.index_sha256),
        ("digest", asked.digest, seen.digest),
        ("version", asked.version, seen.version),
    )
    for field, said, found in pairs:
        if said not in ("", None) and found not in ("", None) and said != found:
            raise refuse("aborted", f"{field} of {asked.identity} is {found} in the store, the request says {said}")
    return replace(
        asked,
        index_sha256=asked.index_sha256 or seen.index_sha256,
        digest=asked.digest or seen.digest,
        version=asked.version if asked.version is not None else seen.version,
    )


def _say(event: Event) -> str:
    fields = [
        f"{key}={getattr(event, key)}" for key in ("identity", "state", "name", "txn", "reason") if hasattr(event, key)
    ]
    return " ".join([type(event).__name__.lower(), *fields])

"""What publishers, readers and agents may ask of a control plane, without HTTP."""

import uuid
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

from msgspec.structs import replace

from groundhop.training.hotload.control import admission, rules, views
from groundhop.training.hotload.control.admission import refuse
from groundhop.training.hotload.control.core import Core, steady_time
from groundhop.training.hotload.control.ledger import Ledger
from groundhop.training.hotload.control.records import (
    Configured,
    Deployment,
    Drifted,
    Finished,
    HotLoad,
    Registered,
    Reported,
)
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


class Service(Core):
    """Requests of publishers, readers and agents."""

    def __init__(self, ledger: Ledger, *, look: Look = look_nowhere, clock: Callable[[], float] = steady_time) -> None:
        """Take up what the ledger holds, see `Core`."""
        super().__init__(ledger, clock)
        self._look = look
        self._owner = {id_: name for name, found in self._deployments.items() for id_ in found.hot_loads}
        self._strange: dict[tuple[str, str], int] = {}

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
        replay, seen = self._replay(asked), None
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
        # That a dirty replica is whole again is a report's to say, after its digest was verified; not a beat's.
        idle = replica.state in ("serving", "lagging", "recovering")
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

    def _replay(self, asked: HotLoadBody) -> HotLoad | None:
        if asked.hot_load_id is None or asked.hot_load_id not in self._owner:
            return None
        return admission.find_replay(self.find_hot_load(asked.hot_load_id)[1], asked)

    def _is_known(self, deployment: str, name: str, epoch: int) -> bool:
        replica = self.find(deployment).replicas.get(name)
        if replica is not None and replica.about.epoch > epoch:
            raise refuse("aborted", f"a newer agent of {name} has registered: this one must stop")
        return replica is not None and replica.about.epoch == epoch and replica.state != "offline"

    def _task(self, deployment: str, name: str) -> Task | None:
        found = self._deployments[deployment]
        return rules.task_of(found, name, self._clock()) if name in found.replicas else None


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

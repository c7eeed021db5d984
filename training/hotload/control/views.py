"""What people and publishers get to see of a deployment: pure functions from the ledger's state to the wire."""

from groundhop.training.hotload.control.records import Deployment, HotLoad, Replica
from groundhop.training.hotload.control.replicas import public_state
from groundhop.training.hotload.control.rules import chain_of
from groundhop.training.hotload.control.states import is_required
from groundhop.training.hotload.control.wire import DeploymentView, HotLoadView, ReplicaView

NEWEST = 10
"""Hot-loads in a deployment's view."""


def view_replica(deployment: Deployment, replica: Replica, now: float, beat_age_s: float) -> ReplicaView:
    """A replica, seen from the deployment."""
    name = replica.about.name
    required = is_required(deployment, name)
    target = replica.target if required else deployment.head
    ended = replica.finished_at if replica.finished_at is not None else now
    return ReplicaView(
        name=name,
        zone=replica.about.zone,
        engine=replica.about.engine,
        state=replica.state,
        public_state=public_state(replica, target),
        current_identity=replica.current.identity,
        target_identity=target,
        digest=replica.current.digest,
        plan_digest=replica.plan_digest,
        layout_signature=replica.about.layout_signature,
        required=required,
        detail=replica.detail,
        bytes=replica.bytes,
        seconds=max(ended - replica.started_at, 0.0) if replica.started_at is not None else 0.0,
        beat_age_s=beat_age_s,
        updated_at=replica.updated_at,
        started_at=replica.started_at,
        finished_at=replica.finished_at,
    )


def view_hot_load(deployment: Deployment, hot_load: HotLoad) -> HotLoadView:
    """A hot-load with its chain."""
    body = hot_load.body
    return HotLoadView(
        hot_load_id=hot_load.id,
        deployment_id=deployment.name,
        identity=body.identity,
        version=body.version,
        kind=body.kind,
        base=body.base,
        operation=body.operation,
        prompt_cache=body.prompt_cache or "preserve",
        requests=body.requests or "keep",
        state=hot_load.state,
        committed=hot_load.committed_at is not None,
        attempt=hot_load.attempt.number,
        reason=hot_load.reason,
        code=hot_load.code,
        chain=chain_of(deployment, hot_load),
        required=hot_load.attempt.required,
        created_at=hot_load.created_at,
        updated_at=hot_load.updated_at,
        finished_at=hot_load.finished_at,
    )


def view_hot_load_replicas(deployment: Deployment, hot_load: HotLoad, now: float) -> tuple[ReplicaView, ...]:
    """The replicas of one hot-load by name: as they are while it runs, as it left them when it is over."""
    if hot_load.finished_at is None:
        names = [name for name in hot_load.attempt.required if name in deployment.replicas]
        return tuple(view_replica(deployment, deployment.replicas[name], now, 0.0) for name in sorted(names))
    target = hot_load.body.identity
    return tuple(
        ReplicaView(
            name=outcome.name,
            zone=found.about.zone if (found := deployment.replicas.get(outcome.name)) else "",
            state="serving" if outcome.state == "ready" else "dirty",
            public_state=outcome.state,
            current_identity=outcome.current_identity,
            target_identity=target,
            detail=outcome.detail,
            updated_at=outcome.updated_at,
            started_at=outcome.started_at,
            finished_at=outcome.finished_at,
        )
        for outcome in sorted(hot_load.outcome, key=lambda outcome: outcome.name)
    )


def view_deployment(deployment: Deployment, now: float, beats: dict[str, float]) -> DeploymentView:
    """A deployment; `beats` are the times of the replicas' last heartbeats."""
    replicas = sorted(deployment.replicas.items())
    newest = list(deployment.hot_loads.values())[: -NEWEST - 1 : -1]
    leased = deployment.lease_owner is not None and deployment.lease_until > now
    return DeploymentView(
        name=deployment.name,
        config=deployment.config,
        epoch=deployment.epoch,
        lease_owner=deployment.lease_owner if leased else None,
        lease_until=deployment.lease_until if leased else None,
        head=deployment.head,
        announced=deployment.announced,
        salt=deployment.announced or "",
        open_hot_load=deployment.open,
        replicas=tuple(
            view_replica(deployment, replica, now, max(now - beats.get(name, now), 0.0)) for name, replica in replicas
        ),
        hot_loads=tuple(view_hot_load(deployment, hot_load) for hot_load in newest),
        now=now,
    )

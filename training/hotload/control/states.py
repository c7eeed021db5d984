"""How a deployment changes: `evolve(state, event, time) -> state`, pure and total over the ledger's events.

Only `Committed` moves the head. What one replica goes through is in `replicas.py`.
"""

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from groundhop.training.hotload.control.records import (
    Aborted,
    Announced,
    Attempt,
    Committed,
    Configured,
    Created,
    Deployment,
    Drifted,
    Event,
    Finished,
    Forgotten,
    HotLoad,
    LeaseTaken,
    Registered,
    Replica,
    Reported,
    Retried,
    TimedOut,
    Went,
    WentOffline,
)
from groundhop.training.hotload.control.replicas import (
    STAGING,
    WRITING,
    give_up,
    outcome_of,
    settle,
    take,
    time_out,
)
from groundhop.training.hotload.control.wire import ReportBody

OUTCOMES_KEPT = 200
"""Hot-loads of which the outcome on each replica is kept."""


def evolve(deployment: Deployment, event: Event, time: float) -> Deployment:
    """The deployment after `event`, which happened at `time` (Unix)."""
    match event:
        case Configured(config=config):
            return replace(deployment, config=config)
        case LeaseTaken(owner=owner, epoch=epoch, until=until):
            return replace(deployment, lease_owner=owner, epoch=max(epoch, deployment.epoch), lease_until=until)
        case Created():
            return _create(deployment, event, time)
        case Registered():
            return _register(deployment, event, time)
        case Reported(name=name, report=report):
            return _put(deployment, name, _take(deployment, name, report, time))
        case Drifted(name=name, current=current):
            replica = replace(deployment.replicas[name], current=current, txn="", cache_reset=False, updated_at=time)
            return _put(deployment, name, settle(replica, deployment.head, "lagging"))
        case WentOffline(name=name):
            replica = deployment.replicas[name]
            return _put(
                deployment,
                name,
                replace(replica, state="offline", before=replica.state, updated_at=time, detail="no heartbeat"),
            )
        case Forgotten(name=name):
            left = {key: replica for key, replica in deployment.replicas.items() if key != name}
            return replace(deployment, replicas=left)
        case TimedOut(name=name, reason=reason):
            return _put(deployment, name, time_out(deployment.replicas[name], reason, deployment.head, time))
        case Went():
            return _go(deployment, time)
        case Committed():
            return _commit(deployment, event, time)
        case Aborted():
            return _abort(deployment, event, time)
        case Retried():
            return _retry(deployment, event, time)
        case Finished():
            return _finish(deployment, event, time)
        case Announced(identity=identity):
            return replace(deployment, announced=identity)


def open_hot_load(deployment: Deployment) -> HotLoad | None:
    """The hot-load that runs, if one does."""
    return None if deployment.open is None else deployment.hot_loads[deployment.open]


def txn_of(deployment: Deployment, name: str) -> str:
    """Under which transaction a replica works now; empty where it has nothing to do.

    It names the attempt and the replica's try, so that work of an earlier one is never taken for this one's.
    """
    replica = deployment.replicas[name]
    hot_load = open_hot_load(deployment)
    if hot_load is not None and name in hot_load.attempt.required and not replica.hopeless:
        txn = f"{hot_load.attempt.txn}-{replica.tries}"
        # After the commit, who is at work under the attempt goes on; who is not comes to the head by any way.
        if hot_load.committed_at is None or (replica.txn == txn and replica.state in STAGING | WRITING):
            return txn
    if deployment.head is not None and replica.state != "serving":
        return f"recover-{deployment.head_id}-{replica.tries}"
    return ""


def is_required(deployment: Deployment, name: str) -> bool:
    """Whether the open hot-load waits for this replica."""
    hot_load = open_hot_load(deployment)
    return hot_load is not None and name in hot_load.attempt.required


def _put(deployment: Deployment, name: str, replica: Replica) -> Deployment:
    changed = replace(deployment, replicas={**deployment.replicas, name: replica})
    hot_load = open_hot_load(changed)
    if hot_load is not None and hot_load.state == "pending" and replica.txn == txn_of(changed, name) != "":
        return _put_hot_load(changed, replace(hot_load, state="in_progress", updated_at=replica.updated_at))
    return changed


def _put_hot_load(deployment: Deployment, hot_load: HotLoad) -> Deployment:
    return replace(deployment, hot_loads={**deployment.hot_loads, hot_load.id: hot_load})


def _take(deployment: Deployment, name: str, report: ReportBody, time: float) -> Replica:
    return take(deployment.replicas[name], report, _target(deployment, name), deployment.head, time)


def _target(deployment: Deployment, name: str) -> str | None:
    hot_load = open_hot_load(deployment)
    if hot_load is not None and is_required(deployment, name):
        return hot_load.body.identity
    return deployment.head


def _register(deployment: Deployment, event: Registered, time: float) -> Deployment:
    about = event.about
    known = deployment.replicas.get(about.name)
    fields: dict[str, Any] = {
        "about": about,
        "current": about.current,
        "updated_at": time,
        "plan_digest": about.plan_digest,
    }
    if known is None:
        replica = Replica(state="recovering", target=deployment.head, **fields)
        return _put(deployment, about.name, settle(replica, deployment.head, "recovering"))
    same_agent = known.about.epoch == about.epoch
    before = known.before if known.state == "offline" else known.state
    if same_agent and before == "prepared" and about.current.dirty_to == deployment.head == known.target:
        # Its acknowledgement stands in the ledger and the commit came: it rolls forward.
        return _put(deployment, about.name, replace(known, state="prepared", about=about, updated_at=time, detail=""))
    # Under another try, and so another key: what was in hand is over, and its agent is told to do it again. And an agent that
    # starts again and again must not keep an attempt waiting for ever.
    anew = replace(known, txn="", tries=known.tries + 1, cache_reset=False, **fields)
    replica = settle(anew, deployment.head, "recovering")
    if replica.state == "serving" and not is_required(deployment, about.name):
        replica = replace(replica, tries=0, detail="")
    return _put(deployment, about.name, replica)


def _begin(deployment: Deployment, names: Iterable[str], identity: str, time: float) -> Deployment:
    """Set replicas to an attempt. One that was on its way to the head leaves it: what it staged or wrote is not this attempt's."""
    before = {name: deployment.replicas[name] for name in names}
    fresh = {
        name: replace(
            give_up(replica, replica.target or identity, deployment.head, time),
            tries=0,
            hopeless=False,
            not_before=0.0,
            target=identity,
            started_at=time,
            finished_at=None,
            bytes=0,
        )
        for name, replica in before.items()
    }
    return replace(deployment, replicas={**deployment.replicas, **fresh})


def _create(deployment: Deployment, event: Created, time: float) -> Deployment:
    hot_load = HotLoad(
        id=event.id,
        body=event.body,
        asked=event.asked,
        link=event.link,
        deltas=event.deltas,
        state="pending",
        attempt=Attempt(txn=event.txn, number=1, required=event.required, started_at=time),
        created_at=time,
        updated_at=time,
    )
    epoch = max(deployment.epoch, event.body.publisher_epoch or 0)
    opened = replace(_put_hot_load(deployment, hot_load), open=event.id, epoch=epoch)
    return _begin(opened, event.required, event.body.identity, time)


def _go(deployment: Deployment, time: float) -> Deployment:
    hot_load = open_hot_load(deployment)
    assert hot_load is not None
    staged = tuple(name for name in hot_load.attempt.required if deployment.replicas[name].state == "staged")
    attempt = replace(hot_load.attempt, go_at=time, go_with=staged)
    return _put_hot_load(deployment, replace(hot_load, attempt=attempt, updated_at=time))


def _commit(deployment: Deployment, event: Committed, time: float) -> Deployment:
    hot_load = deployment.hot_loads[event.id]
    moved = replace(
        _put_hot_load(deployment, replace(hot_load, committed_at=time, updated_at=time, state="in_progress")),
        head=event.identity,
        head_id=event.id,
        committed={**deployment.committed, event.identity: event.id},
    )
    behind = {
        name: replace(replica, state="lagging")
        for name, replica in moved.replicas.items()
        if replica.state == "serving" and replica.current.identity != event.identity
    }
    return replace(moved, replicas={**moved.replicas, **behind})


def _give_up(deployment: Deployment, time: float) -> Deployment:
    """What an abort does to the replicas of the open attempt."""
    hot_load = open_hot_load(deployment)
    assert hot_load is not None
    target, head = hot_load.body.identity, deployment.head
    changed = {name: give_up(deployment.replicas[name], target, head, time) for name in hot_load.attempt.required}
    return replace(deployment, replicas={**deployment.replicas, **changed})


def _abort(deployment: Deployment, event: Aborted, time: float) -> Deployment:
    changed = _give_up(deployment, time)
    hot_load = open_hot_load(changed)
    assert hot_load is not None
    failures = hot_load.failures + (1 if event.counts else 0)
    attempt = replace(hot_load.attempt, txn="", go_at=None)
    return _put_hot_load(
        changed,
        replace(
            hot_load,
            attempt=attempt,
            failures=failures,
            again=event.again,
            reason=event.reason,
            code=event.code,
            updated_at=time,
        ),
    )


def _retry(deployment: Deployment, event: Retried, time: float) -> Deployment:
    hot_load = deployment.hot_loads[event.id]
    attempt = Attempt(txn=event.txn, number=event.number, required=event.required, started_at=time)
    opened = _put_hot_load(deployment, replace(hot_load, attempt=attempt, updated_at=time))
    return _begin(opened, event.required, hot_load.body.identity, time)


def _finish(deployment: Deployment, event: Finished, time: float) -> Deployment:
    if deployment.hot_loads[event.id].committed_at is None:
        deployment = _give_up(deployment, time)
    hot_load = deployment.hot_loads[event.id]
    outcome = tuple(outcome_of(deployment.replicas[name], hot_load.body.identity) for name in hot_load.attempt.required)
    over = replace(
        hot_load,
        state=event.state,
        reason=event.reason,
        code=event.code,
        outcome=outcome,
        updated_at=time,
        finished_at=time,
    )
    kept = _put_hot_load(deployment, over).hot_loads
    oldest = [found for found in kept.values() if found.outcome][:-OUTCOMES_KEPT]
    kept = kept | {found.id: replace(found, outcome=()) for found in oldest}
    free = {
        name: replace(replica, hopeless=False, target=deployment.head if replica.state != "serving" else replica.target)
        for name, replica in deployment.replicas.items()
    }
    return replace(deployment, hot_loads=kept, replicas=free, open=None)

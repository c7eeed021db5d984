"""What must happen next in a deployment, and what a replica has to do: pure functions of the state and the time."""

from collections.abc import Iterator
from typing import NamedTuple

from groundhop.training.hotload.control.records import (
    Aborted,
    Announced,
    Committed,
    Deployment,
    Event,
    Finished,
    Forgotten,
    HotLoad,
    Replica,
    Retried,
    TimedOut,
    Went,
)
from groundhop.training.hotload.control.replicas import WRITING
from groundhop.training.hotload.control.states import is_required, open_hot_load, txn_of
from groundhop.training.hotload.control.wire import Action, Code, ReportBody, SnapshotRef, Task


class Tally(NamedTuple):
    """The replicas of an attempt, each in one of four piles; `staged` and `unstaged` are of the working ones."""

    prepared: tuple[str, ...]
    working: tuple[str, ...]
    broken: tuple[str, ...]
    offline: tuple[str, ...]
    staged: tuple[str, ...]
    unstaged: tuple[str, ...]


def tally(deployment: Deployment, hot_load: HotLoad) -> Tally:
    """Count an attempt's replicas."""
    piles: dict[str, list[str]] = {key: [] for key in Tally._fields}
    for name in hot_load.attempt.required:
        replica = deployment.replicas[name]
        pile = _pile(deployment, replica)
        piles[pile].append(name)
        if pile == "working" and replica.state not in WRITING:
            piles["staged" if replica.state == "staged" else "unstaged"].append(name)
    return Tally(**{key: tuple(names) for key, names in piles.items()})


def follow(deployment: Deployment, now: float) -> Event | None:
    """The next event that the state and the time call for; None when there is none. Call again after each."""
    hot_load = open_hot_load(deployment)
    if hot_load is not None:
        if hot_load.committed_at is not None:
            event: Event | None = _complete(deployment, hot_load, now)
        elif not hot_load.attempt.txn:
            event = _try_again(deployment, hot_load)
        else:
            event = _proceed(deployment, hot_load, now)
        if event is not None:
            return event
    if deployment.head is not None and deployment.announced != deployment.head and _all_serve(deployment):
        return Announced(identity=deployment.head)
    return _forget(deployment, now)


def after_restart(deployment: Deployment) -> Event | None:
    """What a control plane that starts owes an attempt that it finds: with a commit in the ledger none, else an abort."""
    hot_load = open_hot_load(deployment)
    if hot_load is None or hot_load.committed_at is not None or not hot_load.attempt.txn:
        return None
    reason = "the control plane restarted before the commit"
    return Aborted(txn=hot_load.attempt.txn, reason=reason, code="unavailable", counts=False, again=True)


def deadlines(deployment: Deployment) -> Iterator[float]:
    """Times at which `follow` or `task_of` may say something else though no event came."""
    config = deployment.config
    for replica in deployment.replicas.values():
        if replica.state == "offline":
            yield replica.updated_at + config.forget_after_s
        else:
            # One that serves waits, too, after it failed to fetch.
            yield replica.not_before
    hot_load = open_hot_load(deployment)
    if hot_load is None:
        return
    if hot_load.committed_at is not None:
        yield hot_load.committed_at + config.apply_timeout_s
        return
    yield hot_load.attempt.started_at + config.stage_timeout_s
    if hot_load.attempt.go_at is not None:
        yield hot_load.attempt.go_at + config.apply_timeout_s
    if config.quorum is not None:
        yield from (
            deployment.replicas[name].updated_at + config.straggler_s
            for name in hot_load.attempt.required
            if deployment.replicas[name].state in ("staged", "prepared")
        )


def eligible(deployment: Deployment) -> tuple[str, ...]:
    """Whom an attempt that begins now requires: all that live, but not those that are only now joining."""
    live = [name for name, replica in deployment.replicas.items() if replica.state not in ("offline", "recovering")]
    return tuple(sorted(live))


def task_of(deployment: Deployment, name: str, now: float) -> Task | None:
    """What a replica has to do now."""
    replica = deployment.replicas[name]
    txn = txn_of(deployment, name)
    if not txn or replica.state == "offline" or now < replica.not_before:
        return None
    hot_load = open_hot_load(deployment)
    if hot_load is not None and hot_load.attempt.txn and txn.startswith(f"{hot_load.attempt.txn}-"):
        committed = hot_load.committed_at is not None
        return _task(deployment, hot_load, txn, _action(replica, hot_load), joint=not committed)
    assert deployment.head_id is not None
    return _task(deployment, deployment.hot_loads[deployment.head_id], txn, "recover", joint=False)


def key_of(task: Task | None) -> str:
    """By which an agent knows whether a task is another one."""
    return "" if task is None else f"{task.txn}:{task.action}"


def accepts(deployment: Deployment, name: str, report: ReportBody) -> bool:
    """Whether a report belongs to what the replica has to do now. That a replica is dirty is always believed."""
    if report.phase == "dirty" and not report.current.clean:
        return True
    txn = txn_of(deployment, name)
    if not txn or report.txn != txn or deployment.replicas[name].state == "offline":
        return False
    if report.phase != "serving":
        return True
    hot_load = open_hot_load(deployment)
    if hot_load is not None and hot_load.attempt.txn and txn.startswith(f"{hot_load.attempt.txn}-"):
        reset = hot_load.body.prompt_cache == "reset_all"
        return hot_load.committed_at is not None and (report.cache_reset or not reset)
    return report.cache_reset


def chain_of(deployment: Deployment, hot_load: HotLoad) -> tuple[SnapshotRef, ...]:
    """From the anchor, or the first delta, to a hot-load's snapshot."""
    links = []
    found: HotLoad | None = hot_load
    while found is not None:
        body = found.body
        links.append(SnapshotRef(identity=body.identity, kind=body.kind, base=body.base, hot_load_id=found.id))
        found = None if found.link is None else deployment.hot_loads[found.link]
    return tuple(reversed(links))


def waiting_for(deployment: Deployment, identity: str) -> tuple[str, ...]:
    """Who still keeps a barrier on `identity` closed: live replicas that serve, or will serve again, something else."""
    return tuple(
        sorted(
            name
            for name, replica in deployment.replicas.items()
            if replica.state not in ("offline", "recovering", "dirty")
            and not (replica.state == "serving" and replica.current.identity == identity)
        )
    )


def is_open(deployment: Deployment, identity: str) -> bool:
    """Whether a barrier on `identity` lets through."""
    return (
        deployment.open is None
        and deployment.announced == deployment.head == identity
        and not waiting_for(deployment, identity)
    )


def _pile(deployment: Deployment, replica: Replica) -> str:
    if replica.state == "offline":
        return "offline"
    if replica.hopeless or replica.tries >= deployment.config.attempts:
        return "broken"
    return "prepared" if replica.state == "prepared" else "working"


def _action(replica: Replica, hot_load: HotLoad) -> Action:
    if replica.state == "prepared" and hot_load.committed_at is not None:
        return "commit"
    may_go = hot_load.attempt.go_at is not None or hot_load.committed_at is not None
    return "apply" if replica.state in WRITING or (replica.state == "staged" and may_go) else "stage"


def _task(deployment: Deployment, hot_load: HotLoad, txn: str, action: Action, *, joint: bool) -> Task:
    body = hot_load.body
    return Task(
        txn=txn,
        action=action,
        hot_load_id=hot_load.id,
        identity=body.identity,
        version=body.version,
        kind=body.kind,
        base=body.base,
        operation=body.operation,
        index_sha256=body.index_sha256,
        digest=body.digest,
        chain=chain_of(deployment, hot_load),
        joint=joint,
        # Who missed versions may hold cache entries of any of them, under whatever salt its clients sent.
        prompt_cache="reset_all" if action == "recover" else body.prompt_cache or "preserve",
        requests=body.requests or "keep",
        salt=body.identity,
    )


def _proceed(deployment: Deployment, hot_load: HotLoad, now: float) -> Event | None:
    counted = tally(deployment, hot_load)
    config, attempt = deployment.config, hot_load.attempt
    need = config.quorum or 1
    if (counted.broken and config.quorum is None) or len(counted.prepared) + len(counted.working) < need:
        return _abort(deployment, hot_load, counted)
    if len(counted.prepared) >= need and (not counted.working or _overdue(deployment, counted.prepared, need, now)):
        return Committed(
            id=hot_load.id,
            txn=attempt.txn,
            identity=hot_load.body.identity,
            replicas=counted.prepared,
            digest=hot_load.body.digest,
            index_sha256=hot_load.body.index_sha256,
        )
    if attempt.go_at is None:
        ready = counted.staged and not counted.unstaged
        if ready or (len(counted.staged) >= need and _overdue(deployment, counted.staged, need, now)):
            return Went(txn=attempt.txn)
        late = counted.unstaged if now >= attempt.started_at + config.stage_timeout_s else ()
        reason = f"not staged after {config.stage_timeout_s:g} s"
    else:
        late = counted.working if now >= attempt.go_at + config.apply_timeout_s else ()
        reason = f"not prepared {config.apply_timeout_s:g} s after the go"
    return TimedOut(name=late[0], reason=reason) if late else None


def _overdue(deployment: Deployment, names: tuple[str, ...], need: int, now: float) -> bool:
    """Whether a quorum of `names` has waited long enough for the others. Never without a quorum set."""
    if deployment.config.quorum is None:
        return False
    complete_at = sorted(deployment.replicas[name].updated_at for name in names)[need - 1]
    return now >= complete_at + deployment.config.straggler_s


def _abort(deployment: Deployment, hot_load: HotLoad, counted: Tally) -> Aborted:
    blamed = [deployment.replicas[name] for name in counted.broken]
    worst = [replica for replica in blamed if replica.hopeless] or blamed
    code: Code = worst[0].code if worst else "unavailable"
    parts = [f"{replica.about.name}: {replica.detail}" for replica in blamed[:5]]
    if counted.offline:
        parts.append(f"offline: {', '.join(counted.offline[:5])}")
    need = deployment.config.quorum or 1
    found = len(counted.prepared) + len(counted.working)
    if found < need:
        parts.insert(0, f"quorum lost: need {need} replicas, {found} left")
    # A replica that failed had its tries within the attempt; one that went away is not required by the next.
    return Aborted(txn=hot_load.attempt.txn, reason="; ".join(parts), code=code, counts=True, again=not blamed)


def _try_again(deployment: Deployment, hot_load: HotLoad) -> Event:
    required = eligible(deployment)
    enough = len(required) >= (deployment.config.quorum or 1)
    if hot_load.again and enough and hot_load.failures < deployment.config.attempts:
        number = hot_load.attempt.number + 1
        return Retried(id=hot_load.id, txn=f"{hot_load.id}.{number}", number=number, required=required)
    return Finished(id=hot_load.id, state="failed", reason=hot_load.reason, code=hot_load.code)


def _complete(deployment: Deployment, hot_load: HotLoad, now: float) -> Event | None:
    assert hot_load.committed_at is not None
    replicas = [deployment.replicas[name] for name in hot_load.attempt.required]
    missing = [
        replica
        for replica in replicas
        if not (replica.state == "serving" and replica.current.identity == hot_load.body.identity)
    ]
    waiting = [replica for replica in missing if _pile(deployment, replica) not in ("offline", "broken")]
    late = now >= hot_load.committed_at + deployment.config.apply_timeout_s
    if not late and (waiting or len(missing) == len(replicas)):
        return None
    names = ", ".join(replica.about.name for replica in missing)
    return Finished(id=hot_load.id, state="completed", reason=f"not serving it yet: {names}" if names else "")


def _forget(deployment: Deployment, now: float) -> Event | None:
    for name, replica in deployment.replicas.items():
        late = now >= replica.updated_at + deployment.config.forget_after_s
        if replica.state == "offline" and late and not is_required(deployment, name):
            return Forgotten(name=name)
    return None


def _all_serve(deployment: Deployment) -> bool:
    head = deployment.head
    assert head is not None
    serving = any(one.state == "serving" and one.current.identity == head for one in deployment.replicas.values())
    return serving and not waiting_for(deployment, head)

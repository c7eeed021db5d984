"""How one replica changes: by its agent's reports, by silence, by an attempt that is given up. Pure functions.

A replica goes RECOVERING -> SERVING -> FETCHING -> STAGED -> PAUSING -> APPLYING -> VERIFYING -> PREPARED -> SERVING, and to
DIRTY from wherever weights may be partly written (`control-plane.md` 5.3). A dirty replica never serves; a failure before the
first write takes none out of service.
"""

from msgspec.structs import replace

from groundhop.training.hotload.control.records import Outcome, Replica
from groundhop.training.hotload.control.wire import Current, PublicState, ReplicaState, ReportBody

TOUCHED: frozenset[ReplicaState] = frozenset({"applying", "verifying", "prepared"})
"""Weights may be partly new: nothing but a commit or a repair leads out."""
WRITING = TOUCHED | {"pausing"}
"""On the way from old weights to new ones. While `pausing` none is written: agents wait for `applying` to be accepted."""
STAGING: frozenset[ReplicaState] = frozenset({"fetching", "staged"})
RANK = {"fetching": 1, "staged": 2, "pausing": 3, "applying": 4, "verifying": 5, "prepared": 6}
LONGEST_WAIT_S = 60.0


def may_serve(replica: Replica) -> bool:
    """Whether requests may reach it and be answered, on whatever weights it holds."""
    return replica.current.clean and replica.state in ("serving", "lagging", "fetching", "staged")


def public_state(replica: Replica, target: str | None) -> PublicState:
    """CoreWeave's four words, as seen by somebody who waits for `target` (None: for nothing in particular)."""
    if replica.state in ("dirty", "offline"):
        return "error"
    if replica.state in WRITING or replica.state == "recovering" or not replica.current.clean:
        return "updating"
    if replica.state in STAGING or (target is not None and replica.current.identity != target):
        return "pending_update"
    return "ready"


def outcome_of(replica: Replica, target: str) -> Outcome:
    """What is kept of a replica when a hot-load of `target` is over."""
    state = public_state(replica, target)
    if replica.state == "serving" or (replica.state in ("lagging", *STAGING) and replica.current.clean):
        state = "ready"
    return Outcome(
        name=replica.about.name,
        state=state,
        current_identity=replica.current.identity,
        detail=replica.detail,
        started_at=replica.started_at,
        finished_at=replica.finished_at,
        updated_at=replica.updated_at,
    )


def settle(replica: Replica, head: str | None, behind: ReplicaState) -> Replica:
    """Where a replica stands that does nothing: by what it holds, against the head."""
    if not replica.current.clean:
        return replace(replica, state="dirty")
    return replace(replica, state="serving" if head is None or replica.current.identity == head else behind)


def soil(replica: Replica, target: str | None, time: float) -> Replica:
    """Mark as partly written."""
    current = Current(identity=replica.current.identity, clean=False, dirty_to=target)
    return replace(replica, state="dirty", current=current, cache_reset=False, updated_at=time)


def _wait(tries: int) -> float:
    return float(min(0.25 * 2**tries, LONGEST_WAIT_S))


def take(replica: Replica, report: ReportBody, target: str | None, head: str | None, time: float) -> Replica:
    """The replica after a report. `target`: what it is being brought to; `head`: what is committed."""
    fresh = report.txn != replica.txn
    if not fresh and RANK.get(report.phase, 9) < RANK.get(replica.state, 0):
        return replica
    same_work = replica.finished_at is None and replica.target == target
    replica = replace(
        replica,
        txn=report.txn,
        target=target,
        started_at=replica.started_at if same_work else time,
        finished_at=None,
        bytes=max(report.bytes, 0 if fresh else replica.bytes),
        plan_digest=report.plan_digest or replica.plan_digest,
        updated_at=time,
    )
    return _enter(replica, report, head, time)


def _enter(replica: Replica, report: ReportBody, head: str | None, time: float) -> Replica:
    match report.phase:
        case "serving":
            replica = replace(replica, current=report.current, cache_reset=report.cache_reset, finished_at=time)
            settled = settle(replica, head, "lagging")
            if settled.state != "serving":
                return replace(settled, tries=replica.tries + 1)
            return replace(settled, tries=0, hopeless=False, detail="")
        case "failed" | "dirty":
            failed = replace(
                replica,
                current=report.current,
                tries=replica.tries + 1,
                hopeless=not report.retry,
                not_before=time + _wait(replica.tries),
                detail=report.error or "failed without a reason",
                code=report.code,
                finished_at=time,
            )
            if report.phase == "dirty" or not report.current.clean:
                return soil(failed, report.current.dirty_to or replica.target, time)
            return settle(failed, head, "lagging")
        case "fetching" | "staged" | "pausing":
            # What it says of being clean stays: one that stages its repair does not serve meanwhile.
            return replace(replica, state=report.phase, current=report.current)
        case "applying" | "verifying" | "prepared":
            current = replace(report.current, clean=False, dirty_to=replica.target)
            return replace(replica, state=report.phase, current=current)


def time_out(replica: Replica, reason: str, head: str | None, time: float) -> Replica:
    """The replica after it took too long: of no use to this attempt."""
    late = replace(replica, tries=replica.tries + 1, hopeless=True, detail=reason, code="unavailable", updated_at=time)
    if replica.state in TOUCHED:
        return soil(late, replica.target, time)
    return settle(late, head, "lagging")


def give_up(replica: Replica, target: str, head: str | None, time: float) -> Replica:
    """The replica after its attempt at `target` was given up."""
    if replica.state in TOUCHED:
        return soil(replica, target, time)
    if replica.state == "offline" and replica.before in TOUCHED:
        return replace(soil(replica, target, time), state="offline", before="dirty")
    if replica.state in STAGING or replica.state == "pausing":
        return replace(settle(replica, head, "lagging"), updated_at=time)
    return replica

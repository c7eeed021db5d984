"""Whether a publisher may do what it asks: leases, and the conditions for a new hot-load. Pure; refusals carry their code."""

from msgspec.structs import replace

from groundhop.errors import RefusedError
from groundhop.training.hotload.control.records import Created, Deployment, HotLoad, LeaseTaken
from groundhop.training.hotload.control.rules import eligible
from groundhop.training.hotload.control.states import open_hot_load
from groundhop.training.hotload.control.wire import INITIAL, Code, HotLoadBody, LeaseBody


def refuse(code: Code, reason: str) -> RefusedError:
    """The error for a canonical code."""
    return RefusedError(f"{code}: {reason}")


def lease(deployment: Deployment, body: LeaseBody, now: float) -> LeaseTaken:
    """Take or renew the publisher's lease.

    Every take has a higher epoch than any before, also one by the same owner: a publisher that was restarted fences the
    process that it was. Raises: RefusedError, `aborted` for a stale renewal, `failed_precondition` while another holds it.
    """
    ttl_s = body.ttl_s or deployment.config.lease_ttl_s
    if body.epoch is not None:
        if body.epoch != deployment.epoch:
            raise refuse("aborted", f"stale publisher epoch {body.epoch}: the current one is {deployment.epoch}")
        return LeaseTaken(owner=body.owner, epoch=body.epoch, until=now + ttl_s)
    held = deployment.lease_owner not in (None, body.owner) and deployment.lease_until > now
    if held and not body.take_over:
        left = deployment.lease_until - now
        reason = f"publisher {deployment.lease_owner} holds the lease for another {left:.1f} s; take_over takes it"
        raise refuse("failed_precondition", reason)
    return LeaseTaken(owner=body.owner, epoch=deployment.epoch + 1, until=now + ttl_s)


def standing(deployment: Deployment) -> str:
    """The head; before the first commit, what all live replicas say that they hold; else `initial`."""
    if deployment.head is not None:
        return deployment.head
    live = [replica.current for replica in deployment.replicas.values() if replica.state != "offline"]
    held = {current.identity if current.clean else None for current in live}
    (only,) = held if len(held) == 1 else (None,)
    return only or INITIAL


def find_replay(found: HotLoad | None, body: HotLoadBody) -> HotLoad | None:
    """The hot-load that `body` asked for already. Raises: RefusedError where its id stands for another request."""
    if found is None:
        return None
    if found.asked != body:
        raise refuse("already_exists", f"hot-load {found.id} already exists with another body")
    return found


def admit(deployment: Deployment, asked: HotLoadBody, body: HotLoadBody, hot_load_id: str, now: float) -> Created:
    """Start a hot-load, or say why not. `body` is what was `asked`, with what the store says about the snapshot filled in.

    Raises: RefusedError with `invalid_argument`, `aborted` (a stale publisher, a head that moved, an identity with other
    content) or `failed_precondition` (one already in progress, an unknown predecessor, too long a chain, no replicas).
    """
    _check_form(body)
    _check_publisher(deployment, body, now)
    _check_identity(deployment, body)
    running = open_hot_load(deployment)
    if running is not None:
        # cwtrain 1.0.2 (errors.py, error_from_response) knows this case by the words "already in progress".
        raise refuse("failed_precondition", f"hot-load {running.id} is already in progress on {deployment.name}")
    link, deltas = _find_link(deployment, body)
    required = eligible(deployment)
    if not required:
        raise refuse("failed_precondition", f"deployment {deployment.name} is not ready: no live replica")
    if len(required) < (deployment.config.quorum or 1):
        reason = f"a quorum of {deployment.config.quorum} replicas is needed, {len(required)} live"
        raise refuse("failed_precondition", f"deployment {deployment.name} is not ready: {reason}")
    return Created(
        id=hot_load_id,
        body=_resolve(deployment, body, hot_load_id),
        asked=asked,
        link=link,
        deltas=deltas,
        txn=f"{hot_load_id}.1",
        required=required,
    )


def _check_form(body: HotLoadBody) -> None:
    if body.identity == INITIAL:
        raise refuse("invalid_argument", "the identity `initial` is reserved for the weights a deployment starts with")
    if (body.kind == "delta") != (body.base is not None):
        wanted = "needs a base" if body.kind == "delta" else "takes no base"
        raise refuse("invalid_argument", f"a {body.kind} snapshot {wanted}")
    if body.base == body.identity:
        raise refuse("invalid_argument", f"{body.identity} cannot build on itself")


def _check_publisher(deployment: Deployment, body: HotLoadBody, now: float) -> None:
    epoch = body.publisher_epoch
    if epoch is not None and epoch < deployment.epoch:
        raise refuse("aborted", f"stale publisher epoch {epoch}: the current one is {deployment.epoch}")
    if epoch is None and deployment.lease_owner is not None and deployment.lease_until > now:
        raise refuse("aborted", f"publisher {deployment.lease_owner} holds the lease, and the request carries no epoch")
    head = standing(deployment)
    if body.expected_head is not None and body.expected_head != head:
        raise refuse("aborted", f"expected head {body.expected_head}, found {head}: rebase")


def _check_identity(deployment: Deployment, body: HotLoadBody) -> None:
    """Identities are immutable: what is known of an earlier hot-load of this one must be the same."""
    for earlier in reversed(deployment.hot_loads.values()):
        known = earlier.body
        if known.identity != body.identity:
            continue
        other = (known.kind, known.base, known.operation) != (body.kind, body.base, body.operation)
        pairs = ((known.index_sha256, body.index_sha256), (known.digest, body.digest))
        if other or any(old and new and old != new for old, new in pairs):
            raise refuse(
                "aborted", f"identity {body.identity} already stands for other content: identities are immutable"
            )


def _find_link(deployment: Deployment, body: HotLoadBody) -> tuple[str | None, int]:
    """The hot-load that committed the base, and how many deltas the chain has then."""
    if body.base is None:
        return None, 0
    link = deployment.committed.get(body.base)
    if link is None:
        if deployment.head is not None or body.base not in (INITIAL, standing(deployment)):
            raise refuse("failed_precondition", f"unknown predecessor {body.base}: it was not committed here")
        return None, 1
    deltas = deployment.hot_loads[link].deltas + 1
    if deltas > deployment.config.chain_limit:
        reason = (
            f"the chain would have {deltas} deltas, at most {deployment.config.chain_limit}: publish a full snapshot"
        )
        raise refuse("failed_precondition", reason)
    return link, deltas


def _resolve(deployment: Deployment, body: HotLoadBody, hot_load_id: str) -> HotLoadBody:
    barrier = deployment.config.transition_mode == "BARRIER"
    prompt_cache = body.prompt_cache or ("reset_all" if barrier else "preserve")
    requests = body.requests or ("wait" if barrier else "keep")
    if barrier and (prompt_cache == "preserve" or requests == "keep"):
        raise refuse("invalid_argument", "BARRIER resets prompt caches and lets no request run over the change")
    return replace(body, hot_load_id=hot_load_id, prompt_cache=prompt_cache, requests=requests)

"""What crosses the control plane's sockets: bodies of publishers, of replica agents, of errors.

JSON in snake_case; `read_body` takes CoreWeave's camelCase names for the same fields too. The words follow CoreWeave's
Inference API (docs.coreweave.com, `HotLoadService`): a *hot-load* brings a *deployment*'s replicas to a snapshot *identity*.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from groundhop.errors import InputError

Identity = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^(?!\.{1,2}$)[^/\\\x00-\x1f\x7f]+\Z")]
"""A single path segment. `initial` is no identity: it names the weights that a deployment started with."""
Name = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z")]
"""Of a deployment or a replica: what fits into one segment of an address."""
Text = Annotated[str, Meta(max_length=2000)]
Hash = Annotated[str, Meta(max_length=128)]
Whole = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0, le=86_400)]

INITIAL = "initial"
"""The name of the weights that a deployment started with; no snapshot may take it."""
BODY_LIMIT = 4 * 1024 * 1024
"""Bytes of a request's body."""

Kind = Literal["full", "delta"]
Operation = Literal["differential", "overwrite"]
Mode = Literal["ASYNC", "BARRIER"]
PromptCache = Literal["preserve", "reset_all"]
HotLoadState = Literal["pending", "in_progress", "completed", "failed", "canceled"]
ReplicaState = Literal[
    "offline", "recovering", "serving", "lagging", "fetching", "staged",
    "pausing", "applying", "verifying", "prepared", "dirty",
]  # fmt: skip
PublicState = Literal["pending_update", "updating", "ready", "error"]
Phase = Literal["fetching", "staged", "pausing", "applying", "verifying", "prepared", "serving", "failed", "dirty"]
Action = Literal["stage", "apply", "commit", "recover"]
Code = Literal[
    "invalid_argument", "unauthenticated", "permission_denied", "not_found", "already_exists", "aborted",
    "failed_precondition", "data_loss", "resource_exhausted", "unimplemented", "internal", "unavailable",
]  # fmt: skip

HTTP_STATUS: Mapping[str, int] = {
    "invalid_argument": 400, "unauthenticated": 401, "permission_denied": 403, "not_found": 404,
    "already_exists": 409, "aborted": 409, "failed_precondition": 412, "data_loss": 422,
    "internal": 500, "unimplemented": 501, "unavailable": 503, "resource_exhausted": 507,
}  # fmt: skip
"""Status of each canonical code (`google.rpc.Code` in lower snake case, as Connect writes it)."""


class ErrorBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every answer that is not 2xx."""

    code: Code
    message: str
    details: tuple[str, ...] = ()


# --- replicas and their agents ---------------------------------------------------------------------------------------


class Current(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a replica holds now, by its own account."""

    identity: Identity | None
    """The snapshot whose bits it holds; where dirty, the one it held before. None: weights that no snapshot names."""
    digest: Hash = ""
    """State digest of what it holds; empty where it was not computed."""
    clean: bool = True
    """False: partly written. Such a replica never serves."""
    dirty_to: Identity | None = None
    """Where dirty: the snapshot it was being brought to."""


class RegisterBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/replicas:register`: an agent takes charge of a replica. May be sent again."""

    deployment: Name
    name: Name
    epoch: Count
    """Incarnation of the agent, growing with every start (Unix time in ns will do). Messages of older ones are refused."""
    engine: Text = ""
    """E.g. `vllm 0.33`."""
    zone: Annotated[str, Meta(max_length=128)] = ""
    url: Text = ""
    """Where other replicas can ask this one for weights; empty where it serves none."""
    layout_signature: Hash = ""
    plan_digest: Hash = ""
    overwrite_names: tuple[Text, ...] = ()
    """Tensors that this engine can take by overwrite only."""
    current: Current


class RegisterReply(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to go on."""

    heartbeat_s: float
    """Beat at least so often."""
    offline_after_s: float
    """Silent for so long, a replica counts as offline."""
    store: str
    """Object store address of the deployment's snapshots; empty where the agent brings its own."""
    head: Identity | None
    """The committed snapshot; None before the first hot-load."""


class HeartbeatBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/replicas/{name}:heartbeat?deployment=`."""

    epoch: Count
    current: Current
    serving: bool = True
    """Whether the engine answers requests (not paused, not dirty)."""


class HeartbeatReply(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`known` false: the control plane lost sight of this replica (offline, or another ledger); register again."""

    known: bool
    task_key: str
    """Key of the task that stands; ask for it where it is not the one in hand."""


class SnapshotRef(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One link of a chain."""

    identity: Identity
    kind: Kind
    base: Identity | None = None
    """What a delta builds on; None for a full snapshot. `initial` for a delta on the weights that came with the server."""
    hot_load_id: str = ""


class Task(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an agent has to do; it stands until the state moves, so asking again gives it again.

    stage    fetch and verify the snapshot's files while serving on; report `fetching`, then `staged` or `failed`.
    apply    pause, journal DIRTY, write, verify; report `pausing`, `applying`, `verifying`, then `prepared` (paused) or
             `dirty`. The first write comes after `applying` was accepted, never before. Where `joint` is false, go on to
             commit without asking.
    commit   the snapshot is committed: reset the prompt cache if asked to, resume, report `serving`.
    recover  come to `identity`, which is committed, by any way that ends in its digest (delta, folded chain, peer, full
             load); not joint; report phases and, in the end, `serving`.

    No task, or one with another `txn`, means that what is in hand was given up: staged files may go; a replica that began to
    write stays paused and dirty until a task repairs it. A dirty replica that is told to stage and apply takes an
    `overwrite` snapshot on the same base, or loads the whole; one that holds `identity`'s digest already has nothing to write.
    """

    txn: str
    """One attempt. Reports carry it; a payload is applied at most once under it."""
    action: Action
    hot_load_id: str = ""
    identity: Identity
    version: Whole | None = None
    """None where the publisher told none; the snapshot's index has it."""
    kind: Kind
    base: Identity | None = None
    operation: Operation = "differential"
    """`overwrite`: values are absolute, so a dirty replica may take them."""
    index_sha256: Hash = ""
    """Of the snapshot's index; empty where the publisher told none."""
    digest: Hash = ""
    """State digest that the replica must end with; empty where the publisher told none (the index has it)."""
    chain: tuple[SnapshotRef, ...] = ()
    """From the anchor (oldest) to `identity`."""
    joint: bool
    """Whether `prepared` waits for the commit of all."""
    prompt_cache: PromptCache = "preserve"
    requests: Literal["keep", "wait", "abort"] = "keep"
    """What happens to requests in flight at the pause."""
    salt: str = ""
    """Prompt-cache salt of this snapshot, for the engine's own use; announced to clients when every replica serves it."""


class TaskReply(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`GET /v1/replicas/{name}/task?deployment=&epoch=&have=&wait_s=`: answers when the task is another than `have`."""

    key: str
    """`txn:action`, empty where there is nothing to do."""
    task: Task | None


class ReportBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/replicas/{name}:report?deployment=`. May be sent again: the same report changes nothing."""

    epoch: Count
    txn: Annotated[str, Meta(max_length=128)]
    phase: Phase
    current: Current
    plan_digest: Hash = ""
    bytes: Whole = 0
    """Fetched (at `staged`) or written (at `prepared`)."""
    changed: Whole = 0
    """Elements written."""
    seconds: Seconds = 0.0
    """Of the phase that ended."""
    cache_reset: bool = False
    """With `serving`: the prompt cache holds nothing of older weights. Not accepted without it where the task said
    `reset_all`, so that no version is announced with a stale cache."""
    error: Text = ""
    retry: bool = True
    """With `failed` and `dirty`: whether another attempt may help. False e.g. for a checksum that stays wrong."""
    code: Code = "unavailable"
    """With `failed` and `dirty`: what kind of failure."""


class ReportReply(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`accepted` false: the report belongs to an attempt that is over; do the standing task."""

    accepted: bool
    task_key: str


class ReplicaView(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replica as people and publishers see it."""

    name: str
    zone: str = ""
    engine: str = ""
    state: ReplicaState
    public_state: PublicState
    current_identity: str | None
    target_identity: str | None
    digest: str = ""
    plan_digest: str = ""
    layout_signature: str = ""
    required: bool = False
    """Whether the open hot-load waits for it."""
    detail: str = ""
    """Why it failed last; empty once it serves what it should."""
    bytes: int = 0
    seconds: float = 0.0
    """From the task to serving, of the last or running hot-load."""
    beat_age_s: float = 0.0
    updated_at: float
    """Unix time."""
    started_at: float | None = None
    finished_at: float | None = None


# --- publishers and readers ------------------------------------------------------------------------------------------


class DeploymentBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`PUT /v1/deployments/{name}`. May be sent again; refused while a hot-load is open."""

    bucket: Text = ""
    path_prefix: Text = ""
    store: Text = ""
    """Object store address that agents read; empty: each brings its own."""
    model: Text = ""
    transition_mode: Mode = "ASYNC"
    quorum: Count | None = None
    """So many prepared replicas suffice for a commit. None: every required replica that is not offline, at least one."""
    chain_limit: Annotated[int, Meta(ge=1, le=128)] = 128
    """Deltas since the last full snapshot."""
    attempts: Annotated[int, Meta(ge=1, le=20)] = 3
    heartbeat_s: Positive = 2.0
    offline_after_s: Positive = 10.0
    forget_after_s: Annotated[float, Meta(gt=0)] = 3600.0
    """Offline for so long, a replica is struck off: it was taken down. It may register again."""
    stage_timeout_s: Positive = 1800.0
    apply_timeout_s: Positive = 300.0
    """From the go to `prepared`: so long are prepared replicas paused for the slowest."""
    straggler_s: Annotated[float, Meta(ge=0, le=86_400)] = 30.0
    """After a quorum is prepared, wait so long for the others before committing without them."""
    lease_ttl_s: Positive = 30.0


class DeploymentView(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`GET /v1/deployments/{name}`."""

    name: str
    config: DeploymentBody
    epoch: int
    lease_owner: str | None
    lease_until: float | None
    head: Identity | None
    """The committed snapshot."""
    announced: Identity | None
    """The snapshot that every live replica serves; lags `head` while some catch up."""
    salt: str
    """What clients send as the prompt-cache salt: changes only when every live replica serves the new snapshot."""
    open_hot_load: str | None
    replicas: tuple[ReplicaView, ...] = ()
    hot_loads: tuple["HotLoadView", ...] = ()
    """The newest few, newest first."""
    now: float


class Status(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`GET /v1/status`: everything, for people."""

    deployments: tuple[DeploymentView, ...]


class LeaseBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/deployments/{name}/publisher_lease`."""

    owner: Name
    ttl_s: Positive | None = None
    epoch: Whole | None = None
    """The epoch in hand, to renew it; None to take the lease under a new one."""
    take_over: bool = False
    """Take it though another owner's has not run out."""


class LeaseReply(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fencing number that every create carries."""

    epoch: int
    ttl_s: float
    head: Identity | None


class HotLoadBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/hot_loads`."""

    deployment_id: Name
    hot_load_id: Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._-]+\Z")] | None = None
    """Chosen by the client, so that it may send the same again; None lets the server choose."""
    identity: Identity
    version: Whole | None = None
    kind: Kind
    base: Identity | None = None
    """What a delta builds on."""
    operation: Operation = "differential"
    prompt_cache: PromptCache | None = None
    """None: `preserve` under ASYNC, `reset_all` under BARRIER (which allows no other)."""
    requests: Literal["keep", "wait", "abort"] | None = None
    """None: `keep` under ASYNC, `wait` under BARRIER (which does not allow `keep`)."""
    publisher_epoch: Whole | None = None
    expected_head: Identity | None = None
    """Refuse unless this is committed (compare and set). `initial`: unless nothing is. None: do not compare."""
    index_sha256: Hash = ""
    digest: Hash = ""


class HotLoadView(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A hot-load as it stands."""

    hot_load_id: str
    deployment_id: str
    identity: Identity
    version: int | None
    kind: Kind
    base: Identity | None
    operation: Operation
    prompt_cache: PromptCache
    requests: Literal["keep", "wait", "abort"]
    state: HotLoadState
    committed: bool
    """Whether the head has moved to it. A committed hot-load is never undone: another one follows."""
    attempt: int
    reason: str
    code: str = ""
    """Where failed: the kind of failure."""
    chain: tuple[SnapshotRef, ...]
    required: tuple[str, ...]
    created_at: float
    updated_at: float
    finished_at: float | None


class BarrierReply(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`GET /v1/deployments/{name}:barrier?identity=&wait_s=`: 200 when `ready`, 504 when the wait ran out."""

    ready: bool
    identity: Identity
    replicas: tuple[str, ...]
    waiting_for: tuple[str, ...]


class LedgerEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`GET /v1/deployments/{name}/ledger?after=&limit=`."""

    sequence: int
    time: float
    kind: str
    body: msgspec.Raw


Body = TypeVar("Body", bound=Struct)


def read_body(raw: bytes, kind: type[Body]) -> Body:
    """Decode a request; camelCase names count as their snake_case ones.

    Raises: InputError that names the field, or says that it is too long or no JSON.
    """
    if len(raw) > BODY_LIMIT:
        raise InputError(f"need a body of at most {BODY_LIMIT} bytes, got {len(raw)}")
    try:
        return msgspec.convert(to_snake(msgspec.json.decode(raw or b"{}")), kind, strict=True)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(str(error)) from error


def to_snake(tree: Any) -> Any:
    """`{"hotLoadId": 1}` becomes `{"hot_load_id": 1}`, at every depth."""
    if isinstance(tree, dict):
        return {re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", key).lower(): to_snake(value) for key, value in tree.items()}
    return [to_snake(value) for value in tree] if isinstance(tree, list) else tree


def read_reply(raw: bytes, kind: type[Body]) -> Body:
    """Decode an answer of the control plane. Raises: InputError."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise InputError(f"not an answer of a control plane: {error}") from error

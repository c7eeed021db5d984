"""What the ledger holds: events, in order, and the state of one deployment that they add up to."""

from typing import Literal

from msgspec import Struct

from groundhop.training.hotload.control.wire import (
    Code,
    Current,
    DeploymentBody,
    HotLoadBody,
    HotLoadState,
    PublicState,
    RegisterBody,
    ReplicaState,
    ReportBody,
)

# --- state -----------------------------------------------------------------------------------------------------------


class Replica(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One replica, as the ledger knows it."""

    about: RegisterBody
    """What its agent said last about engine, layout and place; `current` in it is of that moment."""
    state: ReplicaState
    before: ReplicaState = "recovering"
    """While offline: the state before."""
    current: Current
    target: str | None = None
    """The snapshot it is being brought to, or was last."""
    txn: str = ""
    """Under which its state came about; empty where under none."""
    tries: int = 0
    """Failures since it last served what it should."""
    hopeless: bool = False
    """It failed in the running attempt in a way that another try does not mend."""
    not_before: float = 0.0
    """No task before this time."""
    plan_digest: str = ""
    detail: str = ""
    code: Code = "unavailable"
    bytes: int = 0
    cache_reset: bool = False
    """Whether the prompt cache holds nothing of weights older than `current`."""
    updated_at: float
    started_at: float | None = None
    finished_at: float | None = None


class Attempt(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One try at a joint commit."""

    txn: str
    number: int
    required: tuple[str, ...]
    """The replicas whose acknowledgement it needs: those that lived and had no trouble when it began."""
    started_at: float
    go_at: float | None = None
    """When replicas were told to pause and write; None while they stage."""
    go_with: tuple[str, ...] = ()
    """Who was staged at that moment."""


class Outcome(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a hot-load that is over did to one replica."""

    name: str
    state: PublicState
    current_identity: str | None
    detail: str
    started_at: float | None
    finished_at: float | None
    updated_at: float


class HotLoad(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One hot-load."""

    id: str
    body: HotLoadBody
    """With every `None` that stands for a default resolved."""
    asked: HotLoadBody
    """As it came, for telling a replay from another request."""
    link: str | None
    """The hot-load that committed its base; None for a full snapshot and for a delta on the initial weights."""
    deltas: int
    """Deltas in its chain."""
    state: HotLoadState
    attempt: Attempt
    failures: int = 0
    """Attempts that counted."""
    again: bool = True
    """Whether another attempt may help."""
    committed_at: float | None = None
    reason: str = ""
    code: str = ""
    created_at: float
    updated_at: float
    finished_at: float | None = None
    outcome: tuple[Outcome, ...] = ()


class Deployment(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about one deployment. Dictionaries in it are never changed in place."""

    name: str
    config: DeploymentBody
    epoch: int = 0
    """The highest publisher's epoch seen."""
    lease_owner: str | None = None
    lease_until: float = 0.0
    head: str | None = None
    """The committed snapshot."""
    head_id: str | None = None
    """The hot-load that committed it."""
    announced: str | None = None
    open: str | None = None
    """The hot-load that runs; at most one."""
    hot_loads: dict[str, HotLoad] = {}
    """In order of creation."""
    committed: dict[str, str] = {}
    """Identity to the hot-load that committed it last."""
    replicas: dict[str, Replica] = {}


# --- events ----------------------------------------------------------------------------------------------------------


class Configured(Struct, frozen=True, kw_only=True, tag=True):
    """A deployment was created or reconfigured."""

    config: DeploymentBody


class LeaseTaken(Struct, frozen=True, kw_only=True, tag=True):
    """A publisher took or renewed the lease."""

    owner: str
    epoch: int
    until: float


class Created(Struct, frozen=True, kw_only=True, tag=True):
    """A hot-load was admitted, and its first attempt began."""

    id: str
    body: HotLoadBody
    asked: HotLoadBody
    link: str | None
    deltas: int
    txn: str
    required: tuple[str, ...]


class Registered(Struct, frozen=True, kw_only=True, tag=True):
    """An agent took charge of a replica, for the first time or again."""

    about: RegisterBody


class Reported(Struct, frozen=True, kw_only=True, tag=True):
    """An agent told of a phase."""

    name: str
    report: ReportBody


class Drifted(Struct, frozen=True, kw_only=True, tag=True):
    """A replica holds something else than it reported last, by its heartbeats."""

    name: str
    current: Current


class WentOffline(Struct, frozen=True, kw_only=True, tag=True):
    """A replica stopped beating. That says nothing about what it holds."""

    name: str


class Forgotten(Struct, frozen=True, kw_only=True, tag=True):
    """A replica was offline for so long that it will not come back."""

    name: str


class TimedOut(Struct, frozen=True, kw_only=True, tag=True):
    """A replica took too long in a phase of the running attempt."""

    name: str
    reason: str


class Went(Struct, frozen=True, kw_only=True, tag=True):
    """All that must are staged: the attempt goes on to pause and write."""

    txn: str


class Committed(Struct, frozen=True, kw_only=True, tag=True):
    """THE commit point: the head moves. From here on the hot-load only rolls forward."""

    id: str
    txn: str
    identity: str
    replicas: tuple[str, ...]
    digest: str
    index_sha256: str


class Aborted(Struct, frozen=True, kw_only=True, tag=True):
    """An attempt was given up before its commit. Whatever wrote is dirty."""

    txn: str
    reason: str
    code: Code
    counts: bool
    """Whether it uses up one of the hot-load's attempts."""
    again: bool
    """Whether another attempt may help."""


class Retried(Struct, frozen=True, kw_only=True, tag=True):
    """The next attempt of the same hot-load began."""

    id: str
    txn: str
    number: int
    required: tuple[str, ...]


class Finished(Struct, frozen=True, kw_only=True, tag=True):
    """A hot-load is over."""

    id: str
    state: Literal["completed", "failed", "canceled"]
    reason: str = ""
    code: str = ""


class Announced(Struct, frozen=True, kw_only=True, tag=True):
    """Every live replica that serves serves this: clients may salt their prompts with it."""

    identity: str


Event = (
    Configured
    | LeaseTaken
    | Created
    | Registered
    | Reported
    | Drifted
    | WentOffline
    | Forgotten
    | TimedOut
    | Went
    | Committed
    | Aborted
    | Retried
    | Finished
    | Announced
)

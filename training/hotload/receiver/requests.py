"""What a replica is asked to do with its weights, and what it answers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct


class ApplyRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One hot-load, as it is told to every rank."""

    txn: str
    identity: str
    version: int
    parts: tuple[str, ...]
    """Paths of delta files, in order; a tensor that comes again builds on what the earlier ones made of it."""
    base_digest: str
    digest: str
    operation: Literal["differential", "overwrite"]
    verify: Literal["full", "touched"] = "touched"
    """Read everything afterwards, or only what was written."""


@dataclass(frozen=True, slots=True)
class Hook:
    """Something made from weights that must be made again when they change."""

    storages: frozenset[int]
    run: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Applied:
    """What a hot-load did."""

    digest: str
    changed: int
    """Elements that were sent for tensors of which this rank holds something."""
    seconds_by_phase: dict[str, float] = field(default_factory=dict)

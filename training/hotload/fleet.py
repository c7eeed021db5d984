"""The replicas behind a publisher: whatever brings a finished snapshot to all servers that must hold it."""

from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from groundhop.training.hotload.store.snapshots import SnapshotIndex

OperationHint = Literal["differential", "overwrite"]
"""How a snapshot's changes act: on exactly the base's bits, or on whatever an unfinished attempt left of it."""


class Fleet(Protocol):
    """Moves replicas between snapshots. A server's address, a control plane or nothing at all may stand behind it."""

    def hot_load(self, index: "SnapshotIndex", operation_hint: OperationHint) -> None:
        """Bring every required replica to the snapshot that `index` describes; return when all of them hold its bits.

        With `overwrite` a replica takes it from the base, from a half-written state on top of the base, and from a snapshot
        on top of the base that was never committed. An index of an older epoch than one seen before is refused.

        Raises: ServerError that names the replica that does not hold it; whatever was written then stays marked as dirty
        and serves nobody.
        """
        ...

    def clean_on(self, identity: str) -> bool:
        """Whether every required replica holds exactly this snapshot and nothing of a later attempt; False when unsure."""
        ...


class NoFleet:
    """No replicas: snapshots go to the store only, and readers come when they like."""

    def hot_load(self, index: "SnapshotIndex", operation_hint: OperationHint) -> None:
        """Return at once."""

    def clean_on(self, identity: str) -> bool:
        """Say that nobody holds anything else."""
        return True

"""Which snapshots bring a reader from what it has to what it wants, and in which order."""

from collections.abc import Callable
from dataclasses import dataclass

from groundhop.errors import ChecksumError, InputError, MissingError
from groundhop.training.hotload.store.index import SnapshotIndex, anchor_of

CHAIN_LIMIT = 128
"""Most deltas in a row (`control-plane.md` 5.1)."""

ReadIndex = Callable[[str], SnapshotIndex]


@dataclass(frozen=True, slots=True)
class Route:
    """Load `anchor`, where there is one, then apply `deltas` in this order. Both empty: nothing is to be done."""

    anchor: SnapshotIndex | None
    deltas: tuple[SnapshotIndex, ...]

    @property
    def bytes(self) -> int:
        """Bytes to fetch."""
        return sum(index.bytes for index in (*((self.anchor,) if self.anchor else ()), *self.deltas))


def route(read_index: ReadIndex, have: str | None, want: str, limit: int = CHAIN_LIMIT) -> Route:
    """The way from `have` (None: nothing) to `want`: by deltas alone where they connect the two, else from the nearest full
    snapshot below `want`, which is the state itself or the anchor beside it (`anchor_of`).

    Raises: MissingError where neither way is on the store, InputError where both are longer than `limit` deltas,
    ChecksumError where a delta does not build on the state that its base's index names.
    """
    if have is not None and (deltas := _from_have(read_index, have, want, limit)) is not None:
        return Route(None, deltas)
    return _from_anchor(read_index, want, limit)


def _from_have(read_index: ReadIndex, have: str, want: str, limit: int) -> tuple[SnapshotIndex, ...] | None:
    """The deltas between the two; None where they do not connect."""
    held = _index_or_none(read_index, have)
    deltas: list[SnapshotIndex] = []
    at = want
    while at != have:
        index = _index_or_none(read_index, at)
        if index is None or index.base is None or len(deltas) == limit:
            return None
        _push(deltas, index)
        at = index.base
        # An uncommitted attempt beside this delta: the delta overwrites all that the attempt may have written.
        if held and index.operation == "overwrite" and held.base == at:
            return tuple(reversed(deltas))
    if deltas and held and held.digest and deltas[-1].base_digest not in ("", held.digest):
        raise ChecksumError(f"{deltas[-1].identity} builds on another state than {have}")
    return tuple(reversed(deltas))


def _from_anchor(read_index: ReadIndex, want: str, limit: int) -> Route:
    deltas: list[SnapshotIndex] = []
    at = want
    while True:
        index = _index_or_none(read_index, at)
        # The delta beside an anchor may have been pruned: nobody who starts at the anchor needs it.
        anchor = index if index and index.kind == "full" else _index_or_none(read_index, anchor_of(at))
        if anchor is not None:
            _require_link(anchor, deltas)
            return Route(anchor, tuple(reversed(deltas)))
        if index is None:
            raise MissingError(f"{want}: neither {at} nor {anchor_of(at)} is on the store")
        if len(deltas) == limit:
            raise InputError(f"{want}: the chain is too long: no full snapshot within {limit} deltas")
        _push(deltas, index)
        assert index.base is not None  # a delta has one
        at = index.base


def _push(deltas: list[SnapshotIndex], index: SnapshotIndex) -> None:
    _require_link(index, deltas)
    deltas.append(index)


def _require_link(lower: SnapshotIndex, deltas: list[SnapshotIndex]) -> None:
    """Raises: ChecksumError unless the last of `deltas` builds on the state of `lower`."""
    if deltas and lower.digest and deltas[-1].base_digest not in ("", lower.digest):
        raise ChecksumError(f"{deltas[-1].identity} builds on another state than {lower.identity}")


def _index_or_none(read_index: ReadIndex, identity: str) -> SnapshotIndex | None:
    try:
        return read_index(identity)
    except MissingError:
        return None

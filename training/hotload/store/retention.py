"""Which snapshots may go: never one that a live replica, a resumable trainer or the way to either of them needs.

A chain whose lower end was pruned corrupts whoever replays it (NovaSky-AI/SkyRL#1902), so what is needed is found by the same
`route` that readers use, not by counting.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from groundhop.errors import GroundhopError, InputError, MissingError
from groundhop.training.hotload.store.index import (
    ANCHOR_SUFFIX,
    INDEX_NAME,
    PART_KEY,
    SnapshotIndex,
    index_key,
    read_index,
)
from groundhop.training.hotload.store.log import Abort, Commit, CommitLog, Entry
from groundhop.training.hotload.store.objects import Objects
from groundhop.training.hotload.store.route import CHAIN_LIMIT, Route, route

logger = logging.getLogger(__name__)


def plan_pruning(
    indexes: Iterable[SnapshotIndex],
    live: AbstractSet[str],
    resumable: AbstractSet[str],
    keep_anchors: int = 2,
    limit: int = CHAIN_LIMIT,
) -> list[str]:
    """The identities that nobody needs, oldest first.

    `indexes`: all snapshots on the store. `live`: what replicas hold, `resumable`: what trainers would start from, both with the
    head. Kept are every snapshot from the oldest of those on, the way from nothing to each of them, and the newest
    `keep_anchors` full ones. For one that is not on the store, the deltas that build on it stand in. None at all: nothing goes.
    Raises: InputError for a negative `keep_anchors`.
    """
    if keep_anchors < 0:
        raise InputError(f"need keep_anchors of at least 0, got {keep_anchors}")
    known = {index.identity: index for index in indexes}
    needed = live | resumable
    versions = [known[name].version for name in needed if name in known]
    # One that is unknown here (a deployment's own first weights) may still be on the way to deltas that name it.
    versions += [index.version for index in known.values() if index.base in needed and index.base not in known]
    if not versions:
        return []
    keep = {name for name, index in known.items() if index.version >= min(versions)}
    for name in needed & known.keys():
        keep |= _way(known, name, limit)
    full = sorted((i for i in known.values() if i.kind == "full"), key=_age, reverse=True)
    keep |= {index.identity for index in full[:keep_anchors]}
    return [index.identity for index in sorted(known.values(), key=_age) if index.identity not in keep]


def _age(index: SnapshotIndex) -> tuple[int, str]:
    return index.version, index.identity


def _way(known: dict[str, SnapshotIndex], name: str, limit: int) -> set[str]:
    """All snapshots that restoring `name` from nothing reads; everything it can reach where that cannot be done."""

    def read(identity: str) -> SnapshotIndex:
        if identity not in known:
            raise MissingError(identity)
        return known[identity]

    try:
        way = route(read, None, name, limit)
    except GroundhopError:
        reached: set[str] = set()
        at: str | None = name
        while at in known and at not in reached:
            reached.add(at)
            at = known[at].base
        return reached
    return _identities(way) | {name}


def _identities(way: Route) -> set[str]:
    return {index.identity for index in (*((way.anchor,) if way.anchor else ()), *way.deltas)}


def prune(
    objects: Objects,
    log: CommitLog,
    live: AbstractSet[str],
    resumable: AbstractSet[str],
    keep_anchors: int = 2,
    *,
    dry_run: bool = False,
) -> list[str]:
    """Delete what nobody needs, and what killed attempts left. Returns the identities that went. The head always counts as live.

    An index goes before its parts: what readers can find is whole. A prune that was killed is finished by the next one. It may
    run beside a publisher and its readers. `dry_run`: only say what would go.
    """
    # The log first: what it says is committed has its index by the time of the listing, so that one without is half pruned.
    entries = log.entries()
    head = next((entry for entry in reversed(entries) if isinstance(entry, Commit)), None)
    keys = objects.list("")
    by_folder: dict[str, list[str]] = {}
    for key in keys:
        folder, _, file = key.partition("/")
        if file and "/" not in file:
            by_folder.setdefault(folder, []).append(key)
    indexes = {name: read_index(objects, name) for name in by_folder if f"{name}/{INDEX_NAME}" in by_folder[name]}
    wanted = plan_pruning(indexes.values(), live | ({head.identity} if head else set()), resumable, keep_anchors)
    if dry_run:
        return wanted
    for name in wanted:
        objects.delete(index_key(name))
        _delete(objects, by_folder[name])
    for name in _left_behind(entries, by_folder.keys() - indexes.keys() - live - resumable, indexes):
        _delete(objects, by_folder[name])
    for name, index in indexes.items():
        if name not in wanted:
            named = {part.key for part in index.parts}
            _delete(objects, [key for key in by_folder[name] if PART_KEY.fullmatch(key) and key not in named])
    logger.debug("pruned %d of %d snapshots", len(wanted), len(indexes))
    return wanted


def _left_behind(
    entries: Sequence[Entry], folders: AbstractSet[str], indexes: Mapping[str, SnapshotIndex]
) -> list[str]:
    """Folders without an index to which nobody writes: the log says that they were committed (and so are half pruned), or given up."""
    newest_full = max((index.version for index in indexes.values() if index.kind == "full"), default=-1)
    settled = {entry.identity: entry.version for entry in entries if isinstance(entry, Commit | Abort)}

    def idle(name: str) -> bool:
        # An anchor is uploaded after its commit; it is left behind when the snapshot beside it is gone and a newer one is there.
        plain = name.removesuffix(ANCHOR_SUFFIX)
        return plain == name or (plain not in indexes and settled[plain] < newest_full)

    return [name for name in sorted(folders) if name.removesuffix(ANCHOR_SUFFIX) in settled and idle(name)]


def _delete(objects: Objects, keys: Iterable[str]) -> None:
    for key in keys:
        objects.delete(key)

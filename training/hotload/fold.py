"""Make one delta of several in a row: applied once, it gives what applying each in order gives.

Two operations on one element are one: xor with xor, add with add, anything with an overwrite before or after it. Xor
with add is neither. Context encoding says what an element becomes only to a reader that holds the old bits; so does the
fold of such deltas.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from groundhop.errors import ChecksumError, InputError
from groundhop.training.hotload.bits import Bits, TensorSpec, Weights
from groundhop.training.hotload.changes import Change, Operation, check_bits
from groundhop.training.hotload.codec import CHUNK_ELEMENTS, encode_change
from groundhop.training.hotload.delta_file import dump_delta, read_delta
from groundhop.training.hotload.fingerprint import fingerprint
from groundhop.training.hotload.kernels import spans
from groundhop.training.hotload.tensor_delta import Delta, Entry, TensorDelta, encode_tensor

KINDS: tuple[Operation, ...] = ("overwrite", "xor", "add")
OVERWRITE, XOR, ADD = range(3)

Step = tuple[Delta, Entry]


@dataclass(frozen=True, slots=True)
class Effects:
    """What happens to elements of one tensor: positions (increasing), the number of the operation, its value."""

    positions: NDArray[np.int64]
    kinds: NDArray[np.uint8]
    values: Bits


def fold(deltas: Sequence[Delta], base: Weights | None = None) -> Delta:
    """Compose `deltas`, oldest first. With `base`, the state before the first, the result is coded anew and is the smallest.

    Raises: InputError where they do not follow on each other, mix xor and add on one element, or need the old bits
    (context encoding) without `base`; ChecksumError where `base` is another state.
    """
    if not deltas:
        raise InputError("need at least one delta to fold")
    for before, after in pairwise(deltas):
        if before.digest and after.base_digest and before.digest != after.base_digest:
            raise InputError(f"version {after.version} does not build on version {before.version}")
    steps: dict[str, list[Step]] = {}
    for delta in deltas:
        for entry in delta.entries:
            steps.setdefault(entry.name, []).append((delta, entry))
    made = (_compose(row) if base is None else _redo(row, base) for row in steps.values())
    last = deltas[-1]
    content = dump_delta(
        (one for one in made if one), version=last.version, base_digest=deltas[0].base_digest, digest=last.digest
    )
    return read_delta(content)


def _check_row(row: Sequence[Step]) -> TensorSpec:
    """One tensor's steps follow on each other."""
    for (_, before), (delta, after) in pairwise(row):
        if before.spec != after.spec or after.base_fingerprint not in (None, before.fingerprint):
            raise InputError(f"{after.name}: version {delta.version} does not build on the version before it")
    return row[0][1].spec


def _redo(row: Sequence[Step], base: Weights) -> TensorDelta | None:
    """Apply one tensor's steps to a copy and compare."""
    spec = _check_row(row)
    old = base.bits(spec.name)
    check_bits(spec.name, old, spec.unit, spec.size)
    first, target = fingerprint(old), row[-1][1].fingerprint
    if row[0][1].base_fingerprint not in (None, first):
        raise ChecksumError(f"{spec.name}: version {row[0][0].version} builds on another state than the one given")
    new = old.copy()
    for delta, entry in row:
        for change in delta.changes(entry, lambda start, stop: new[start:stop]):
            change.scatter(new, change.result(change.gather(new)))
    if fingerprint(new) != target:
        raise ChecksumError(f"{spec.name}: the deltas do not give what they promise")
    return encode_tensor(spec, old, new, prints=(first, target))


def _compose(row: Sequence[Step]) -> TensorDelta | None:
    """Compose one tensor's steps without its bits."""
    spec = _check_row(row)
    effects = Effects(np.empty(0, np.int64), np.empty(0, np.uint8), np.empty(0, spec.unit))
    for delta, entry in row:
        effects = _then(effects, _effects(delta.changes(entry), spec), spec.name)
    idle = (effects.kinds != OVERWRITE) & (effects.values == 0)
    effects = Effects(effects.positions[~idle], effects.kinds[~idle], effects.values[~idle])
    base, target = row[0][1].base_fingerprint, row[-1][1].fingerprint
    if not effects.positions.size and base == target:
        return None
    chunks = tuple(
        chunk
        for start, stop in spans(spec.size, CHUNK_ELEMENTS)
        for change in _changes(effects, start, stop)
        if (chunk := encode_change(change, stop - start))
    )
    return TensorDelta(spec, base, target, chunks)


def _effects(changes: Iterable[Change], spec: TensorSpec) -> Effects:
    """The changes of one delta, by position."""
    empty = Effects(np.empty(0, np.int64), np.empty(0, np.uint8), np.empty(0, spec.unit))
    parts = [empty]
    for change in changes:
        kinds = np.full(change.values.size, KINDS.index(change.operation), np.uint8)
        parts.append(Effects(change.absolute(), kinds, change.values))
    return _sorted(parts)


def _sorted(parts: Sequence[Effects]) -> Effects:
    positions = np.concatenate([part.positions for part in parts])
    kinds, values = np.concatenate([p.kinds for p in parts]), np.concatenate([p.values for p in parts])
    if positions.size and bool((positions[1:] <= positions[:-1]).any()):
        order = np.argsort(positions, kind="stable")
        positions, kinds, values = positions[order], kinds[order], values[order]
    return Effects(positions, kinds, values)


def _then(first: Effects, second: Effects, name: str) -> Effects:
    """`first`, and `second` after it."""
    _, early, late = np.intersect1d(first.positions, second.positions, assume_unique=True, return_indices=True)
    was, now = first.kinds[early], second.kinds[late]
    if bool(((now != OVERWRITE) & (was != OVERWRITE) & (was != now)).any()):
        raise InputError(f"{name}: xor and add on one element cannot be folded")
    before, value = first.values[early], second.values[late]
    joined = np.where(now == OVERWRITE, value, np.where(now == XOR, before ^ value, before + value))
    kinds = np.where(now == OVERWRITE, now, was)
    return _sorted(
        [
            _without(first, early),
            _without(second, late),
            Effects(first.positions[early], kinds.astype(np.uint8), joined.astype(first.values.dtype)),
        ]
    )


def _without(effects: Effects, taken: NDArray[np.int64]) -> Effects:
    keep = np.ones(effects.positions.size, bool)
    keep[taken] = False
    return Effects(effects.positions[keep], effects.kinds[keep], effects.values[keep])


def _changes(effects: Effects, start: int, stop: int) -> Iterator[Change]:
    """What happens to one stretch, an operation at a time."""
    low, high = np.searchsorted(effects.positions, (start, stop))
    positions, kinds = effects.positions[low:high] - start, effects.kinds[low:high]
    for number, operation in enumerate(KINDS):
        chosen = kinds == number
        yield Change(start, positions[chosen].astype(np.uint32), operation, effects.values[low:high][chosen])

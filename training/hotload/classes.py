"""Sort elements into classes by the exponent of their old value, and number the elements of each class.

An optimiser moves all weights by about the same amount, and a weight of exponent e is rounded to steps of 2^e, so the
exponent says how likely an element is to have changed and how far it has moved. Each class is coded by itself: which of its
elements changed, as ranks among the elements of that class in order of position.

Ranks come from one pass over the old bits that keeps the counters of all classes in the bytes of one 64-bit word.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from groundhop.training.hotload.bits import Bits
from groundhop.training.hotload.kernels import compiled, fixed
from groundhop.training.hotload.locations import Ranks

MOST_CLASSES = 8
"""As many as a 64-bit word has bytes."""
CLASS_BITS = 8 * 48
"""What a class costs by itself (section heads, tables of the codes), against which its gain is weighed."""
SAMPLE_BLOCK, SAMPLE_EACH = 64, 16
"""Exponents are counted in one block of so many elements out of so many blocks: the counts only guide the split."""
RUN = 16
"""Elements between two looks at the counters."""
FAR = 1 << 40
"""Elements to skip where a class has no more ranks."""


class Field(NamedTuple):
    """Where the exponent lies in a float's bits; the sign is the bit above."""

    shift: int
    bits: int


FIELDS = {"BF16": Field(7, 8), "F16": Field(10, 5), "F32": Field(23, 8)}
"""The types that context encoding is for (bfloat16, and IEEE 754 binary16 and binary32)."""

Bounds = Sequence[int]
"""The first exponent of each class but the lowest, strictly increasing."""


class Ranked(NamedTuple):
    """Changed elements, class by class."""

    order: NDArray[np.int64]
    """Sorts the positions by class, keeping their order within one."""
    ranks: Ranks
    """In that order."""
    counts: list[int]
    """Changed elements of each class."""
    totals: list[int]
    """All elements of each class."""


class Placed(NamedTuple):
    """Where ranked elements lie."""

    positions: Ranks
    """Increasing."""
    sources: NDArray[np.int64]
    """For each position, its place in the classes' ranks joined one after the other."""


def choose_bounds(old: Bits, positions: Ranks, field: Field) -> list[int]:
    """Split the exponents into at most MOST_CLASSES ranges so that coding the locations takes the fewest bits."""
    sampled = _sample(fixed(old), field.shift, 1 << field.bits)
    return split_exponents(sampled, old[positions], old.size, field)


def split_exponents(sampled: NDArray[np.int64], before: Bits, size: int, field: Field) -> list[int]:
    """The same from counts: `sampled[e]` elements of exponent e in the sample of `size` elements; `before` are those that change."""
    exponents = (before >> field.shift) & ((1 << field.bits) - 1)
    changed = np.bincount(exponents, minlength=1 << field.bits).astype(np.float64)
    totals = np.maximum(sampled * (size / max(1, int(sampled.sum()))), changed)
    present = np.flatnonzero(totals)
    starts = _partition(totals[present], changed[present], MOST_CLASSES, float(CLASS_BITS))
    return [int(present[start]) for start in starts if start > 0]


def rank_in_classes(old: Bits, positions: Ranks, field: Field, bounds: Bounds) -> Ranked:
    """Number the elements at `positions` within their classes."""
    ranks, classes, totals = _rank(fixed(old), fixed(positions), class_table(field, bounds), field.shift)
    counts = np.bincount(classes, minlength=MOST_CLASSES)
    order = np.argsort(classes, kind="stable")
    used = len(bounds) + 1
    return Ranked(order, ranks[order], counts[:used].tolist(), totals[:used].tolist())


def place(old: Bits, ranks: Sequence[Ranks], field: Field, bounds: Bounds) -> Placed | None:
    """The inverse of `rank_in_classes`: `ranks[c]` belong to class c. None where a class has fewer elements than that."""
    joined = np.concatenate(ranks)
    ends = np.full(MOST_CLASSES + 1, joined.size, np.int64)
    ends[: len(ranks)] = np.cumsum([0, *(part.size for part in ranks[:-1])])
    positions, sources, found = _place(fixed(old), fixed(joined), ends, class_table(field, bounds), field.shift)
    return Placed(positions, sources) if found == joined.size else None


def class_table(field: Field, bounds: Bounds) -> NDArray[np.uint8]:
    """The class by sign and exponent together, so that one shift makes the key."""
    keys = 1 << field.bits
    exponents = np.arange(2 * keys) & (keys - 1)
    return np.searchsorted(np.asarray(bounds, np.int64), exponents, side="right").astype(np.uint8)


@compiled
def _sample(old: Any, shift: int, keys: int) -> NDArray[np.int64]:
    counts = np.zeros(keys, np.int64)
    for start in range(0, old.size, SAMPLE_BLOCK * SAMPLE_EACH):
        for i in range(start, min(start + SAMPLE_BLOCK, old.size)):
            counts[(old[i] >> shift) & (keys - 1)] += 1
    return counts


@compiled
def _cost(total: float, changed: float) -> float:
    """Bits that locations take: total times the entropy of a coin with their share."""
    rest = total - changed
    if changed <= 0.0 or rest <= 0.0:
        return 8.0
    bits: float = changed * np.log2(total / changed) + rest * np.log2(total / rest)
    return bits


@compiled
def _partition(totals: Any, changed: Any, most: int, each: float) -> NDArray[np.int64]:
    """Cut a row of counts into ranges at the least cost, by dynamic programming over (ranges, end). Returns their starts."""
    size = totals.size
    costs = np.full((most + 1, size + 1), np.inf)
    cuts = np.zeros((most + 1, size + 1), np.int64)
    costs[0, 0] = 0.0
    for kinds in range(1, most + 1):
        for stop in range(1, size + 1):
            total, part = 0.0, 0.0
            for start in range(stop - 1, -1, -1):
                total += totals[start]
                part += changed[start]
                cost = costs[kinds - 1, start] + _cost(total, part) + each
                if cost < costs[kinds, stop]:
                    costs[kinds, stop] = cost
                    cuts[kinds, stop] = start
    used = np.argmin(costs[1:, size]) + 1
    starts = np.empty(used, np.int64)
    end = np.int64(size)
    for kind in range(used, 0, -1):
        end = cuts[kind, end]
        starts[kind - 1] = end
    return starts


@compiled
def _steps(table: Any) -> NDArray[np.uint64]:
    """What an element adds to the word of counters, by its key."""
    steps = np.empty(table.size, np.uint64)
    for key in range(table.size):
        steps[key] = np.uint64(1) << (np.uint64(8) * np.uint64(table[key]))
    return steps


@compiled
def _rank(old: Any, positions: Any, table: Any, shift: int) -> tuple[Ranks, NDArray[np.uint8], NDArray[np.int64]]:
    ranks = np.empty(positions.size, np.uint32)
    classes = np.empty(positions.size, np.uint8)
    seen = np.zeros(MOST_CLASSES, np.int64)
    steps = _steps(table)
    at = np.int64(0)
    for i in range(positions.size + 1):
        goal = np.int64(positions[i]) if i < positions.size else np.int64(old.size)
        while at < goal:
            stop = min(goal, at + 255)
            word = np.uint64(0)
            for j in range(at, stop):
                word += steps[old[j] >> shift]
            for kind in range(MOST_CLASSES):
                seen[kind] += np.int64((word >> np.uint64(8 * kind)) & np.uint64(255))
            at = stop
        if i < positions.size:
            mine = table[old[goal] >> shift]
            classes[i] = mine
            ranks[i] = seen[mine]
    return ranks, classes, seen


@compiled
def _place(old: Any, ranks: Any, ends: Any, table: Any, shift: int) -> tuple[Ranks, NDArray[np.int64], int]:
    """Each counter runs up to 128, from as far below as elements of its class are to be passed, 127 at most."""
    high = np.uint64(0x8080808080808080)
    positions = np.empty(ranks.size, np.uint32)
    sources = np.empty(ranks.size, np.int64)
    steps = _steps(table)
    cursor = ends[:-1].copy()
    skip = np.empty(MOST_CLASSES, np.int64)
    word = np.uint64(0)
    for kind in range(MOST_CLASSES):
        skip[kind] = np.int64(ranks[cursor[kind]]) if cursor[kind] < ends[kind + 1] else FAR
        word |= np.uint64(127 - min(skip[kind], 127)) << np.uint64(8 * kind)
    found = 0
    for start in range(0, old.size, RUN):
        stop = min(start + RUN, old.size)
        ahead = word
        for j in range(start, stop):
            ahead += steps[old[j] >> shift]
        if not ahead & high:
            word = ahead
            continue
        for j in range(start, stop):
            key = old[j] >> shift
            word += steps[key]
            if word & high:
                mine = np.int64(table[key])
                if skip[mine] > 127:
                    skip[mine] -= 128
                else:
                    positions[found] = j
                    sources[found] = cursor[mine]
                    found += 1
                    last = np.int64(ranks[cursor[mine]])
                    cursor[mine] += 1
                    skip[mine] = np.int64(ranks[cursor[mine]]) - last - 1 if cursor[mine] < ends[mine + 1] else FAR
                place = np.uint64(8 * mine)
                word = word & ~(np.uint64(255) << place) | np.uint64(127 - min(skip[mine], 127)) << place
    return positions, sources, found

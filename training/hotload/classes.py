"""Sort elements into classes by the exponent of their old value, and number the elements of each class.

An optimiser moves all weights by about the same amount, and a weight of exponent e is rounded to steps of 2^e, so the
exponent says how likely an element is to have changed and how far it has moved. Each class is coded by itself: which of its
elements changed, as ranks among the elements of that class in order of position.

Ranks come from one pass over the old bits, 64 at a time: since classes are ranges of exponents, one comparison a class gives
the elements at or above it as a mask, and counting bits does the rest.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from groundhop.training.hotload.bits import Bits
from groundhop.training.hotload.kernels import compiled, fixed
from groundhop.training.hotload.locations import Ranks
from groundhop.training.hotload.masks import LANES, at_least, count_ones, first_one

MOST_CLASSES = 5
"""More gain under 1 %, and cost every pass over the old bits a comparison each."""
CLASS_BITS = 8 * 48
"""What a class costs by itself (section heads, tables of the codes), against which its gain is weighed."""
SAMPLE_BLOCK = 64
SAMPLE_BLOCKS = 256
"""Exponents are counted in about so many blocks of so many elements: the counts only guide the split into classes."""
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
    before: Bits
    """The old bits there."""


def choose_bounds(old: Bits, before: Bits, field: Field) -> list[int]:
    """Split the exponents into at most MOST_CLASSES ranges so that coding the locations takes the fewest bits.

    `before`: those elements of `old` that change.
    """
    sampled = _sample(fixed(old), sample_step(old.size), field.shift, 1 << field.bits)
    return split_exponents(sampled, before, old.size, field)


def sample_step(size: int) -> int:
    """Elements from the start of a block that is counted to the next."""
    return SAMPLE_BLOCK * max(1, size // (SAMPLE_BLOCK * SAMPLE_BLOCKS))


def split_exponents(sampled: NDArray[np.int64], before: Bits, size: int, field: Field) -> list[int]:
    """The same from counts: `sampled[e]` elements of exponent e in the sample of `size` elements; `before` are those that change."""
    few = _sample(fixed(before), sample_step(before.size), field.shift, 1 << field.bits)
    changed = few * (before.size / max(1, int(few.sum())))
    totals = np.maximum(sampled * (size / max(1, int(sampled.sum()))), changed)
    present = np.flatnonzero(totals)
    starts = _partition(totals[present], changed[present], MOST_CLASSES, float(CLASS_BITS))
    return [int(present[start]) for start in starts if start > 0]


def rank_in_classes(old: Bits, positions: Ranks, field: Field, bounds: Bounds) -> Ranked:
    """Number the elements at `positions` within their classes."""
    bounds_low, mask = _thresholds(field, bounds)
    ranks, classes = np.empty(positions.size, np.uint32), np.empty(positions.size, np.uint8)
    above = np.zeros(MOST_CLASSES + 1, np.int64)
    done = 0
    for start, part in _blocks(old):
        done = _rank(fixed(part), start, fixed(positions), done, bounds_low, mask, above, ranks, classes)
    above[0] = old.size
    order, ranks, counts = _by_class(fixed(classes), fixed(ranks))
    used = len(bounds) + 1
    return Ranked(order, ranks, counts[:used].tolist(), (above[:used] - above[1 : used + 1]).tolist())


def place(old: Bits, ranks: Sequence[Ranks], field: Field, bounds: Bounds) -> Placed | None:
    """The inverse of `rank_in_classes`: `ranks[c]` belong to class c. None where a class has fewer elements than that."""
    joined = np.concatenate(ranks)
    ends = np.full(MOST_CLASSES + 1, joined.size, np.int64)
    ends[: len(ranks)] = np.cumsum([0, *(part.size for part in ranks[:-1])])
    skip = np.full(MOST_CLASSES, FAR, np.int64)
    for kind, part in enumerate(ranks):
        skip[kind] = part[0] if part.size else FAR
    bounds_low, mask = _thresholds(field, bounds)
    positions, sources = np.empty(joined.size, np.uint32), np.empty(joined.size, np.int64)
    before = np.empty(joined.size, old.dtype)
    cursor, found = ends[:-1].copy(), 0
    for start, block in _blocks(old):
        found = _place(
            fixed(block), start, fixed(joined), ends, bounds_low, mask, skip, cursor, found, positions, sources, before
        )
    if found < joined.size or (found and int(positions[-1]) >= old.size):
        return None
    return Placed(positions, sources, before)


def _blocks(old: Bits) -> Iterator[tuple[int, Bits]]:
    """Whole blocks of 64, then the rest filled up with zeros, each with its place."""
    whole = old.size // LANES * LANES
    yield 0, old[:whole]
    if whole < old.size:
        rest = np.zeros(LANES, old.dtype)
        rest[: old.size - whole] = old[whole:]
        yield whole, rest


def _thresholds(field: Field, bounds: Bounds) -> tuple[NDArray[np.uint64], np.uint64]:
    """The smallest bits, without the sign, of classes 1 to 7 (none where there is no such class), and the mask of those bits."""
    least = [bound << field.shift for bound in bounds]
    above_all = 1 << (field.shift + field.bits)
    filled = least + [above_all] * (MOST_CLASSES - 1 - len(least))
    return np.array(filled, np.uint64), np.uint64(above_all - 1)


def class_table(field: Field, bounds: Bounds) -> NDArray[np.uint8]:
    """The class by sign and exponent together, so that one shift makes the key."""
    keys = 1 << field.bits
    exponents = np.arange(2 * keys) & (keys - 1)
    return np.searchsorted(np.asarray(bounds, np.int64), exponents, side="right").astype(np.uint8)


@compiled
def _sample(old: Any, step: int, shift: int, keys: int) -> NDArray[np.int64]:
    counts = np.zeros(keys, np.int64)
    for start in range(0, old.size, step):
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
    alone = np.empty((size, size + 1))
    for start in range(size):
        total, part = 0.0, 0.0
        for stop in range(start + 1, size + 1):
            total += totals[stop - 1]
            part += changed[stop - 1]
            alone[start, stop] = _cost(total, part) + each
    costs = np.full((most + 1, size + 1), np.inf)
    cuts = np.zeros((most + 1, size + 1), np.int64)
    costs[0, 0] = 0.0
    for kinds in range(1, most + 1):
        for stop in range(1, size + 1):
            for start in range(stop):
                cost = costs[kinds - 1, start] + alone[start, stop]
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


def _select_table() -> NDArray[np.uint8]:
    """For each rank and byte, the place of the set bit of that rank; 0 where there is none."""
    table = np.zeros((8, 256), np.uint8)
    for byte in range(256):
        places = [place_in for place_in in range(8) if byte >> place_in & 1]
        table[: len(places), byte] = places
    return table


_IN_BYTE = _select_table()


@compiled
def _masks(old: Any, at: int, least: Any, mask: Any, masks: Any) -> None:
    """`masks[c]`: the elements `at ... at + 63` in class c or above; the first is all of them, the last none."""
    # All before the first is stored: a store might be to `old`, as far as the compiler knows, and it would be loaded anew.
    one, two = at_least(old, at, mask, least[0]), at_least(old, at, mask, least[1])
    three, four = at_least(old, at, mask, least[2]), at_least(old, at, mask, least[3])
    masks[1], masks[2], masks[3], masks[4] = one, two, three, four


@compiled
def _by_class(classes: Any, ranks: Any) -> tuple[NDArray[np.int64], Ranks, NDArray[np.int64]]:
    """Sort by class, keeping the order within one. Returns: the order, the ranks in it, how many of each class."""
    counts = np.zeros(MOST_CLASSES, np.int64)
    for i in range(classes.size):
        counts[classes[i]] += 1
    free = np.cumsum(counts) - counts
    order, sorted_ranks = np.empty(classes.size, np.int64), np.empty(classes.size, np.uint32)
    for i in range(classes.size):
        slot = free[classes[i]]
        free[classes[i]] += 1
        order[slot], sorted_ranks[slot] = i, ranks[i]
    return order, sorted_ranks, counts


@compiled
def _select(word: Any, rank: Any) -> Any:
    """The place of the set bit of `word` that has `rank` set bits below it.

    Sums of bits by byte, then the byte, then the bits in it: Vigna, "Broadword implementation of rank/select queries",
    WEA 2008, algorithm 2. Loops would be guessed wrong at every turn, which costs more than all of this.
    """
    ones, high = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
    sums = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    sums = (sums & np.uint64(0x3333333333333333)) + ((sums >> np.uint64(2)) & np.uint64(0x3333333333333333))
    sums = ((sums + (sums >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)) * ones
    wanted = np.uint64(rank)
    byte = np.uint64(8) * np.uint64(count_ones((((wanted * ones) | high) - sums) & high))
    left = wanted - (((sums << np.uint64(8)) >> byte) & np.uint64(255))
    bits = (word >> byte) & np.uint64(255)
    return np.int64(byte) + np.int64(_IN_BYTE[np.int64(left), np.int64(bits)])


@compiled
def _rank(
    old: Any, start: int, positions: Any, done: int, least: Any, mask: Any, above: Any, ranks: Any, classes: Any
) -> int:
    """Go on with the `done`-th position; `above[c]` counts the elements before `start` in class c or above."""
    masks = np.zeros(MOST_CLASSES + 1, np.uint64)
    masks[0] = ~np.uint64(0)
    for at in range(0, old.size, LANES):
        _masks(old, at, least, mask, masks)
        while done < positions.size and positions[done] < start + at + LANES:
            place_in = np.uint64(positions[done] - start - at)
            kind = np.int64(0)
            for j in range(1, MOST_CLASSES):
                kind += np.int64((masks[j] >> place_in) & np.uint64(1))
            before = (np.uint64(1) << place_in) - np.uint64(1)
            inside = count_ones(masks[kind] & ~masks[kind + 1] & before)
            ranks[done] = above[kind] - above[kind + 1] + inside
            classes[done] = kind
            done += 1
        for j in range(MOST_CLASSES):
            above[j] += count_ones(masks[j])
    return done


@compiled
def _place(
    old: Any, start: int, ranks: Any, ends: Any, least: Any, mask: Any, skip: Any, cursor: Any, found: int,
    positions: Any, sources: Any, before: Any,
) -> int:  # fmt: skip
    """Go on with the `found`-th position; `skip[c]` elements of class c come before its next one, `ranks[cursor[c]]`."""
    masks, counts = np.zeros(MOST_CLASSES + 1, np.uint64), np.empty(MOST_CLASSES, np.int64)
    masks[0] = ~np.uint64(0)
    for at in range(0, old.size, LANES):
        _masks(old, at, least, mask, masks)
        which = np.uint64(0)
        for kind in range(MOST_CLASSES):
            counts[kind] = count_ones(masks[kind] & ~masks[kind + 1])
            which |= np.uint64(skip[kind] < counts[kind]) << np.uint64(kind)
            skip[kind] -= counts[kind]
        begin = found
        while which:
            mine = first_one(which)
            which &= which - np.uint64(1)
            while skip[mine] < 0:
                place_in = _select(masks[mine] & ~masks[mine + 1], skip[mine] + counts[mine])
                position = np.uint32(start + at + place_in)
                slot = found
                while slot > begin and positions[slot - 1] > position:
                    positions[slot], sources[slot], before[slot] = (
                        positions[slot - 1],
                        sources[slot - 1],
                        before[slot - 1],
                    )
                    slot -= 1
                positions[slot], sources[slot], before[slot] = position, cursor[mine], old[at + place_in]
                found += 1
                last = np.int64(ranks[cursor[mine]])
                cursor[mine] += 1
                more = cursor[mine] < ends[mine + 1]
                skip[mine] += np.int64(ranks[cursor[mine]]) - last if more else FAR
    return found

"""Sort elements into classes by the exponent of their old value, and number the elements of each class.

An optimiser moves all weights by about the same amount, and a weight of exponent e is rounded to steps of 2^e, so the
exponent says how likely an element is to have changed and how far it has moved. Each class is coded by itself: which of its
elements changed, as ranks among the elements of that class in order of position.

Ranks come from one pass over the old bits, 64 at a time: since classes are ranges of exponents, one comparison a class gives
the elements at or above it as a mask, and counting bits does the rest. The way back makes a bitmap of each class's ranks;
then the next bits of it, as many as 64 elements have of the class, are given their places.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from groundhop.training.hotload.bits import Bits
from groundhop.training.hotload.kernels import compiled, fixed
from groundhop.training.hotload.locations import Ranks
from groundhop.training.hotload.masks import LANES, at_least, count_ones, fetch_ahead
from groundhop.training.hotload.words import Words, bits_at, deposit, flag, list_ones, set_ones

MOST_CLASSES = 3
"""Two more gain 1 % on real data, 4 % on synthetic, and cost every pass over the old bits half as much again."""
CLASS_BITS = 8 * 48
"""What a class costs by itself (section heads, tables of the codes), against which its gain is weighed."""
SAMPLE_BLOCK = 64
SAMPLE_BLOCKS = 256
"""Exponents are counted in about so many blocks of so many elements: the counts only guide the split into classes."""
AHEAD = 32 * LANES
"""How far ahead elements are asked for."""
BATCH = 128
"""Blocks of 64 that are looked at before the changed elements among them are, while the processor still holds them."""


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
    least, mask = _thresholds(field, bounds)
    ranks, classes = np.empty(positions.size, np.uint32), np.empty(positions.size, np.uint8)
    above, counts = np.zeros(MOST_CLASSES + 1, np.int64), np.zeros(MOST_CLASSES, np.int64)
    done = 0
    for start, part in _blocks(old):
        done = _rank(fixed(part), start, fixed(positions), done, least, mask, above, counts, ranks, classes)
    above[0] = old.size
    order, ranks = _by_class(fixed(classes), fixed(ranks), counts)
    used = len(bounds) + 1
    return Ranked(order, ranks, counts[:used].tolist(), (above[:used] - above[1 : used + 1]).tolist())


def place(old: Bits, ranks: Sequence[Ranks], totals: Sequence[int], field: Field, bounds: Bounds) -> Placed | None:
    """The inverse of `rank_in_classes`: `ranks[c]`, below `totals[c]`, belong to class c. None where its elements are not that many."""
    bitmap, begins = _bitmap(ranks, totals, old.size)
    cursors = (LANES * begins).astype(np.uint64)
    least, mask = _thresholds(field, bounds)
    counts = [part.size for part in ranks]
    sources = np.zeros(MOST_CLASSES, np.int64)
    sources[1 : len(counts)] = np.cumsum(counts)[:-1]
    placed = Placed(np.empty(sum(counts), np.uint32), np.empty(sum(counts), np.int64), np.empty(sum(counts), old.dtype))
    found = 0
    for start, block in _blocks(old):
        found = _place(fixed(block), start, bitmap, cursors, least, mask, sources, found, *placed)
    passed = cursors.astype(np.int64) - LANES * begins
    passed[0] -= -old.size % LANES
    if found < sum(counts) or passed[: len(totals)].tolist() != list(totals):
        return None
    return placed


def _bitmap(ranks: Sequence[Ranks], totals: Sequence[int], size: int) -> tuple[Words, NDArray[np.int64]]:
    """The ranks of all classes as bits, and the word at which each class begins.

    There are zeros after each class for the elements that fill up the last block, and after all of them enough words, whatever
    they hold, for reading on where the old bits have more of a class than they should.
    """
    begins = np.zeros(MOST_CLASSES, np.int64)
    ends = np.cumsum([total // LANES + 2 for total in totals])
    begins[1 : len(totals)] = ends[:-1]
    bitmap = np.empty(int(ends[-1]) + size // LANES + 3, np.uint64)
    bitmap[: ends[-1]] = 0
    for begin, part in zip(begins, ranks, strict=False):
        set_ones(bitmap[begin:], fixed(part))
    return bitmap, begins


def _blocks(old: Bits) -> Iterator[tuple[int, Bits]]:
    """Whole blocks of 64, then the rest filled up with zeros, each with its place."""
    whole = old.size // LANES * LANES
    yield 0, old[:whole]
    if whole < old.size:
        rest = np.zeros(LANES, old.dtype)
        rest[: old.size - whole] = old[whole:]
        yield whole, rest


def _thresholds(field: Field, bounds: Bounds) -> tuple[NDArray[np.uint64], np.uint64]:
    """The smallest bits, without the sign, of classes 1 and 2 (none where there is no such class), and the mask of those bits."""
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


@compiled
def _by_class(classes: Any, ranks: Any, counts: Any) -> tuple[NDArray[np.int64], Ranks]:
    """Sort by class, of which there are `counts`, keeping the order within one. Returns: the order, the ranks in it."""
    free = np.cumsum(counts) - counts
    order, sorted_ranks = np.empty(classes.size, np.int64), np.empty(classes.size, np.uint32)
    for i in range(classes.size):
        slot = free[classes[i]]
        free[classes[i]] = slot + 1
        order[slot], sorted_ranks[slot] = i, ranks[i]
    return order, sorted_ranks


@compiled
def _class_of(bits: Any, least: Any, mask: Any) -> Any:
    kept = np.uint64(bits) & mask
    return flag(kept >= least[0]) + flag(kept >= least[1])


@compiled
def _rank(
    old: Any, start: int, positions: Any, done: int, least: Any, mask: Any, above: Any, counts: Any, ranks: Any,
    classes: Any,
) -> int:  # fmt: skip
    """Go on with the `done`-th position; `above[c]` counts the elements before `start` in class c or above."""
    # For each block and class: the elements in it or above as a mask, and how many came before.
    masks, before = np.zeros((BATCH, 4), np.uint64), np.zeros((BATCH, 4), np.int64)
    masks[:, 0] = ~np.uint64(0)
    for first in range(0, old.size, BATCH * LANES):
        stop = min(first + BATCH * LANES, old.size)
        _count(old, first, stop, least, mask, above, masks, before)
        while done < positions.size and np.int64(positions[done]) < start + stop:
            at = np.int64(positions[done]) - start
            kind = _class_of(old[at], least, mask)
            block = (at - first) // LANES
            lower = (np.uint64(1) << np.uint64(at % LANES)) - np.uint64(1)
            inside = count_ones(masks[block, kind] & ~masks[block, kind + 1] & lower)
            ranks[done] = before[block, kind] - before[block, kind + 1] + inside
            classes[done] = kind
            counts[kind] += 1
            done += 1
    return done


@compiled
def _count(old: Any, first: int, stop: int, least: Any, mask: Any, above: Any, masks: Any, before: Any) -> None:
    """Fill in `masks` and `before` for the blocks from `first` to `stop`."""
    least_1, least_2 = least[0], least[1]
    above_1, above_2 = above[1], above[2]
    for block in range((stop - first) // LANES):
        at = first + block * LANES
        # Both before the first is stored: a store might be to `old`, as far as the compiler knows, and it would be loaded anew.
        fetch_ahead(old, at + AHEAD)
        one, two = at_least(old, at, mask, least_1), at_least(old, at, mask, least_2)
        masks[block, 1], masks[block, 2] = one, two
        before[block, 0], before[block, 1], before[block, 2] = above[0] + block * LANES, above_1, above_2
        above_1, above_2 = above_1 + count_ones(one), above_2 + count_ones(two)
    above[0], above[1], above[2] = above[0] + stop - first, above_1, above_2


@compiled
def _place(
    old: Any, start: int, bitmap: Any, cursors: Any, least: Any, mask: Any, free: Any, found: int, positions: Any,
    sources: Any, before: Any,
) -> int:  # fmt: skip
    """Go on with the `found`-th position; the next source of class c is `free[c]`, its next bit `cursors[c]`."""
    words, starts = np.empty(BATCH + 2, np.uint64), np.empty(BATCH + 2, np.int64)
    for first in range(0, old.size, BATCH * LANES):
        end = min(first + BATCH * LANES, old.size)
        ones = _spread(old, first, end, bitmap, cursors, least, mask, words, starts)
        if found + ones > positions.size:
            return -1
        stop = list_ones(words, starts, ones, positions, found)
        for slot in range(found, stop):
            bits = old[positions[slot]]
            kind = _class_of(bits, least, mask)
            before[slot], sources[slot] = bits, free[kind]
            free[kind] += 1
            positions[slot] += start
        found = stop
    return found


@compiled
def _spread(
    old: Any, first: int, stop: int, bitmap: Any, cursors: Any, least: Any, mask: Any, words: Any, starts: Any
) -> int:
    """The meant elements from `first` to `stop` as words that are not 0. Returns how many elements that are."""
    least_1, least_2 = least[0], least[1]
    next_0, next_1, next_2 = cursors[0], cursors[1], cursors[2]
    used, ones = 0, 0
    for at in range(first, stop, LANES):
        fetch_ahead(old, at + AHEAD)
        one, two = at_least(old, at, mask, least_1), at_least(old, at, mask, least_2)
        below, between = ~one, one & ~two
        word = deposit(bits_at(bitmap, next_0), below) | deposit(bits_at(bitmap, next_1), between)
        word |= deposit(bits_at(bitmap, next_2), two)
        next_0 += np.uint64(count_ones(below))
        next_1 += np.uint64(count_ones(between))
        next_2 += np.uint64(count_ones(two))
        words[used], starts[used] = word, at
        used += flag(word != np.uint64(0))
        ones += count_ones(word)
    cursors[0], cursors[1], cursors[2] = next_0, next_1, next_2
    return ones

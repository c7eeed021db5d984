"""Code which of `total` elements are meant: the gaps between them in one byte each, or a bitmap where they are dense.

A gap is the number of elements skipped since the one before. Its low `shift` bits go to a section of raw bits, the rest to
a byte stream in which 255 means "add 255 and go on", so that a stream of bytes with a geometric distribution is left,
which Huffman coding brings close to its entropy. Where most elements are meant, the gaps are those of the others.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from groundhop.errors import InputError
from groundhop.training.hotload.kernels import compiled, fixed
from groundhop.training.hotload.masks import count_ones
from groundhop.training.hotload.streams import Bytes, Reader, Writer
from groundhop.training.hotload.words import bits_at, flag, list_ones, set_ones, words_of

Ranks = NDArray[np.uint32]
"""Strictly increasing."""

ESCAPE = 255
COMPLEMENT, BITMAP = 32, 64
"""The form byte is the shift, plus COMPLEMENT where the gaps are those of the elements not meant; or BITMAP."""
MOST_SHIFT = 24
DENSE = 0.12
"""From this share on a bitmap can be smaller than gaps."""
CLUSTERED = 8
"""Elements lie in clusters where more than one in so many follows within a gap that the shift loses."""
MEAN = 40
"""The mean that a shifted gap stays above: small enough to escape rarely, large enough to leave the code little to round."""


def write_locations(writer: Writer, ranks: Ranks, total: int) -> None:
    """Write `ranks`, all below `total`. Nothing is written where there are none or all: the reader knows the counts."""
    count = ranks.size
    if count in (0, total):
        return
    meant = count / total
    forms: list[tuple[int, Ranks]] = []
    if meant <= 0.75:
        forms += [(shift, ranks) for shift in _shifts(ranks, total)]
    else:
        rest = _complement(fixed(ranks), total)
        forms += [(COMPLEMENT + shift, rest) for shift in _shifts(rest, total)]
    if DENSE < meant < 1 - DENSE / 2:
        forms.append((BITMAP, ranks))
    made = [_form(form, chosen, total) for form, chosen in forms]
    writer.raw(min(made, key=lambda one: one.size).bytes())


def read_locations(reader: Reader, count: int, total: int) -> Ranks:
    """The inverse; `count` is at most `total`, which the caller has bounded. Raises: InputError where it is malformed."""
    if count == 0:
        return np.empty(0, np.uint32)
    if count == total:
        return np.arange(total, dtype=np.uint32)
    form = reader.raw(1)[0]
    if form == BITMAP:
        ranks, fits = _from_bitmap(words_of(reader.section((total + 7) // 8).data), count)
        if not fits or int(ranks[-1]) >= total:
            raise InputError(f"{reader.where}: need {count} bits in a map of {total}, got others")
        return ranks
    shift, inverted = form % COMPLEMENT, form >= COMPLEMENT
    if form >= BITMAP or shift > MOST_SHIFT:
        raise InputError(f"{reader.where}: no form of locations {form}")
    wanted = total - count if inverted else count
    escapes = reader.number()
    if escapes > (total >> shift) // ESCAPE:
        raise InputError(f"{reader.where}: {escapes} escapes are more than {total} elements can need")
    symbols = reader.section(wanted + escapes)
    low = words_of(reader.section((wanted * shift + 7) // 8).data)
    ranks, fits = _from_gaps(fixed(symbols), low, shift, wanted, total)
    if not fits:
        raise InputError(f"{reader.where}: locations are out of range")
    return _complement(fixed(ranks), total) if inverted else ranks


def _shifts(ranks: Ranks, total: int) -> list[int]:
    """Those worth trying: the one for elements that are spread evenly, and none at all where they lie in clusters."""
    mean = total / ranks.size
    if mean <= 2 * MEAN:
        return [0]
    best = int(np.log2(mean / MEAN))
    near = _count_near(fixed(ranks), best)
    return [best, 0] if near * CLUSTERED > ranks.size else [best]


def _form(form: int, ranks: Ranks, total: int) -> Writer:
    writer = Writer()
    writer.raw(bytes([form]))
    if form == BITMAP:
        words = np.zeros(total // 64 + 1, np.uint64)
        set_ones(words, fixed(ranks))
        writer.section(words.view(np.uint8)[: (total + 7) // 8])
        return writer
    symbols, low = _to_gaps(fixed(ranks), form % COMPLEMENT)
    writer.number(symbols.size - ranks.size)
    writer.section(symbols)
    writer.section(low)
    return writer


@compiled
def _count_near(ranks: Any, shift: int) -> int:
    """How many gaps the shift loses."""
    near = 0
    for i in range(1, ranks.size):
        near += flag((np.int64(ranks[i]) - np.int64(ranks[i - 1])) >> shift == 0)
    return near


@compiled
def _to_gaps(ranks: Any, shift: int) -> tuple[Bytes, Bytes]:
    extra, after = np.int64(0), np.int64(0)
    for i in range(ranks.size):
        extra += ((np.int64(ranks[i]) - after) >> shift) // 255
        after = np.int64(ranks[i]) + 1
    symbols = np.empty(ranks.size + extra, np.uint8)
    low = np.zeros((ranks.size * shift + 7) // 8, np.uint8)
    mask = (np.int64(1) << shift) - 1
    after, bits = np.int64(0), np.int64(0)
    at, held, out = 0, 0, 0
    for i in range(ranks.size):
        gap = np.int64(ranks[i]) - after
        after = np.int64(ranks[i]) + 1
        high = gap >> shift
        while high >= 255:
            symbols[at] = 255
            at += 1
            high -= 255
        symbols[at] = high
        at += 1
        bits |= (gap & mask) << held
        held += shift
        while held >= 8:
            low[out] = bits & 255
            out += 1
            bits >>= 8
            held -= 8
    if held > 0:
        low[out] = bits & 255
    return symbols, low


@compiled
def _from_gaps(symbols: Any, low: Any, shift: int, count: int, total: int) -> tuple[Ranks, bool]:
    ranks = np.empty(count, np.uint32)
    step, mask = np.uint64(shift), np.int64((np.uint64(1) << np.uint64(shift)) - np.uint64(1))
    found, after, high, at = 0, np.int64(0), np.int64(0), np.uint64(0)
    for i in range(symbols.size):
        high += np.int64(symbols[i])
        if symbols[i] == 255:
            continue
        if found == count:
            return ranks, False
        rank = after + (high << shift) + (np.int64(bits_at(low, at)) & mask)
        at += step
        if rank >= total:
            return ranks, False
        ranks[found] = rank
        found += 1
        after = rank + 1
        high = np.int64(0)
    return ranks, found == count and high == 0


@compiled
def _complement(ranks: Any, total: int) -> Ranks:
    words = np.zeros(total // 64 + 1, np.uint64)
    set_ones(words, ranks)
    for i in range(words.size):
        words[i] = ~words[i]
    words[total // 64] &= (np.uint64(1) << np.uint64(total % 64)) - np.uint64(1)
    return _from_bitmap(words, total - ranks.size)[0]


@compiled
def _from_bitmap(words: Any, count: int) -> tuple[Ranks, bool]:
    """The places of the ones, and whether there are `count`; none if not."""
    used, starts = np.empty(words.size + 2, np.uint64), np.empty(words.size + 2, np.int64)
    kept, ones = 0, 0
    for i in range(words.size):
        used[kept], starts[kept] = words[i], 64 * i
        kept += flag(words[i] != np.uint64(0))
        ones += count_ones(words[i])
    if ones != count:
        return np.empty(0, np.uint32), False
    ranks = np.empty(count, np.uint32)
    list_ones(used, starts, count, ranks, 0)
    return ranks, True

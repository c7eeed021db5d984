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
from groundhop.training.hotload.streams import Bytes, Reader, Writer

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
        bitmap = np.unpackbits(reader.section((total + 7) // 8), bitorder="little")
        ranks = np.flatnonzero(bitmap).astype(np.uint32)
        if ranks.size != count or int(ranks[-1]) >= total:
            raise InputError(f"{reader.where}: need {count} bits in a map of {total}, got {ranks.size}")
        return ranks
    shift, inverted = form % COMPLEMENT, form >= COMPLEMENT
    if form >= BITMAP or shift > MOST_SHIFT:
        raise InputError(f"{reader.where}: no form of locations {form}")
    wanted = total - count if inverted else count
    escapes = reader.number()
    if escapes > (total >> shift) // ESCAPE:
        raise InputError(f"{reader.where}: {escapes} escapes are more than {total} elements can need")
    symbols = reader.section(wanted + escapes)
    ranks, fits = _from_gaps(fixed(symbols), fixed(reader.section((wanted * shift + 7) // 8)), shift, wanted, total)
    if not fits:
        raise InputError(f"{reader.where}: locations are out of range")
    return _complement(fixed(ranks), total) if inverted else ranks


def _shifts(ranks: Ranks, total: int) -> list[int]:
    """Those worth trying: the one for elements that are spread evenly, and none at all where they lie in clusters."""
    mean = total / ranks.size
    if mean <= 2 * MEAN:
        return [0]
    best = int(np.log2(mean / MEAN))
    near = int(np.count_nonzero((ranks[1:] - ranks[:-1]) >> best == 0))
    return [best, 0] if near * CLUSTERED > ranks.size else [best]


def _form(form: int, ranks: Ranks, total: int) -> Writer:
    writer = Writer()
    writer.raw(bytes([form]))
    if form == BITMAP:
        flags = np.zeros(total, np.uint8)
        flags[ranks] = 1
        writer.section(np.packbits(flags, bitorder="little"))
        return writer
    symbols, low = _to_gaps(fixed(ranks), form % COMPLEMENT)
    writer.number(symbols.size - ranks.size)
    writer.section(symbols)
    writer.section(low)
    return writer


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
    mask = (np.int64(1) << shift) - 1
    found, after, high, bits, held, taken = 0, np.int64(0), np.int64(0), np.int64(0), 0, 0
    for i in range(symbols.size):
        high += np.int64(symbols[i])
        if symbols[i] == 255:
            continue
        if found == count:
            return ranks, False
        while held < shift:
            bits |= np.int64(low[taken]) << held
            taken += 1
            held += 8
        rank = after + (high << shift) + (bits & mask)
        bits >>= shift
        held -= shift
        if rank >= total:
            return ranks, False
        ranks[found] = rank
        found += 1
        after = rank + 1
        high = np.int64(0)
    return ranks, found == count and high == 0


@compiled
def _complement(ranks: Any, total: int) -> Ranks:
    rest = np.empty(total - ranks.size, np.uint32)
    out, at = 0, 0
    for i in range(ranks.size):
        while at < ranks[i]:
            rest[out] = at
            out += 1
            at += 1
        at += 1
    while at < total:
        rest[out] = at
        out += 1
        at += 1
    return rest

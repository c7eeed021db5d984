"""Code what happens to changed elements: a size class a value in one stream, its sign and low bits raw in another.

A non-zero number of `b` bits is its size class b - 1 and its b - 1 bits below the highest one. Differences are signed modulo
2^width: the size is that of the magnitude, and the sign (1 where negative) lies below the other low bits. Weights that just
cross a rounding boundary move by one step, class 0; small weights move by many steps, and their low bits are noise that is
stored as it is. The split is that of Elias gamma codes (Elias, "Universal codeword sets and representations of the
integers", IEEE Trans. Inf. Theory 21, 1975).

Classes are packed 8, 4, 2 or 1 to a byte, so that Huffman coding of the bytes can spend less than a bit on a class: in
1, 2, 4 or 8 bits each, where the largest number means "that or more", and what is above it follows in a second section.
"""

from typing import Any

import numpy as np

from groundhop.errors import InputError
from groundhop.training.hotload.bits import Bits
from groundhop.training.hotload.kernels import compiled, fixed
from groundhop.training.hotload.streams import Bytes, Reader, Writer

NARROW = (1, 2)
"""Bits a class besides those that hold any class."""
MOSTLY, HALF = 0.85, 0.5
"""From these shares of class 0 on, one bit is best, or one or two are."""


def write_values(writer: Writer, values: Bits, counts: list[int], *, signs: bool) -> None:
    """Write non-zero `values`: `counts[i]` of them have their classes in section i; the low bits of all come last."""
    width = 8 * values.itemsize
    classes, low = _split(fixed(values), width, signs)
    start = 0
    for count in counts:
        _write_classes(writer, fixed(classes[start : start + count]), _full(width))
        start += count
    writer.raw(low.data)


def read_values(reader: Reader, unit: Any, counts: list[int], *, signs: bool) -> Bits:
    """The inverse; the caller has bounded `counts`. Raises: InputError where it is malformed."""
    width = 8 * np.dtype(unit).itemsize
    parts = [_read_classes(reader, count, _full(width)) for count in counts]
    classes = np.concatenate(parts) if parts else np.empty(0, np.uint8)
    if classes.size and int(classes.max()) >= width:
        raise InputError(f"{reader.where}: a size class is over {width - 1}")
    low_bits = int(classes.sum(dtype=np.int64)) + (classes.size if signs else 0)
    low = np.frombuffer(reader.raw((low_bits + 7) // 8), np.uint8)
    values: Bits = np.empty(classes.size, unit)
    _join(fixed(classes), fixed(low), signs, values)
    return values


def _full(width: int) -> int:
    """Bits that hold the class of any number of `width` bits: 4 up to 16, else 8."""
    return 4 if width <= 16 else 8


def _write_classes(writer: Writer, classes: Bytes, full: int) -> None:
    """Write classes in the number of bits that takes the least room."""
    if not classes.size:
        return
    zeros = 1 - np.count_nonzero(classes) / classes.size
    widths = (1,) if zeros >= MOSTLY else NARROW if zeros >= HALF else (2, full)
    made = [_packed(classes, bits, full) for bits in widths]
    writer.raw(min(made, key=lambda one: one.size).bytes())


def _packed(classes: Bytes, bits: int, full: int) -> Writer:
    writer = Writer()
    writer.raw(bytes([bits]))
    most = (1 << bits) - 1
    writer.section(_pack(classes, bits, most))
    if bits < full:
        writer.section(_pack(fixed(classes[classes >= most] - np.uint8(most)), full, (1 << full) - 1))
    return writer


def _read_classes(reader: Reader, count: int, full: int) -> Bytes:
    if not count:
        return np.empty(0, np.uint8)
    bits = reader.raw(1)[0]
    if bits not in (*NARROW, full):
        raise InputError(f"{reader.where}: no classes of {bits} bits")
    classes = _unpack(fixed(reader.section((count * bits + 7) // 8)), count, bits)
    if bits < full:
        capped = np.flatnonzero(classes == (1 << bits) - 1)
        classes[capped] += _unpack(fixed(reader.section((capped.size * full + 7) // 8)), capped.size, full)
    return classes


@compiled
def _split(values: Any, width: int, signs: bool) -> tuple[Bytes, Bytes]:
    size = values.size
    classes = np.empty(size, np.uint8)
    low = np.empty(size * (width + 1) // 8 + 16, np.uint8)
    full = np.uint64(1) << np.uint64(width)
    half = full >> np.uint64(1)
    bits, held, out = np.uint64(0), np.uint64(0), 0
    for i in range(size):
        value = np.uint64(values[i])
        negative = np.uint64(0)
        if signs and value >= half:
            value = full - value
            negative = np.uint64(1)
        kind = np.uint64(0)
        while value >> (kind + np.uint64(1)):
            kind += np.uint64(1)
        classes[i] = kind
        value ^= np.uint64(1) << kind
        if signs:
            value = (value << np.uint64(1)) | negative
            kind += np.uint64(1)
        bits |= value << held
        held += kind
        while held >= np.uint64(8):
            low[out] = bits & np.uint64(255)
            out += 1
            bits >>= np.uint64(8)
            held -= np.uint64(8)
    if held > np.uint64(0):
        low[out] = bits
        out += 1
    return classes, low[:out]


@compiled
def _join(classes: Any, low: Any, signs: bool, values: Any) -> None:
    bits, held, taken = np.uint64(0), np.uint64(0), 0
    for i in range(classes.size):
        kind = np.uint64(classes[i])
        need = kind + np.uint64(1) if signs else kind
        while held < need:
            bits |= np.uint64(low[taken]) << held
            taken += 1
            held += np.uint64(8)
        value = bits & ((np.uint64(1) << need) - np.uint64(1))
        bits >>= need
        held -= need
        if signs:
            magnitude = (value >> np.uint64(1)) | (np.uint64(1) << kind)
            values[i] = np.uint64(0) - magnitude if value & np.uint64(1) else magnitude
        else:
            values[i] = value | (np.uint64(1) << kind)


@compiled
def _pack(classes: Any, bits: int, most: int) -> Bytes:
    packed = np.zeros((classes.size * bits + 7) // 8, np.uint8)
    shift = 3 if bits == 1 else 2 if bits == 2 else 1 if bits == 4 else 0
    inside = (1 << shift) - 1
    for i in range(classes.size):
        packed[i >> shift] |= min(classes[i], most) << (bits * (i & inside))
    return packed


@compiled
def _unpack(packed: Any, count: int, bits: int) -> Bytes:
    classes = np.empty(count, np.uint8)
    shift = 3 if bits == 1 else 2 if bits == 2 else 1 if bits == 4 else 0
    inside = (1 << shift) - 1
    mask = (1 << bits) - 1
    for i in range(count):
        classes[i] = (packed[i >> shift] >> (bits * (i & inside))) & mask
    return classes

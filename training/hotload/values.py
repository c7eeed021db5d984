"""Code what happens to changed elements: a size class a value in one stream, its sign and low bits raw in another.

A non-zero number of `b` bits is its size class b - 1 and its b - 1 bits below the highest one. Differences are signed modulo
2^width: the size is that of the magnitude, and the sign (1 where negative) lies below the other low bits. Weights that just
cross a rounding boundary move by one step, class 0, so the class stream nearly vanishes under Huffman coding, the more with
two classes in a byte; small weights move by many steps, and their low bits are noise that is stored as it is. The split is
that of Elias gamma codes (Elias, "Universal codeword sets and representations of the integers", IEEE Trans. Inf. Theory 21,
1975).
"""

from typing import Any

import numpy as np

from groundhop.errors import InputError
from groundhop.training.hotload.bits import Bits
from groundhop.training.hotload.kernels import compiled, fixed
from groundhop.training.hotload.streams import Bytes, Reader, Writer

PAIRED_WIDTH = 16
"""Up to this width a class fits half a byte, and two share one, the first in the lower half."""


def write_values(writer: Writer, values: Bits, counts: list[int], *, signs: bool) -> None:
    """Write non-zero `values`: `counts[i]` of them have their classes in section i; the low bits of all come last."""
    width = 8 * values.itemsize
    classes, low = _split(fixed(values), width, signs)
    start = 0
    for count in counts:
        part = classes[start : start + count]
        writer.section(_pair(fixed(part)) if width <= PAIRED_WIDTH else part)
        start += count
    writer.raw(low.data)


def read_values(reader: Reader, unit: Any, counts: list[int], *, signs: bool) -> Bits:
    """The inverse; the caller has bounded `counts`. Raises: InputError where it is malformed."""
    width = 8 * np.dtype(unit).itemsize
    parts = []
    for count in counts:
        if width <= PAIRED_WIDTH:
            parts.append(_unpair(fixed(reader.section((count + 1) // 2)), count))
        else:
            parts.append(reader.section(count))
    classes = np.concatenate(parts) if parts else np.empty(0, np.uint8)
    if classes.size and int(classes.max()) >= width:
        raise InputError(f"{reader.where}: a size class is over {width - 1}")
    low_bits = int(classes.sum(dtype=np.int64)) + (classes.size if signs else 0)
    low = np.frombuffer(reader.raw((low_bits + 7) // 8), np.uint8)
    values: Bits = np.empty(classes.size, unit)
    _join(fixed(classes), fixed(low), signs, values)
    return values


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
def _pair(classes: Any) -> Bytes:
    packed = np.zeros((classes.size + 1) // 2, np.uint8)
    for i in range(classes.size):
        packed[i >> 1] |= classes[i] << (4 * (i & 1))
    return packed


@compiled
def _unpair(packed: Any, count: int) -> Bytes:
    classes = np.empty(count, np.uint8)
    for i in range(count):
        classes[i] = (packed[i >> 1] >> (4 * (i & 1))) & 15
    return classes

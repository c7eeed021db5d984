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
from groundhop.training.hotload.masks import bit_length
from groundhop.training.hotload.streams import Bytes, Reader, Writer
from groundhop.training.hotload.words import Words, bits_at, flag, words_of

NARROW = (1, 2)
"""Bits a class besides those that hold any class."""
MOSTLY, HALF = 0.85, 0.5
"""From these shares of class 0 on, one bit is best, or one or two are."""


def write_values(writer: Writer, values: Bits, counts: list[int], *, signs: bool) -> None:
    """Write non-zero `values`: `counts[i]` of them have their classes in section i; the low bits of all come last."""
    width = 8 * values.itemsize
    classes, words, bits = _split(fixed(values), width, signs)
    start = 0
    for count in counts:
        _write_classes(writer, fixed(classes[start : start + count]), _full(width))
        start += count
    writer.raw(words.view(np.uint8)[: (bits + 7) // 8].data)


def read_values(reader: Reader, unit: Any, counts: list[int], *, signs: bool) -> Bits:
    """The inverse; the caller has bounded `counts`. Raises: InputError where it is malformed."""
    width = 8 * np.dtype(unit).itemsize
    classes = np.empty(sum(counts), np.uint8)
    start = 0
    for count in counts:
        _read_classes(reader, classes[start : start + count], _full(width))
        start += count
    largest, low_bits = _measure(fixed(classes), signs)
    if largest >= width:
        raise InputError(f"{reader.where}: a size class is over {width - 1}")
    words = words_of(reader.raw((low_bits + 7) // 8))
    values: Bits = np.empty(classes.size, unit)
    _join(fixed(classes), words, signs, values)
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
        writer.section(_pack(_above(classes, most), full, (1 << full) - 1))
    return writer


def _read_classes(reader: Reader, classes: Bytes, full: int) -> None:
    """Fill `classes` with what is written next."""
    if not classes.size:
        return
    bits = reader.raw(1)[0]
    if bits not in (*NARROW, full):
        raise InputError(f"{reader.where}: no classes of {bits} bits")
    capped = _unpack(fixed(reader.section((classes.size * bits + 7) // 8)), bits, classes)
    if bits < full and capped:
        _raise(classes, (1 << bits) - 1, fixed(reader.section((capped * full + 7) // 8)), full)


@compiled
def _above(classes: Any, most: int) -> Bytes:
    """How far those classes that are not below `most` are above it."""
    high = np.empty(classes.size + 1, np.uint8)
    count = 0
    for i in range(classes.size):
        high[count] = classes[i] - most
        count += flag(classes[i] >= most)
    return high[:count]


@compiled
def _raise(classes: Any, most: int, packed: Any, full: int) -> None:
    """Add what lies above it to each class that is `most`."""
    shift, mask = (1 if full == 4 else 0), (1 << full) - 1
    at, last = 0, packed.size - 1
    for i in range(classes.size):
        capped = flag(classes[i] == most)
        byte = np.int64(packed[min(at >> shift, last)])
        classes[i] += ((byte >> (full * (at & shift))) & mask) * capped
        at += capped


@compiled
def _split(values: Any, width: int, signs: bool) -> tuple[Bytes, Words, Any]:
    """The classes, and the low bits as words with how many there are."""
    classes = np.empty(values.size, np.uint8)
    words = np.empty(values.size * width // 64 + 2, np.uint64)
    top = np.uint64(width - 1)
    whole = (np.uint64(2) << top) - np.uint64(1)
    one, sign_bits = np.uint64(1), np.uint64(signs)
    bits, held, out = np.uint64(0), np.uint64(0), 0
    for i in range(values.size):
        value = np.uint64(values[i])
        negative = (value >> top) & sign_bits
        value = (value ^ (np.uint64(0) - negative)) + negative & whole
        kind = np.uint64(bit_length(value | one) - 1)
        classes[i] = kind
        value = ((value ^ (one << kind)) << sign_bits) | negative
        # A full word is written at every turn, and most often once more at the next: there is nothing to guess.
        bits |= value << held
        words[out] = bits
        spilt = (value >> one) >> (np.uint64(63) - held)
        held += kind + sign_bits
        full = held >> np.uint64(6)
        out += flag(full)
        bits = (bits & (full - one)) | (spilt & (np.uint64(0) - full))
        held &= np.uint64(63)
    words[out] = bits
    return classes, words, 64 * out + np.int64(held)


@compiled
def _join(classes: Any, words: Any, signs: bool, values: Any) -> None:
    one, sign_bits, at = np.uint64(1), np.uint64(signs), np.uint64(0)
    for i in range(classes.size):
        kind = np.uint64(classes[i])
        value = bits_at(words, at)
        at += kind + sign_bits
        negative = value & sign_bits
        magnitude = ((value >> sign_bits) & ((one << kind) - one)) | (one << kind)
        values[i] = (magnitude ^ (np.uint64(0) - negative)) + negative


@compiled
def _pack(classes: Any, bits: int, most: int) -> Bytes:
    each = 8 // bits
    packed = np.zeros((classes.size + each - 1) // each, np.uint8)
    whole = classes.size // each
    for i in range(whole):
        byte = 0
        for j in range(each):
            byte |= min(int(classes[i * each + j]), most) << (bits * j)
        packed[i] = byte
    for i in range(whole * each, classes.size):
        packed[whole] |= min(int(classes[i]), most) << (bits * (i - whole * each))
    return packed


@compiled
def _unpack(packed: Any, bits: int, classes: Any) -> int:
    """The inverse of `_pack`; returns how many are the largest number."""
    each, mask = 8 // bits, (1 << bits) - 1
    capped = 0
    for i in range(classes.size // each):
        byte = np.int64(packed[i])
        for j in range(each):
            one = (byte >> (bits * j)) & mask
            classes[i * each + j] = one
            capped += flag(one == mask)
    for i in range(classes.size // each * each, classes.size):
        one = (np.int64(packed[i // each]) >> (bits * (i % each))) & mask
        classes[i] = one
        capped += flag(one == mask)
    return capped


@compiled
def _measure(classes: Any, signs: bool) -> tuple[int, int]:
    """The largest class, and the low bits of all of them together."""
    largest, bits = 0, classes.size * flag(signs)
    for i in range(classes.size):
        largest = max(largest, int(classes[i]))
        bits += int(classes[i])
    return largest, bits

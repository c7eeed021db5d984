"""A fingerprint of a tensor's bits that shards can sum and a sparse change can update.

The bits are read as little-endian bytes, cut into 32-bit words (zeros after the end), and each lane of the fingerprint is
the sum of key(lane, word index) times word, modulo 2^64. So prints of disjoint ranges add up to the print of the whole,
and old + at(positions, new) - at(positions, old) is the print after a change. It catches accidents (a wrong bit is missed
with probability below 2^-64), not attackers: files also carry SHA-256. Multilinear hashing: Carter and Wegman, "Universal
classes of hash functions", 1979; keys: the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014, figure 15).
"""

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from groundhop.errors import InputError
from groundhop.training.hotload.bits import Bits, TensorSpec
from groundhop.training.hotload.kernels import compiled, fixed, in_parallel, spans

WORD_BYTES = 4
MODULUS = 1 << 64
CHUNK_BYTES = 16 * 1024 * 1024
"""Most bytes that one thread sums at a time."""

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MIX_3 = 0xD6E8FEB86659FD93
"""Odd multipliers: the first three are SplitMix64's, the last makes the second lane's key from the first's."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Two 64-bit lanes; add and subtract as numbers modulo 2^64, lane by lane."""

    zero: ClassVar["Fingerprint"]
    first: int
    second: int

    def __add__(self, other: "Fingerprint") -> "Fingerprint":
        return Fingerprint((self.first + other.first) % MODULUS, (self.second + other.second) % MODULUS)

    def __sub__(self, other: "Fingerprint") -> "Fingerprint":
        return Fingerprint((self.first - other.first) % MODULUS, (self.second - other.second) % MODULUS)

    def hex(self) -> str:
        """32 hexadecimal digits, the first lane first."""
        return f"{self.first:016x}{self.second:016x}"

    def to_bytes(self) -> bytes:
        """16 bytes, both lanes little-endian."""
        return self.first.to_bytes(8, "little") + self.second.to_bytes(8, "little")

    @classmethod
    def from_hex(cls, text: str) -> "Fingerprint":
        """The inverse of `hex`. Raises: InputError for anything else."""
        if len(text) != 32 or set(text) - set("0123456789abcdef"):
            raise InputError(f"need a fingerprint of 32 hexadecimal digits, got {text[:40]!r}")
        return cls(int(text[:16], 16), int(text[16:], 16))

    @classmethod
    def from_bytes(cls, raw: bytes) -> "Fingerprint":
        """The inverse of `to_bytes`. Raises: InputError for another length."""
        if len(raw) != 16:
            raise InputError(f"need a fingerprint of 16 bytes, got {len(raw)}")
        return cls(int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little"))


Fingerprint.zero = Fingerprint(0, 0)


def fingerprint(bits: Bits, start: int = 0, *, threads: int | None = None) -> Fingerprint:
    """The print of a flat array that begins at element `start` of its tensor."""
    _check(bits)
    each = CHUNK_BYTES // bits.itemsize
    parts = in_parallel(lambda span: _part(bits[span[0] : span[1]], start + span[0]), spans(bits.size, each), threads)
    return sum(parts, Fingerprint.zero)


def fingerprint_at(positions: NDArray[Any], bits: Bits, start: int = 0) -> Fingerprint:
    """The print of scattered elements: `bits[i]` lies at element `start + positions[i]` of its tensor."""
    _check(bits)
    if positions.shape != bits.shape:
        raise InputError(f"need a position for each element, got {positions.shape} and {bits.shape}")
    first, second = _sum_at(fixed(np.ascontiguousarray(positions)), fixed(bits), np.uint64(start))
    return Fingerprint(int(first), int(second))


def fingerprint_change(positions: NDArray[Any], before: Bits, after: Bits, start: int = 0) -> Fingerprint:
    """What a print gains where elements, as in `fingerprint_at`, become `after` and are `before`."""
    for bits in (before, after):
        _check(bits)
        if positions.shape != bits.shape:
            raise InputError(f"need a position for each element, got {positions.shape} and {bits.shape}")
    first, second = _sum_change(fixed(np.ascontiguousarray(positions)), fixed(before), fixed(after), np.uint64(start))
    return Fingerprint(int(first), int(second))


def state_digest(specs: Mapping[str, TensorSpec], prints: Mapping[str, Fingerprint]) -> str:
    """SHA-256 (hex) of a state: the JSON list of [name, type, shape, print] by name, without spaces.

    Raises: InputError unless both name the same tensors.
    """
    if specs.keys() != prints.keys():
        odd = sorted(specs.keys() ^ prints.keys())[:3]
        raise InputError(f"need a fingerprint for each tensor and no other, got a difference in {odd}")
    rows = [[name, specs[name].dtype, specs[name].shape, prints[name].hex()] for name in sorted(specs)]
    return hashlib.sha256(msgspec.json.encode(rows)).hexdigest()


def _check(bits: Bits) -> None:
    if bits.ndim != 1 or bits.dtype not in (np.uint8, np.uint16, np.uint32):
        raise InputError(f"need flat bits of 8, 16 or 32, got {bits.dtype}{bits.shape}")
    if sys.byteorder != "little":
        raise InputError("need a little-endian machine")


def _part(bits: Bits, start: int) -> Fingerprint:
    """Whole words by the fast loop; what sticks out at both ends element by element."""
    bits = np.ascontiguousarray(bits)
    each = WORD_BYTES // bits.itemsize
    head = min(-start % each, bits.size)
    tail = head + (bits.size - head) // each * each
    first, second = _sum_words(fixed(bits[head:tail].view(np.uint32)), np.uint64((start + head) // each))
    total = Fingerprint(int(first), int(second))
    for low, high in ((0, head), (tail, bits.size)):
        if low < high:
            total += fingerprint_at(np.arange(low, high, dtype=np.int64), bits[low:high], start)
    return total


@compiled
def _key(word_index: Any) -> Any:
    # The finaliser maps 0 to 0, so the count begins at 1.
    key = (word_index + np.uint64(1)) * np.uint64(GOLDEN)
    key = (key ^ (key >> np.uint64(30))) * np.uint64(MIX_1)
    key = (key ^ (key >> np.uint64(27))) * np.uint64(MIX_2)
    return key ^ (key >> np.uint64(31))


@compiled
def _other(key: Any) -> Any:
    key *= np.uint64(MIX_3)
    return key ^ (key >> np.uint64(32))


@compiled
def _sum_words(words: Any, start: Any) -> tuple[Any, Any]:
    first, second = np.uint64(0), np.uint64(0)
    for i in range(words.size):
        key = _key(start + np.uint64(i))
        word = np.uint64(words[i])
        first += key * word
        second += _other(key) * word
    return first, second


@compiled
def _sum_at(positions: Any, bits: Any, start: Any) -> tuple[Any, Any]:
    first, second = np.uint64(0), np.uint64(0)
    size = np.uint64(bits.itemsize)
    for i in range(positions.size):
        at = (start + np.uint64(positions[i])) * size
        key = _key(at >> np.uint64(2))
        word = np.uint64(bits[i]) << (np.uint64(8) * (at & np.uint64(3)))
        first += key * word
        second += _other(key) * word
    return first, second


@compiled
def _sum_change(positions: Any, before: Any, after: Any, start: Any) -> tuple[Any, Any]:
    # Sums of products: the difference of two words may be taken first.
    first, second = np.uint64(0), np.uint64(0)
    size = np.uint64(before.itemsize)
    for i in range(positions.size):
        at = (start + np.uint64(positions[i])) * size
        key = _key(at >> np.uint64(2))
        word = (np.uint64(after[i]) - np.uint64(before[i])) << (np.uint64(8) * (at & np.uint64(3)))
        first += key * word
        second += _other(key) * word
    return first, second

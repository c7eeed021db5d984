"""Take scattered elements out of bits and put them back: compiled loops, several times as fast as numpy's indexing."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from groundhop.training.hotload.bits import Bits
from groundhop.training.hotload.kernels import compiled, fixed
from groundhop.training.hotload.masks import fetch

PLAIN = (np.ndarray, np.memmap)
"""Other kinds of array have their own ways to be read and written."""
FETCHED = 64
"""How many elements before it is written one is asked for: else the processor waits for most of them."""


def take(bits: Bits, places: NDArray[Any]) -> Bits:
    """Elements by their places. Raises: IndexError where one is out of range."""
    if type(bits) not in PLAIN or not (bits.flags.c_contiguous and bits.flags.aligned):
        picked: Bits = bits[places]
        return picked
    _check(bits, places)
    return _take(fixed(np.asarray(bits)), fixed(places))


def put(bits: Bits, places: NDArray[Any], values: Bits) -> None:
    """Write `values` to their places. Raises: IndexError where one is out of range, ValueError for bits that are read-only."""
    if type(bits) not in PLAIN or not bits.flags.carray or values.dtype != bits.dtype or values.shape != places.shape:
        bits[places] = values
        return
    _check(bits, places)
    _put(np.asarray(bits), fixed(places), fixed(values))


def _check(bits: Bits, places: NDArray[Any]) -> None:
    # The loops do not look: a place out of range would be somebody else's memory.
    if places.size and (int(places.max()) >= bits.size or (places.dtype.kind != "u" and int(places.min()) < 0)):
        raise IndexError(f"need places below {bits.size}, got {int(places.min())} to {int(places.max())}")


@compiled
def _take(bits: Any, places: Any) -> Bits:
    picked = np.empty(places.size, bits.dtype)
    for i in range(places.size):
        picked[i] = bits[places[i]]
    return picked


@compiled
def _put(bits: Any, places: Any, values: Any) -> None:
    near = max(0, places.size - FETCHED)
    for i in range(near):
        fetch(bits, np.int64(places[i + FETCHED]))
        bits[places[i]] = values[i]
    for i in range(near, places.size):
        bits[places[i]] = values[i]

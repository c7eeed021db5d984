"""Rows of bits: every loop against Python's own integers."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from groundhop.training.hotload.elements import put, take
from groundhop.training.hotload.kernels import compiled
from groundhop.training.hotload.words import bits_at, deposit, deposit_by_select, list_ones, set_ones, words_of

FULL = (1 << 64) - 1


def pairs() -> list[tuple[int, int]]:
    random = np.random.default_rng(0)
    some = [int(word) for word in random.integers(0, FULL, 40, np.uint64, endpoint=True)]
    sparse = [one & other for one, other in pairwise(some)]
    return [(ones, word) for ones in (0, 1, FULL, *some) for word in (0, 1, 1 << 63, FULL, *sparse)]


def deposited(ones: int, word: int) -> int:
    places = [place for place in range(64) if word >> place & 1]
    return sum((ones >> rank & 1) << place for rank, place in enumerate(places))


@compiled
def _deposit(ones: Any, word: Any) -> Any:
    return deposit(ones, word)


@pytest.mark.parametrize("way", [_deposit, deposit_by_select])
def test_bits_are_deposited_where_the_word_has_ones(way: Any) -> None:
    got = [int(way(np.uint64(ones), np.uint64(word))) for ones, word in pairs()]
    assert got == [deposited(ones, word) for ones, word in pairs()]


def test_set_ones_are_listed_again() -> None:
    places = np.flatnonzero(np.random.default_rng(1).random(5000) < 0.03).astype(np.uint32)
    row = np.zeros(5000 // 64 + 1, np.uint64)
    set_ones(row, places)
    starts = 64 * np.flatnonzero(row)
    kept = np.append(row[row != 0], np.zeros(2, np.uint64))
    found = np.empty(places.size, np.uint32)
    list_ones(kept, np.append(starts, [0, 0]), places.size, found, 0)
    assert found.tolist() == places.tolist()


def test_64_bits_are_read_from_any_place() -> None:
    raw = np.random.default_rng(2).bytes(21)
    whole = int.from_bytes(raw, "little")
    got = [int(bits_at(words_of(raw), np.uint64(at))) for at in range(8 * len(raw))]
    assert got == [whole >> at & FULL for at in range(8 * len(raw))]


@pytest.mark.parametrize("places", [np.array([1, 9], np.uint32), np.array([-1, 1])])
def test_a_place_out_of_range_is_neither_read_nor_written(places: Any) -> None:
    bits = np.zeros(9, np.uint16)
    with pytest.raises(IndexError):
        take(bits, places)
    with pytest.raises(IndexError):
        put(bits, places, np.ones(2, np.uint16))
    assert not bits.any()

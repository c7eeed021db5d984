"""Rows of bits in 64-bit words, the lowest first: read, set and list them.

Few elements change, at random places, so a loop that asks "any here? another one?" is guessed wrong at every other turn, and
that costs the processor more than all the rest. The loops here turn once a word or once a bit and do the same each time.
"""

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import config, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from groundhop.training.hotload.kernels import compiled
from groundhop.training.hotload.masks import count_ones, first_one

Words = NDArray[np.uint64]


def _select_table() -> NDArray[np.uint8]:
    """For each rank and byte, the place of the set bit of that rank; 0 where there is none."""
    table = np.zeros((8, 256), np.uint8)
    for byte in range(256):
        places = [place_in for place_in in range(8) if byte >> place_in & 1]
        table[: len(places), byte] = places
    return table


_IN_BYTE = _select_table()


@compiled
def _select(word: Any, rank: Any) -> Any:
    """The place of the set bit of `word` that has `rank` set bits below it.

    Sums of bits by byte, then the byte, then the bits in it: Vigna, "Broadword implementation of rank/select queries",
    WEA 2008, algorithm 2.
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
def deposit_by_select(ones: Any, word: Any) -> Any:
    """What `deposit` does, one bit after the other, for processors without an instruction for it."""
    ones &= (np.uint64(2) << np.uint64(max(count_ones(word), 1) - 1)) - np.uint64(1) if word else np.uint64(0)
    found = np.uint64(0)
    while ones:
        found |= np.uint64(1) << np.uint64(_select(word, first_one(ones)))
        ones &= ones - np.uint64(1)
    return found


def _deposit(typing_context: Any, ones: Any, word: Any) -> Any:
    """Give the low bits of `ones`, in order, the places of the set bits of `word` (x86's PDEP)."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        whole = ir.IntType(64)
        function = builder.module.declare_intrinsic("llvm.x86.bmi.pdep.64", (), ir.FunctionType(whole, [whole, whole]))
        return builder.call(function, arguments)

    return types.uint64(types.uint64, types.uint64), build


def _can_deposit() -> bool:
    """Whether code is made for this very processor, and it has PDEP; AMD's first two Zens take longer for it than a loop."""
    if config.CPU_NAME or config.CPU_FEATURES:  # pyright: ignore[reportAttributeAccessIssue]
        return False
    return bool(binding.get_host_cpu_features().get("bmi2")) and binding.get_host_cpu_name() not in ("znver1", "znver2")


# Inside compiled loops it is called without the first argument, which type checkers cannot know.
deposit: Any = intrinsic(_deposit) if _can_deposit() else deposit_by_select


def words_of(raw: bytes | bytearray | memoryview) -> Words:
    """Raw bits as words, with zeros after them and at least one word more, so that 64 bits may be read from any of them on."""
    words = np.zeros(len(raw) // 8 + 2, np.uint64)
    words.view(np.uint8)[: len(raw)] = np.frombuffer(raw, np.uint8)
    return words


@compiled
def flag(claim: Any) -> Any:
    """1 where it is true, else 0: a number to add, where an `if` would be guessed wrong."""
    return np.int64(claim)


@compiled
def bits_at(words: Any, cursor: Any) -> Any:
    """64 bits of a row of words, from its `cursor`-th bit on; the word after that bit's must be there."""
    at, shift = cursor >> np.uint64(6), cursor & np.uint64(63)
    return (words[at] >> shift) | ((words[at + np.uint64(1)] << np.uint64(1)) << (np.uint64(63) - shift))


@compiled
def set_ones(words: Any, places: Any) -> None:
    """Set the bits at `places` of a row of words."""
    for i in range(places.size):
        place_in = np.uint64(places[i])
        words[place_in >> np.uint64(6)] |= np.uint64(1) << (place_in & np.uint64(63))


@compiled
def list_ones(words: Any, starts: Any, count: int, positions: Any, found: int) -> int:
    """Write the places of the `count` ones in `words`, none of which is 0, to `positions` from `found` on.

    `starts[i]` is the place of the lowest bit of `words[i]`; two more words than are used must be there. Returns where it
    ended.
    """
    at, word = 0, words[0]
    for slot in range(found, found + count):
        # The word after is read in any case, and early: waiting for it at every turn would take longer than the rest.
        following = words[at + 1]
        positions[slot] = starts[at] + first_one(word)
        word &= word - np.uint64(1)
        empty = np.uint64(word == np.uint64(0))
        word |= following & (np.uint64(0) - empty)
        at += flag(empty)
    return found + count

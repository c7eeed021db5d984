import numpy as np
import pytest
from codec_builders import noise, scrambled, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from groundhop.errors import InputError
from groundhop.training.hotload.fingerprint import Fingerprint, fingerprint, fingerprint_at, state_digest

UNITS = (np.uint8, np.uint16, np.uint32)


def by_hand(raw: bytes, start: int) -> Fingerprint:
    """The definition in docs/hotload.md, in plain integers."""
    first = second = 0
    for place, byte in enumerate(raw, start):
        key = (place // 4 + 1) * 0x9E3779B97F4A7C15 % 2**64
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        key = (key ^ key >> 27) * 0x94D049BB133111EB % 2**64
        key ^= key >> 31
        other = key * 0xD6E8FEB86659FD93 % 2**64
        other ^= other >> 32
        word = byte << 8 * (place % 4)
        first, second = (first + key * word) % 2**64, (second + other * word) % 2**64
    return Fingerprint(first, second)


@given(unit=st.sampled_from(UNITS), size=st.integers(0, 70), start=st.sampled_from([0, 1, 2, 3, 4, 2**33 + 1]))
@settings(max_examples=60, deadline=None)
def test_a_fingerprint_is_as_defined(unit: type, size: int, start: int) -> None:
    bits = noise(unit, size)
    assert fingerprint(bits, start) == by_hand(bits.tobytes(), start * bits.itemsize)


@given(unit=st.sampled_from(UNITS), cut=st.integers(0, 333), start=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_prints_of_ranges_add_up(unit: type, cut: int, start: int) -> None:
    bits = noise(unit, 333)
    assert fingerprint(bits[:cut], start) + fingerprint(bits[cut:], start + cut) == fingerprint(bits, start)


@pytest.mark.parametrize("unit", UNITS)
def test_a_print_follows_sparse_changes(unit: type) -> None:
    old = noise(unit, 999)
    new = scrambled(old, 0.1)
    at = np.flatnonzero(old != new)
    moved = fingerprint(old, 5) + fingerprint_at(at, new[at], 5) - fingerprint_at(at, old[at], 5)
    assert moved == fingerprint(new, 5)


def test_every_single_bit_counts_in_both_lanes() -> None:
    zero = fingerprint(np.zeros(8, np.uint16))
    for place in range(8):
        for bit in range(16):
            bits = np.zeros(8, np.uint16)
            bits[place] = 1 << bit
            got = fingerprint(bits)
            assert got.first != zero.first and got.second != zero.second


def test_elements_that_trade_places_are_noticed() -> None:
    bits = noise(np.uint16, 100)
    swapped = bits.copy()
    swapped[[3, 60]] = bits[[60, 3]]
    assert fingerprint(bits) != fingerprint(swapped)


def test_strided_and_read_only_bits_have_the_print_of_what_they_hold() -> None:
    bits = noise(np.uint16, 200)
    bits.flags.writeable = False
    assert fingerprint(bits[::2]) == fingerprint(bits[::2].copy())


def test_a_print_survives_text_and_bytes() -> None:
    got = fingerprint(noise(np.uint16, 50))
    assert (Fingerprint.from_hex(got.hex()), Fingerprint.from_bytes(got.to_bytes())) == (got, got)
    with pytest.raises(InputError):
        Fingerprint.from_hex("0X" + "0" * 30)


def test_a_state_digest_depends_on_names_types_shapes_and_prints_alone() -> None:
    bits = noise(np.uint16, 6)
    specs = {name: spec(name, bits) for name in "ba"}
    prints = {"a": Fingerprint(1, 2), "b": Fingerprint(3, 4)}
    again = state_digest(dict(reversed(specs.items())), dict(reversed(prints.items())))
    assert state_digest(specs, prints) == again
    assert state_digest({**specs, "b": spec("b", bits, "F16")}, prints) != again
    with pytest.raises(InputError):
        state_digest(specs, {"a": prints["a"]})

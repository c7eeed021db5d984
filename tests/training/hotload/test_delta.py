from pathlib import Path
from typing import Any

import numpy as np
import pytest
from codec_builders import ENCODINGS, Held, adam_like, dumped, noise, scrambled, spec, step, uniform
from hypothesis import given, settings
from hypothesis import strategies as st

from groundhop.errors import ChecksumError, InputError
from groundhop.training.hotload.bits import TensorSpec
from groundhop.training.hotload.codec import CHUNK_ELEMENTS, encode_change
from groundhop.training.hotload.delta import (
    Change,
    Encoding,
    TensorDelta,
    apply_delta,
    dump_delta,
    encode_moved,
    encode_tensor,
    prints_of,
    read_delta,
    write_delta,
)
from groundhop.training.hotload.fingerprint import Fingerprint, fingerprint, state_digest

UNITS = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32, "F8_E4M3": np.uint8}


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_16_bit_pattern_becomes_any_other(dtype: str, encoding: Encoding) -> None:
    old = np.arange(65536, dtype=np.uint16)
    new = np.random.default_rng(0).permutation(old)
    weights = Held({"w": old.copy()}, {"w": dtype})
    apply_delta(step(old, new, encoding, dtype), weights)
    assert weights.bits("w").tobytes() == new.tobytes()


@given(
    dtype=st.sampled_from(sorted(UNITS)),
    encoding=st.sampled_from(ENCODINGS),
    size=st.sampled_from([0, 1, 2, 15, 255, 256, 2000]),
    share=st.sampled_from([0.0, 0.002, 0.2, 0.6, 0.95, 1.0]),
    seed=st.integers(0, 5),
)
@settings(max_examples=60, deadline=None)
def test_what_was_coded_is_what_comes_out(dtype: str, encoding: Encoding, size: int, share: float, seed: int) -> None:
    old = noise(UNITS[dtype], size, seed)
    new = scrambled(old, share, seed)
    weights = Held({"w": old.copy()}, {"w": dtype})
    delta = step(old, new, encoding, dtype)
    apply_delta(delta, weights)
    assert weights.bits("w").tobytes() == new.tobytes()
    assert sum(entry.changed for entry in delta.entries) == int((old != new).sum())


def test_signs_of_zero_and_nan_payloads_are_changes_like_any_other() -> None:
    old = np.array([0x0000, 0x8000, 0x7FC0, 0x7FC1, 0x0001, 0x7F80, 0x3F80, 0x3F80], np.uint16)
    new = np.array([0x8000, 0x0000, 0x7FC1, 0xFFC1, 0x8001, 0xFF80, 0x3F80, 0x3F80], np.uint16)
    coded = encode_tensor(spec("w", old), old, new)
    assert coded is not None and coded.positions is not None
    assert (coded.changed, coded.positions.tolist()) == (6, [0, 1, 2, 3, 4, 5])


def test_a_tensor_that_did_not_change_is_not_sent() -> None:
    nans = np.full(100, 0x7FC0, np.uint16)
    assert encode_tensor(spec("w", nans), nans, nans.copy()) is None


def test_a_tensor_without_an_old_state_is_sent_whole() -> None:
    new = noise(np.uint16, 300)
    coded = encode_tensor(spec("w", new), None, new)
    assert coded is not None
    weights = Held({"w": noise(np.uint16, 300, seed=9)})
    apply_delta(read_delta(dump_delta([coded], version=1, base_digest="", digest="")), weights)
    assert (weights.bits("w").tobytes(), coded.base_fingerprint) == (new.tobytes(), None)


def test_a_retry_reaches_what_an_attempt_before_it_may_have_written() -> None:
    old = noise(np.uint16, 500)
    new = scrambled(old, 0.02)
    torn = old.copy()
    torn[[3, 77, 410]] ^= 0x1234
    coded = encode_tensor(spec("w", old), old, new, also=np.array([3, 77, 410]))
    assert coded is not None
    weights = Held({"w": torn})
    apply_delta(read_delta(dump_delta([coded], version=1, base_digest="", digest="")), weights)
    assert weights.bits("w").tobytes() == new.tobytes()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("share", [0.05, 0.9])
@pytest.mark.parametrize("also", [None, np.array([3, 77, 2999])])
def test_changes_that_the_caller_found_give_the_same_bytes(
    encoding: Encoding, share: float, also: np.ndarray[Any, Any] | None
) -> None:
    old = noise(np.uint16, 3000)
    new = scrambled(old, share)
    wanted = encode_tensor(spec("w", old), old, new, encoding=encoding, also=also)
    assert wanted is not None
    sent = np.flatnonzero(old != new) if also is None else np.union1d(np.flatnonzero(old != new), also)
    prints = fingerprint(old), fingerprint(new)
    got = encode_moved(
        spec("w", old), old, sent, new[sent], encoding=encoding, overwrite=also is not None, prints=prints
    )
    found, expected = (dump_delta([one], version=7, base_digest="", digest="") for one in (got, wanted))
    assert found == expected


def test_chunks_of_a_long_tensor_meet_without_a_seam() -> None:
    old = np.zeros(2 * CHUNK_ELEMENTS + 3, np.uint16)
    new = old.copy()
    new[[0, CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS, 2 * CHUNK_ELEMENTS - 1, 2 * CHUNK_ELEMENTS + 2]] = [1, 2, 3, 4, 5]
    weights = Held({"w": old.copy()})
    apply_delta(step(old, new), weights)
    assert weights.bits("w").tobytes() == new.tobytes()


def test_positions_beyond_32_bits_come_back_as_they_were() -> None:
    huge = TensorSpec(name="w", dtype="BF16", shape=(1 << 20, 1 << 14))
    start = (1 << 33) + 5
    chunk = encode_change(Change(start, np.array([0, 9], np.uint32), "xor", np.array([1, 2], np.uint16)), 1000)
    assert chunk is not None
    sent = TensorDelta(huge, Fingerprint(1, 2), Fingerprint(3, 4), (chunk,))
    delta = read_delta(dump_delta([sent], version=1, base_digest="", digest=""))
    (change,) = delta.changes(delta.entries[0])
    assert change.absolute().tolist() == [start, start + 9]


def test_a_delta_applied_twice_changes_nothing_the_second_time() -> None:
    old = noise(np.uint16, 400)
    new = scrambled(old, 0.1)
    weights = Held({"w": old.copy()})
    for _ in range(2):
        apply_delta(step(old, new, "xor"), weights)
    assert weights.bits("w").tobytes() == new.tobytes()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_another_base_is_refused_before_anything_is_touched(encoding: Encoding) -> None:
    old = noise(np.uint16, 400)
    other = old.copy()
    other[200] ^= 1
    weights = Held({"a": other.copy()})
    weights.held["w"] = weights.held.pop("a")
    weights.specs = {"w": spec("w", old)}
    with pytest.raises(ChecksumError):
        apply_delta(step(old, scrambled(old, 0.1), encoding), weights)
    assert weights.bits("w").tobytes() == other.tobytes()


def test_old_bits_that_context_encoding_was_not_made_against_are_noticed() -> None:
    old, new = adam_like(20000, 1e-6)
    delta = step(old, new, "context")
    with pytest.raises(ChecksumError, match="old bits"):
        list(delta.changes(delta.entries[0], lambda start, stop: np.zeros(stop - start, np.uint16)))


def test_kept_fingerprints_are_moved_along_and_prove_the_whole_state() -> None:
    before = Held({"a": noise(np.uint16, 50), "b": noise(np.uint32, 70)})
    after = Held({"a": before.bits("a").copy(), "b": scrambled(before.bits("b"), 0.3)})
    digests = [state_digest(w.specs, prints_of(w)) for w in (before, after)]
    coded = encode_tensor(before.specs["b"], before.bits("b"), after.bits("b"))
    assert coded is not None
    delta = read_delta(dump_delta([coded], version=2, base_digest=digests[0], digest=digests[1]))
    prints = prints_of(before)
    apply_delta(delta, before, prints)
    assert prints == prints_of(after)
    stray = Held({"a": noise(np.uint16, 50, seed=8), "b": after.bits("b").copy()})
    with pytest.raises(ChecksumError, match="another base"):
        apply_delta(delta, stray, prints_of(stray))


def test_tensors_that_are_missing_or_of_another_shape_are_refused() -> None:
    old = noise(np.uint16, 40)
    delta = step(old, scrambled(old, 0.5))
    for weights in (Held({"v": old.copy()}), Held({"w": old[:39].copy()}), Held({"w": old.copy()}, {"w": "F16"})):
        with pytest.raises(InputError):
            apply_delta(delta, weights)


class FailsOnce(np.ndarray):
    """Bits whose first write fails half-way."""

    failed: list[int] = []  # noqa: RUF012

    def __setitem__(self, key: object, value: object) -> None:
        if self.failed:
            super().__setitem__(key, value)  # type: ignore[call-overload]
            return
        self.failed.append(1)
        self.view(np.ndarray)[:5] = 0
        raise OSError("no more")


@pytest.mark.parametrize("kind", ["cannot be written", "no more"])
def test_a_write_that_fails_leaves_the_weights_as_they_were(kind: str) -> None:
    before = Held({"a": noise(np.uint16, 50), "b": noise(np.uint16, 50, seed=20)})
    kept = {name: bits.tobytes() for name, bits in before.held.items()}
    coded = [encode_tensor(before.specs[n], before.bits(n), scrambled(before.bits(n), 1.0)) for n in "ab"]
    if kind == "no more":
        before.held["b"] = before.bits("b").view(FailsOnce)
    else:
        before.bits("b").flags.writeable = False
    with pytest.raises((OSError, InputError), match=kind):
        apply_delta(read_delta(dump_delta([c for c in coded if c], version=1, base_digest="", digest="")), before)
    assert {name: bits.tobytes() for name, bits in before.held.items()} == kept


def test_a_written_file_says_what_it_holds(tmp_path: Path) -> None:
    old = noise(np.uint16, 4000)
    coded = encode_tensor(spec("w", old), old, scrambled(old, 0.01), encoding="xor")
    assert coded is not None
    summary = write_delta(tmp_path / "d", [coded], version=1, base_digest="x", digest="y")
    read = read_delta(tmp_path / "d")
    assert (summary.bytes, summary.changed, summary.total) == ((tmp_path / "d").stat().st_size, coded.changed, 4000)
    assert (read.version, read.base_digest, read.digest, read.operations) == (1, "x", "y", {"xor"})


@pytest.mark.parametrize(
    ("kind", "amount", "encoding", "most"),
    [
        ("adam", 1e-6, "context", 0.0112),
        ("adam", 1e-6, "add", 0.0150),
        ("adam", 3e-7, "context", 0.0046),
        ("adam", 3e-7, "add", 0.0060),
        ("uniform", 0.03, "auto", 0.0175),
    ],
)
def test_deltas_are_as_small_as_promised(kind: str, amount: float, encoding: Encoding, most: float) -> None:
    old, new = (adam_like if kind == "adam" else uniform)(1_000_000, amount)
    assert len(dumped(old, new, encoding)) <= most * old.nbytes

import hashlib
import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from codec_builders import ENCODINGS, Held, adam_like, dumped, noise, scrambled

from groundhop.errors import ChecksumError, InputError
from groundhop.training.hotload.bits import TensorSpec
from groundhop.training.hotload.codec import Chunk, Mode, encode_change
from groundhop.training.hotload.delta import Change, Encoding, TensorDelta, apply_delta, dump_delta, read_delta
from groundhop.training.hotload.delta_file import HEAD
from groundhop.training.hotload.fingerprint import Fingerprint

REFUSED = (InputError, ChecksumError)


def signed_again(content: bytes) -> bytes:
    return content[:-32] + hashlib.sha256(content[:-32]).digest()


def with_other_table(content: bytes, table: bytes) -> bytes:
    """The same file, with another table and a right SHA-256."""
    _, version, coded, _ = HEAD.unpack(content[: HEAD.size])
    frame = zstandard.compress(table)
    head = HEAD.pack(b"GHDELTA2", version, len(frame), len(table))
    return signed_again(head + frame + content[HEAD.size + coded :])


def table_of(content: bytes) -> bytes:
    _, _, coded, _ = HEAD.unpack(content[: HEAD.size])
    return zstandard.decompress(content[HEAD.size : HEAD.size + coded])


@pytest.fixture(scope="module")
def states() -> tuple[np.ndarray, np.ndarray]:
    return adam_like(3000, 3e-6)


def test_a_file_cut_off_anywhere_is_refused(states: tuple[np.ndarray, np.ndarray]) -> None:
    content = dumped(*states)
    for length in range(len(content)):
        with pytest.raises(REFUSED):
            read_delta(content[:length])


def test_a_flipped_bit_anywhere_is_refused(states: tuple[np.ndarray, np.ndarray]) -> None:
    content = dumped(*states)
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(REFUSED):
            read_delta(bytes(damaged))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_damage_behind_a_right_digest_never_touches_the_weights(
    states: tuple[np.ndarray, np.ndarray], encoding: Encoding
) -> None:
    old, new = states
    content = dumped(old, new, encoding)
    table = table_of(content)
    body = len(content) - 32 - sum(HEAD.unpack(content[: HEAD.size])[2:3]) - HEAD.size
    files = [
        with_other_table(content, table[:i] + bytes([table[i] ^ 1 << i % 8]) + table[i + 1 :])
        for i in range(len(table))
    ]
    for place in range(len(content) - 32 - body, len(content) - 32, max(1, body // 150)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        files.append(signed_again(bytes(damaged)))
    for file in files:
        weights = Held({"w": old.copy()})
        try:
            apply_delta(read_delta(file), weights)
        except REFUSED:
            assert weights.bits("w").tobytes() == old.tobytes()
        else:
            assert weights.bits("w").tobytes() == new.tobytes()


def chunk_file(mode: Mode, size: int, changed: int, body: bytes, shape: tuple[int, ...] = (1 << 22,)) -> bytes:
    spec = TensorSpec(name="w", dtype="BF16", shape=shape)
    sent = TensorDelta(spec, None, Fingerprint.zero, (Chunk(mode, 0, size, changed, body),))
    return dump_delta([sent], version=1, base_digest="", digest="")


BOMB = zstandard.ZstdCompressor().compress(bytes(1 << 26))
LIES = {
    "a chunk larger than the tensor": chunk_file("dense", 1 << 22, 1 << 22, b"\1\0\1\0", (5,)),
    "a chunk larger than any": chunk_file("dense", 1 << 31, 1 << 31, b"\1\0\1\0", (1 << 31,)),
    "more changes than elements": chunk_file("xor", 10, 1 << 31, b""),
    "a frame that states more than it may": chunk_file("dense", 10, 10, bytes([len(BOMB) & 127 | 128, len(BOMB) >> 7]) + BOMB),
    "a table that states more than it may": signed_again(
        HEAD.pack(b"GHDELTA2", 1, len(BOMB), 1 << 31) + BOMB + bytes(32)
    ),
    "a table that is a bomb": signed_again(HEAD.pack(b"GHDELTA2", 1, len(BOMB), 100) + BOMB + bytes(32)),
    "escapes without end": chunk_file("xor", 1000, 2, b"\0\xff\xff\xff\xff\x0f\1\xff"),
}  # fmt: skip


@pytest.mark.parametrize("lie", sorted(LIES))
def test_a_lying_length_is_refused_without_room_being_made_for_it(lie: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InputError):
            delta = read_delta(LIES[lie])
            list(delta.changes(delta.entries[0]))
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_bytes_behind_the_last_chunk_are_refused() -> None:
    old = noise(np.uint16, 100)
    content = dumped(old, scrambled(old, 0.2))
    with pytest.raises(InputError, match="bytes of chunks"):
        read_delta(signed_again(content[:-32] + b"x" + bytes(32)))


def test_two_chunks_that_name_one_element_are_refused() -> None:
    spec = TensorSpec(name="w", dtype="BF16", shape=(9,))
    ones = np.ones(2, np.uint16)
    chunks = [
        encode_change(Change(0, np.array([at, 5], np.uint32), op, ones), 9) for at, op in ((1, "xor"), (2, "add"))
    ]
    sent = TensorDelta(spec, None, Fingerprint.zero, tuple(chunk for chunk in chunks if chunk))
    delta = read_delta(dump_delta([sent], version=1, base_digest="", digest=""))
    with pytest.raises(InputError, match="named twice"):
        list(delta.changes(delta.entries[0]))


def test_a_file_of_another_kind_is_refused() -> None:
    with pytest.raises(InputError, match="not a delta file"):
        read_delta(struct.pack("<Q", 5) + b"{}" + bytes(100))

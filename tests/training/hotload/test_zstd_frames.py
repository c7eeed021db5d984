import random
import struct

import pytest
import zstandard

from groundhop.errors import InputError
from groundhop.training.hotload.zstd_frames import decode, decode_exact


def stated(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(content)


def streamed(content: bytes) -> bytes:
    writer = zstandard.ZstdCompressor(level=3, write_checksum=True).compressobj()
    return writer.compress(content) + writer.flush()


def skippable(content: bytes) -> bytes:
    return struct.pack("<II", 0x184D2A5C, len(content)) + content


NOISE = random.Random(7).randbytes(300_000)


@pytest.mark.parametrize("content", [b"", b"a", b"abc" * 100_000, NOISE, NOISE + bytes(500_000)])
@pytest.mark.parametrize("write", [stated, streamed])
def test_one_frame_decodes_to_what_was_written(write, content: bytes) -> None:
    assert decode_exact(write(content), len(content)) == content


def test_all_frames_are_read_whether_or_not_they_state_their_size() -> None:
    data = stated(b"one" * 500) + skippable(b"aside") + streamed(NOISE) + stated(b"") + streamed(b"two")
    assert decode(data, limit=400_000) == b"one" * 500 + NOISE + b"two"


@pytest.mark.parametrize("write", [stated, streamed])
def test_more_than_the_limit_is_refused(write) -> None:
    with pytest.raises(InputError, match="999"):
        decode(write(bytes(1000)), limit=999)


def test_frames_that_pass_the_limit_only_together_are_refused() -> None:
    with pytest.raises(InputError):
        decode(streamed(b"a" * 600) + streamed(b"b" * 600), limit=1000)


def test_a_small_frame_that_claims_a_terabyte_is_refused_before_memory_is_taken() -> None:
    frame = struct.pack("<IBBQ", 0xFD2FB528, 0xC0, 0x38, 2**40) + b"\x01\x00\x00"
    with pytest.raises(InputError, match="claims"):
        decode(frame, limit=2**41)


def test_every_cut_is_refused() -> None:
    data = stated(b"head" * 9) + streamed(NOISE[:400])
    whole = {0, len(stated(b"head" * 9)), len(data)}
    for length in set(range(len(data))) - whole:
        with pytest.raises(InputError):
            decode(data[:length], limit=1000)


@pytest.mark.parametrize("write", [stated, streamed])
def test_bytes_behind_the_last_frame_are_refused(write) -> None:
    for tail in (b"\0", b"tail", b"\x28\xb5\x2f\xfd"):
        with pytest.raises(InputError):
            decode(write(b"text" * 50) + tail, limit=1000)


def test_a_flipped_bit_never_passes_a_frame_with_a_checksum() -> None:
    content = b"some text that repeats, some text that repeats " * 4
    data = streamed(content)
    for place in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        try:
            got = decode(flipped, limit=10_000)
        except InputError:
            continue
        # A flipped bit of the header (its window and size) may leave the content as it was.
        assert got == content


def test_no_bytes_are_no_frame() -> None:
    with pytest.raises(InputError, match="no bytes"):
        decode(b"", limit=10)

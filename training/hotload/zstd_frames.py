"""Decode Zstandard data of any number of frames, with or without a stated content size, within a bound that the caller sets.

The one-shot decoders of common bindings read the first frame only and refuse frames without a content size, which is what
streaming writers produce. The frames' extents are found by walking their blocks (RFC 8878, sections 3.1.1 and 3.1.2), so
that data which was cut off, or has something behind it, is refused before anything is allocated for it.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import zstandard

from groundhop.errors import InputError

MAGIC = 0xFD2FB528
SKIPPABLE_MAGIC = 0x184D2A50
SKIPPABLE_KINDS = 16
BLOCK_BYTES = 128 * 1024
"""Most bytes that one block decodes to."""
WINDOW_BYTES = 128 * 1024 * 1024
"""Largest window we decode: that of the highest level without `--long`."""
RAW, RLE, COMPRESSED = 0, 1, 2

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Frame:
    """Where one frame lies and how much it can decode to."""

    start: int
    stop: int
    size: int | None
    """Bytes of its content as the frame states them; None where it does not."""
    most: int
    """Upper bound of its content in bytes, from its blocks."""


def decode(data: Buffer, *, limit: int, where: str = "zstd data") -> bytes:
    """Decode all frames of `data`, at most `limit` bytes; skippable frames are passed over.

    Raises: InputError where it is empty, cut off, damaged, larger than `limit`, or followed by bytes that are no frame.
    """
    view = memoryview(data).cast("B")
    decoder = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES)
    pieces: list[bytes] = []
    left = limit
    for frame in frames(view, where):
        if frame.size is not None and frame.size > left:
            raise InputError(f"{where}: need at most {limit} decoded bytes, got more")
        room = max(1, min(frame.most, left))
        try:
            piece = decoder.decompress(view[frame.start : frame.stop], max_output_size=room)
        except zstandard.ZstdError as error:
            raise InputError(f"{where}: the frame at byte {frame.start} cannot be decoded to {left} bytes") from error
        if len(piece) > left:
            raise InputError(f"{where}: need at most {limit} decoded bytes, got more")
        left -= len(piece)
        pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def decode_exact(data: Buffer, size: int, where: str = "zstd data") -> bytes:
    """Decode all frames of `data`, which must give `size` bytes. Raises: InputError as `decode`, or for another size."""
    content = decode(data, limit=size, where=where)
    if len(content) != size:
        raise InputError(f"{where}: need {size} decoded bytes, got {len(content)}")
    return content


def frames(data: memoryview, where: str = "zstd data") -> Iterator[Frame]:
    """The frames of `data` that hold content, in order. Raises: InputError unless it is whole frames from end to end."""
    if not len(data):
        raise InputError(f"{where}: need at least one frame, got no bytes")
    at = 0
    while at < len(data):
        magic = _number(data, at, "<I", where)
        if SKIPPABLE_MAGIC <= magic < SKIPPABLE_MAGIC + SKIPPABLE_KINDS:
            at = _within(at + 8 + _number(data, at + 4, "<I", where), data, where)
        elif magic == MAGIC:
            frame = _walk(data, at, where)
            yield frame
            at = frame.stop
        else:
            raise InputError(f"{where}: need a frame at byte {at} of {len(data)}, got {bytes(data[at : at + 4])!r}")


def _walk(data: memoryview, start: int, where: str) -> Frame:
    parameters = _parameters(data[start:], where)
    at = start + zstandard.frame_header_size(data[start : start + 18])
    most, last = 0, False
    while not last:
        head = _number(data, at, "<I", where, length=3)
        last, kind, size = bool(head & 1), head >> 1 & 3, head >> 3
        if kind > COMPRESSED or size > BLOCK_BYTES:
            raise InputError(f"{where}: the block at byte {at} is damaged (kind {kind}, {size} bytes)")
        most += BLOCK_BYTES if kind == COMPRESSED else size
        at = _within(at + 3 + (1 if kind == RLE else size), data, where)
    at = _within(at + (4 if parameters.has_checksum else 0), data, where)
    unknown = parameters.content_size == zstandard.CONTENTSIZE_UNKNOWN
    stated = None if unknown else parameters.content_size
    if stated is not None and stated > most:
        raise InputError(f"{where}: the frame at byte {start} claims {stated} bytes, its blocks hold at most {most}")
    return Frame(start, at, stated, most)


def _parameters(data: memoryview, where: str) -> zstandard.FrameParameters:
    try:
        parameters = zstandard.get_frame_parameters(data[:18])
    except zstandard.ZstdError as error:
        raise InputError(f"{where}: a frame's header is cut off or damaged") from error
    if parameters.window_size > WINDOW_BYTES or parameters.dict_id:
        raise InputError(
            f"{where}: need a frame without a dictionary and a window of at most {WINDOW_BYTES} bytes, "
            f"got dictionary {parameters.dict_id}, window {parameters.window_size}"
        )
    return parameters


def _number(data: memoryview, at: int, form: str, where: str, length: int = 4) -> int:
    _within(at + length, data, where)
    (number,) = struct.unpack(form, bytes(data[at : at + length]).ljust(4, b"\0"))
    return int(number)


def _within(at: int, data: memoryview, where: str) -> int:
    if at > len(data):
        raise InputError(f"{where}: cut off, needs {at - len(data)} bytes more than its {len(data)}")
    return at

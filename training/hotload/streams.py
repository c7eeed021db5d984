"""The body of a coded chunk as a row of numbers and sections, written and read within stated bounds.

A number is LEB128 (7 bits a byte, lowest first, at most 5 bytes). A section holds a byte string whose length the reader
knows already, behind a number that says how it is stored: 0 as it is, 1 as one byte that is repeated, otherwise as one
Zstandard frame (RFC 8878) of that many bytes, its content size stated. An empty section takes no room at all.
"""

import threading
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from groundhop.errors import InputError

PLAIN, REPEATED = 0, 1
SMALLEST_FRAME = 9
"""A frame has at least a magic number, a descriptor, a size and a block header; so 0 and 1 are free to mean other things."""
NUMBER_BYTES = 5

Buffer = bytes | bytearray | memoryview
Bytes = NDArray[np.uint8]

_local = threading.local()


class Writer:
    """Collects a body."""

    def __init__(self) -> None:
        self._pieces: list[Buffer] = []
        self.size = 0

    def bytes(self) -> bytes:
        """All that was written."""
        return b"".join(self._pieces)

    def number(self, value: int) -> None:
        """Write a number below 2^35."""
        out = bytearray()
        while value > 0x7F:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)
        self.raw(out)

    def raw(self, content: Buffer) -> None:
        """Write bytes as they are."""
        self._pieces.append(content)
        self.size += len(content)

    def section(self, content: Bytes) -> None:
        """Write a section in the way that takes the least room."""
        if content.size == 0:
            return
        if content[0] == content[-1] and bool((content == content[0]).all()):
            self.number(REPEATED)
            self.raw(bytes(content[:1]))
            return
        coded = _compressor().compress(content.data)
        if len(coded) < content.size:
            self.number(len(coded))
            self.raw(coded)
        else:
            self.number(PLAIN)
            self.raw(content.tobytes())


class Reader:
    """Reads a body. Every method raises InputError where it is cut off or damaged."""

    def __init__(self, body: Buffer, where: str) -> None:
        self._view, self._at, self.where = memoryview(body), 0, where

    def number(self) -> int:
        """Read a number."""
        value = 0
        for shift in range(0, 7 * NUMBER_BYTES, 7):
            byte = self.raw(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise InputError(f"{self.where}: a number is longer than {NUMBER_BYTES} bytes")

    def raw(self, size: int) -> memoryview:
        """Read `size` bytes as they are."""
        if size > len(self._view) - self._at:
            raise InputError(f"{self.where}: cut off, needs {size} bytes at {self._at} of {len(self._view)}")
        self._at += size
        return self._view[self._at - size : self._at]

    def section(self, size: int) -> Bytes:
        """Read a section that holds `size` bytes; the caller has bounded `size`."""
        if size == 0:
            return np.empty(0, np.uint8)
        form = self.number()
        if form == PLAIN:
            return np.frombuffer(self.raw(size), np.uint8)
        if form == REPEATED:
            return np.full(size, self.raw(1)[0], np.uint8)
        return np.frombuffer(_decompress(self.raw(form), size, self.where), np.uint8)

    def end(self) -> None:
        """Make sure that nothing is left."""
        if self._at != len(self._view):
            raise InputError(f"{self.where}: {len(self._view) - self._at} bytes are left over")


def _decompress(frame: memoryview, size: int, where: str) -> bytes:
    """Decode one frame. Its stated size is compared first, for the decoder allocates what the frame states."""
    try:
        stated = zstandard.frame_content_size(frame)
        if stated != size:
            raise InputError(f"{where}: need a frame of {size} bytes, got one that states {stated}")
        content: bytes = _decompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise InputError(f"{where}: a frame cannot be decoded: {error}") from error
    return content


def _compressor() -> Any:
    """One a thread: it may not be shared, and making one costs more than a small frame."""
    if not hasattr(_local, "compressor"):
        # The streams have skewed counts and no repeats: a match found by chance costs more than the codes it stands for,
        # so look for few (the smallest table, the longest least match). Any Zstandard decoder reads the result.
        few = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST,
            window_log=17,
            hash_log=6,
            chain_log=6,
            search_log=1,
            min_match=7,
            target_length=0,
            write_content_size=True,
            write_checksum=False,
        )
        _local.compressor = zstandard.ZstdCompressor(compression_params=few)
    return _local.compressor


def _decompressor() -> Any:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    return _local.decompressor

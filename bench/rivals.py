"""Formats of other systems, written by us from their published descriptions, each with its decoder, for the codec bench.

A state here is a list of flat uint16 arrays, one a tensor. Each `encode` gives all bytes that the system would send but for
checksums; each `decode` gives the new state from the old one and these bytes. Names and counts of tensors are in none of
them but ours, which is to the rivals' favour (about 30 bytes a changed tensor).

- DCR: "NeMo-DCR" and the sparse refit of NVIDIA NeMo RL (its docs, "Weight transfer"): packed locations as gaps in the
  smallest of u16, u32, u64, then packed XOR masks, in one zstd frame of level 1 a bucket of 512 MiB.
- Dense XOR: slime (docs/en/advanced/delta-weight-sync.md), SkyRL, ModelExpress, CoreWeave hot-load: a zstd-1 frame of the
  XOR of all bytes for each changed tensor.
- Index and value: SparseRL-Sync, verl's delta_sharded, vLLM's sparse_nccl: an int32 index and the new value an element.
- Raw: the whole checkpoint.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

State = Sequence[NDArray[np.uint16]]
BUCKET_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class Rival:
    """A format."""

    name: str
    encode: Callable[[State, State], list[bytes]]
    decode: Callable[[State, Sequence[bytes]], list[NDArray[np.uint16]]]


def dcr_encode(old: State, new: State) -> list[bytes]:
    """Frames of gaps, then XOR masks; a frame a bucket of whole tensors."""
    frames: list[bytes] = []
    gaps: list[bytes] = []
    masks: list[bytes] = []
    for before, after in zip(old, new, strict=True):
        positions = np.flatnonzero(before != after)
        steps = np.diff(positions, prepend=-1) - 1
        width = 2 if not steps.size or steps.max() < 2**16 else 4 if steps.max() < 2**32 else 8
        if sum(map(len, gaps)) + sum(map(len, masks)) + positions.size * (width + 2) > BUCKET_BYTES:
            frames.append(_dcr_frame(gaps, masks))
            gaps, masks = [], []
        gaps.append(struct.pack("<BI", width, positions.size) + steps.astype(f"<u{width}").tobytes())
        masks.append((before[positions] ^ after[positions]).tobytes())
    frames.append(_dcr_frame(gaps, masks))
    return frames


def _dcr_frame(gaps: list[bytes], masks: list[bytes]) -> bytes:
    raw = struct.pack("<I", len(gaps)) + b"".join(gaps) + b"".join(masks)
    return zstandard.ZstdCompressor(level=1).compress(raw)


def dcr_decode(old: State, frames: Sequence[bytes]) -> list[NDArray[np.uint16]]:
    """XOR the masks into a copy of the old state."""
    new = [before.copy() for before in old]
    at = 0
    for frame in frames:
        raw = zstandard.ZstdDecompressor().decompress(frame)
        (tensors,) = struct.unpack_from("<I", raw)
        offset, places = 4, []
        for _ in range(tensors):
            width, count = struct.unpack_from("<BI", raw, offset)
            steps = np.frombuffer(raw, f"<u{width}", count, offset + 5).astype(np.int64)
            places.append(np.cumsum(steps + 1) - 1)
            offset += 5 + width * count
        for positions in places:
            new[at][positions] ^= np.frombuffer(raw, "<u2", positions.size, offset)
            offset += 2 * positions.size
            at += 1
    return new


def dense_xor_encode(old: State, new: State) -> list[bytes]:
    """A frame a changed tensor, an empty one for a tensor that did not change."""
    coder = zstandard.ZstdCompressor(level=1)
    masks = (before ^ after for before, after in zip(old, new, strict=True))
    return [coder.compress(mask.tobytes()) if mask.any() else b"" for mask in masks]


def dense_xor_decode(old: State, frames: Sequence[bytes]) -> list[NDArray[np.uint16]]:
    """XOR the whole tensors."""
    decoder = zstandard.ZstdDecompressor()
    return [
        before ^ np.frombuffer(decoder.decompress(frame), "<u2") if frame else before.copy()
        for before, frame in zip(old, frames, strict=True)
    ]


def index_value_encode(old: State, new: State) -> list[bytes]:
    """Indices, then values, a tensor."""
    sent = []
    for before, after in zip(old, new, strict=True):
        positions = np.flatnonzero(before != after)
        sent.append(positions.astype("<i4").tobytes() + after[positions].tobytes())
    return sent


def index_value_decode(old: State, sent: Sequence[bytes]) -> list[NDArray[np.uint16]]:
    """Overwrite a copy of the old state."""
    new = [before.copy() for before in old]
    for after, raw in zip(new, sent, strict=True):
        count = len(raw) // 6
        after[np.frombuffer(raw, "<i4", count)] = np.frombuffer(raw, "<u2", count, 4 * count)
    return new


def raw_encode(_: State, new: State) -> list[bytes]:
    """All bytes."""
    return [after.tobytes() for after in new]


def raw_decode(_: State, sent: Sequence[bytes]) -> list[NDArray[np.uint16]]:
    """All bytes."""
    return [np.frombuffer(raw, "<u2").copy() for raw in sent]


RIVALS = (
    Rival("raw", raw_encode, raw_decode),
    Rival("int32 + value", index_value_encode, index_value_decode),
    Rival("dense XOR", dense_xor_encode, dense_xor_decode),
    Rival("DCR", dcr_encode, dcr_decode),
)

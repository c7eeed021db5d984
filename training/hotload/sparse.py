"""The elements that changed between two states, as one file: positions and new 16-bit patterns, bits against bits.

Layout, little-endian: magic (8 bytes), header length (u32), header (JSON, `Header`), then for each tensor its positions
(u32, strictly increasing) and values (u16), then SHA-256 of all that came before. A reader checks every length against the
file's size before it allocates anything. Values overwrite, they are never added: sums in BF16 are not exact, and a patch
that overwrites may be applied twice.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from groundhop.errors import ChecksumError, InputError

MAGIC = b"GHDELTA1"
DIGEST_BYTES = 32
POSITION_BYTES, VALUE_BYTES = 4, 2

Bits = NDArray[np.uint16]
"""A tensor's 16-bit patterns in row-major order, one axis."""


class TensorHead(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the header says of one tensor with changes."""

    name: str
    size: int
    """Elements of the whole tensor."""
    changed: int
    digest: str
    """SHA-256 (hex) of the tensor's new bytes."""


class Header(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The header of a delta file. Digests are of whole states, see `state.digest_of`."""

    version: str
    base: str
    target: str
    tensors: tuple[TensorHead, ...] = ()


@dataclass(frozen=True, slots=True)
class Patch:
    """New bits of one tensor."""

    name: str
    size: int
    positions: NDArray[np.uint32]
    values: Bits
    digest: str


@dataclass(frozen=True, slots=True)
class Delta:
    """A whole step from state `base` to state `target`."""

    version: str
    base: str
    target: str
    patches: tuple[Patch, ...]


def diff(name: str, old: Bits, new: Bits) -> Patch | None:
    """What changed from `old` to `new`, None if nothing. Compares bits, so that -0.0 and NaN count as what they are.

    Raises: InputError for other types or sizes.
    """
    if old.dtype != np.uint16 or new.dtype != np.uint16 or old.shape != new.shape or old.ndim != 1:
        raise InputError(
            f"{name}: need two flat uint16 arrays of one size, got {old.dtype}{old.shape} and {new.dtype}{new.shape}"
        )
    if old.size > 2**32:
        raise InputError(f"{name}: {old.size} elements are more than 32-bit positions can name")
    positions = np.flatnonzero(old != new).astype(np.uint32)
    if positions.size == 0:
        return None
    return Patch(name, new.size, positions, new[positions], digest_bits(new))


def digest_bits(bits: Bits) -> str:
    """SHA-256 (hex) of a tensor's bytes."""
    return hashlib.sha256(np.ascontiguousarray(bits).data).hexdigest()


def apply(patch: Patch, bits: Bits) -> Bits:
    """Overwrite `bits` in place. Returns the old values at the patch's positions, with which it can be undone.

    Raises: InputError where the patch does not fit.
    """
    if bits.size != patch.size or bits.dtype != np.uint16:
        raise InputError(
            f"{patch.name}: the patch is for {patch.size} elements, the tensor has {bits.size} of {bits.dtype}"
        )
    old: Bits = bits[patch.positions]
    bits[patch.positions] = patch.values
    return old


def write(path: Path, delta: Delta) -> int:
    """Write a delta file at once (temporary file, then rename). Returns its size in bytes."""
    header = msgspec.json.encode(
        Header(
            version=delta.version,
            base=delta.base,
            target=delta.target,
            tensors=tuple(
                TensorHead(name=p.name, size=p.size, changed=len(p.positions), digest=p.digest) for p in delta.patches
            ),
        )
    )
    pieces: list[Any] = [MAGIC + struct.pack("<I", len(header)) + header]
    for patch in delta.patches:
        pieces += [patch.positions.astype("<u4").view(np.uint8), patch.values.astype("<u2").view(np.uint8)]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    total, running = 0, hashlib.sha256()
    with temporary.open("wb") as file:
        for piece in pieces:
            running.update(piece)
            total += file.write(piece)
        total += file.write(running.digest())
    temporary.replace(path)
    return total


def read(path: Path) -> Delta:
    """Read and check a delta file. Raises: InputError for a malformed one, ChecksumError where its SHA-256 differs."""
    size = path.stat().st_size
    smallest = len(MAGIC) + 4 + DIGEST_BYTES
    if size < smallest:
        raise InputError(f"{path}: need at least {smallest} bytes, got {size}")
    with path.open("rb") as file:
        start = file.read(len(MAGIC) + 4)
        if not start.startswith(MAGIC):
            raise InputError(f"{path} is not a delta file: it begins with {start[:8]!r}")
        (length,) = struct.unpack("<I", start[len(MAGIC) :])
        if length > size - smallest:
            raise InputError(f"{path}: its header claims {length} bytes, but the file has {size}")
        header = _header(file.read(length), path)
        body = sum(tensor.changed for tensor in header.tensors) * (POSITION_BYTES + VALUE_BYTES)
        if size != smallest + length + body:
            raise InputError(f"{path}: need {smallest + length + body} bytes as its header says, got {size}")
        file.seek(0)
        content = file.read()
    if hashlib.sha256(memoryview(content)[:-DIGEST_BYTES]).digest() != content[-DIGEST_BYTES:]:
        raise ChecksumError(f"{path}: its bytes differ from its SHA-256")
    return Delta(
        header.version, header.base, header.target, _patches(header.tensors, content, len(start) + length, path)
    )


def _header(raw: bytes, path: Path) -> Header:
    try:
        header = msgspec.json.decode(raw, type=Header)
    except msgspec.MsgspecError as error:
        raise InputError(f"{path}: its header cannot be read: {error}") from error
    if any(not 0 < tensor.changed <= tensor.size <= 2**32 for tensor in header.tensors):
        raise InputError(f"{path}: a tensor's counts are out of range")
    if len({tensor.name for tensor in header.tensors}) != len(header.tensors):
        raise InputError(f"{path}: a tensor is named twice")
    return header


def _patches(heads: Sequence[TensorHead], content: bytes, offset: int, path: Path) -> tuple[Patch, ...]:
    patches = []
    for head in heads:
        positions = np.frombuffer(content, "<u4", head.changed, offset)
        offset += head.changed * POSITION_BYTES
        values = np.frombuffer(content, "<u2", head.changed, offset)
        offset += head.changed * VALUE_BYTES
        if int(positions[-1]) >= head.size or not bool(np.all(positions[1:] > positions[:-1])):
            raise InputError(f"{path}: positions of {head.name} are out of order or out of range")
        patches.append(Patch(head.name, head.size, positions, values, head.digest))
    return tuple(patches)


def totals(delta: Delta, sizes: Mapping[str, int]) -> tuple[int, int]:
    """How many elements changed, of how many."""
    return sum(len(patch.positions) for patch in delta.patches), sum(sizes.values())

"""Deltas in the layout that CoreWeave, slime, miles and ModelExpress share, written and read.

A part is a safetensors file. Each changed tensor is a U8 vector under its own name that holds zstd frames; what they
decode to is the XOR of old and new bytes (`xor`), or a count, byte positions (both u32, little-endian) and the new bytes there
(`overwrite`). `__metadata__` maps each name to the Adler-32 of the tensor's *new* bytes, 8 hex digits.
Sources: `control-plane.md` 5.1; cwtrain 1.0.2, `hotload/delta.py`; slime, `utils/disk_delta.py`.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from groundhop.errors import ChecksumError, InputError
from groundhop.training.hotload import zstd_frames
from groundhop.training.hotload.bits import Bits, TensorSpec, Weights
from groundhop.training.hotload.delta import Encoding, TensorDelta, encode_tensor
from groundhop.training.hotload.safetensors_file import SafetensorsFile, Stored, make_header, read_header
from groundhop.training.hotload.store.index import Operation

LEVEL = 1
POSITION_BYTES = 4

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """One changed tensor, coded."""

    name: str
    payload: bytes
    """zstd frames."""
    adler32: str
    """Of the new bytes, 8 hex digits."""
    changed: int
    """Elements that are sent."""


def encode_shared(
    spec: TensorSpec, old: Bits, new: Bits, *, operation: Operation = "differential", also: NDArray[Any] | None = None
) -> SharedTensor | None:
    """Code one tensor; None when there is nothing to send.

    `also`: positions of elements that an `overwrite` sends whatever they hold. Raises: InputError for bits that do not fit
    `spec`, for `also` in an XOR, and for an overwrite of 4 GiB or more, which 32-bit positions cannot name.
    """
    if old.shape != new.shape or old.dtype != new.dtype or new.size != spec.size or new.dtype != spec.unit:
        raise InputError(
            f"{spec.name}: need {spec.size} of {spec.unit}, got {old.dtype}{old.shape}, {new.dtype}{new.shape}"
        )
    if operation == "differential" and also is not None:
        raise InputError(f"{spec.name}: only an overwrite may send elements that did not change")
    differs = old != new
    if also is not None:
        differs[also] = True
    changed = int(np.count_nonzero(differs))
    if not changed:
        return None
    before, after = _bytes(old), _bytes(new)
    match operation:
        case "differential":
            raw = np.bitwise_xor(before, after).tobytes()
        case "overwrite":
            raw = _overwrite(spec, np.repeat(differs, spec.unit.itemsize), after)
    payload = zstandard.ZstdCompressor(level=LEVEL).compress(raw)
    return SharedTensor(spec.name, payload, adler32(after), changed)


def write_shared(tensors: Iterable[SharedTensor]) -> bytes:
    """The bytes of one part. Raises: InputError without any tensor: an empty delta has no part at all."""
    by_name = {tensor.name: tensor for tensor in tensors}
    if not by_name:
        raise InputError("need at least one tensor in a part")
    specs = [TensorSpec(name=name, dtype="U8", shape=(len(tensor.payload),)) for name, tensor in by_name.items()]
    head, order = make_header(specs, {name: tensor.adler32 for name, tensor in by_name.items()})
    return b"".join([head, *(by_name[spec.name].payload for spec in order)])


@dataclass(frozen=True, slots=True)
class SharedPart:
    """A part on disk whose header was checked."""

    file: SafetensorsFile
    operation: Operation

    @property
    def names(self) -> list[str]:
        """The tensors it changes."""
        return [tensor.spec.name for tensor in self.file.tensors]

    def new_bits(self, spec: TensorSpec, old: Bits) -> Bits:
        """A tensor's bits after the change, an array of its own; `old` is left as it is.

        Raises: InputError for a payload that does not fit the tensor, ChecksumError where the result differs from its
        Adler-32, which is what an XOR onto a wrong base gives.
        """
        where = f"{self.file.path}: {spec.name}"
        (stored,) = (tensor for tensor in self.file.tensors if tensor.spec.name == spec.name)
        payload = _read(self.file.path, stored)
        match self.operation:
            case "differential":
                mask = np.frombuffer(zstd_frames.decode_exact(payload, spec.nbytes, where), np.uint8)
                after = np.bitwise_xor(_bytes(old), mask)
            case "overwrite":
                most = POSITION_BYTES + spec.nbytes * (POSITION_BYTES + 1)
                after = _overwritten(_bytes(old), zstd_frames.decode(payload, limit=most, where=where), where)
        if adler32(after) != self.file.metadata[spec.name]:
            raise ChecksumError(
                f"{where} has the Adler-32 {adler32(after)}, promised was {self.file.metadata[spec.name]}"
            )
        return after.view(spec.unit)


def read_shared(path: Path, operation: Operation) -> SharedPart:
    """Read a part's header. Raises: InputError for one that does not fit the layout."""
    file = read_header(path)
    for tensor in file.tensors:
        spec = tensor.spec
        if spec.dtype != "U8" or len(spec.shape) != 1 or spec.name not in file.metadata:
            raise InputError(
                f"{path}: need {spec.name!r} as a vector of U8 with its Adler-32 in the metadata, got {spec}"
            )
    return SharedPart(file, operation)


def apply_shared(part: SharedPart, weights: Weights) -> list[str]:
    """Write a part's tensors into `weights`, which a failure leaves half changed: for scratch copies. Returns their names.

    Raises: InputError for a tensor that is not there, and as `SharedPart.new_bits`.
    """
    for spec in _specs(part, weights):
        bits = weights.bits(spec.name)
        bits[:] = part.new_bits(spec, bits)
    return part.names


def transcode(part: SharedPart, weights: Weights, encoding: Encoding = "auto") -> Iterator[TensorDelta]:
    """The same changes in our codec, for a reader that takes sparse changes only; `weights` hold the base and stay.

    An overwrite becomes dense, since the base it was made on may not be the one that a receiver holds.
    """
    for spec in _specs(part, weights):
        old = weights.bits(spec.name)
        dense = part.operation == "overwrite"
        delta = encode_tensor(
            spec, None if dense else old, part.new_bits(spec, old), encoding="dense" if dense else encoding
        )
        if delta is not None:
            yield delta


def check_full(path: Path) -> None:
    """Check the tensors of a full snapshot's shard against those Adler-32 that its metadata holds (cwtrain writes them).

    Raises: ChecksumError for one that differs.
    """
    file = read_header(path)
    for tensor in file.tensors:
        promised = file.metadata.get(tensor.spec.name)
        if promised is not None and adler32(_read(path, tensor)) != promised:
            raise ChecksumError(f"{path}: {tensor.spec.name} differs from its Adler-32")


def adler32(data: Any) -> str:
    """Adler-32 (RFC 1950, 8.2) as 8 hex digits."""
    return f"{zlib.adler32(data):08x}"


def _specs(part: SharedPart, weights: Weights) -> Iterator[TensorSpec]:
    specs: Mapping[str, TensorSpec] = weights.specs
    for name in part.names:
        if name not in specs:
            raise InputError(f"{part.file.path} changes {name!r}, which the checkpoint does not have")
        yield specs[name]


def _read(path: Path, tensor: Stored) -> bytes:
    with path.open("rb") as file:
        file.seek(tensor.start)
        return file.read(tensor.stop - tensor.start)


def _bytes(bits: Bits) -> Bytes:
    return np.ascontiguousarray(bits).view(np.uint8)


def _overwrite(spec: TensorSpec, mask: NDArray[np.bool_], after: Bytes) -> bytes:
    if spec.nbytes >= 2**32:
        raise InputError(f"{spec.name}: an overwrite names bytes with 32 bits, but the tensor has {spec.nbytes}")
    positions = np.flatnonzero(mask).astype("<u4")
    return np.array([positions.size], "<u4").tobytes() + positions.tobytes() + after[mask].tobytes()


def _overwritten(before: Bytes, raw: bytes, where: str) -> Bytes:
    if len(raw) < POSITION_BYTES:
        raise InputError(f"{where}: need a count, got {len(raw)} bytes")
    count = int(np.frombuffer(raw, "<u4", 1)[0])
    if len(raw) != POSITION_BYTES + count * (POSITION_BYTES + 1):
        raise InputError(f"{where}: {count} bytes do not fit into {len(raw)}")
    positions = np.frombuffer(raw, "<u4", count, POSITION_BYTES)
    if count and (int(positions[-1]) >= before.size or not bool(np.all(positions[1:] > positions[:-1]))):
        raise InputError(f"{where}: positions are out of order or out of range")
    after = before.copy()
    after[positions] = np.frombuffer(raw, np.uint8, count, POSITION_BYTES * (1 + count))
    return after

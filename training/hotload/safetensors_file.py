"""Read and write the header of a safetensors file: who lies where. The tensors' bytes stay on disk.

Format: github.com/huggingface/safetensors, README, "Format": u64 length N, N bytes of JSON, then the tensors' bytes without
holes. Everything that file says is checked against its real size before any of it is used; no torch, no safetensors library.
"""

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from groundhop.errors import InputError
from groundhop.training.hotload.bits import ITEM_BYTES, TensorSpec

METADATA = "__metadata__"
MOST_HEADER_BYTES = 100_000_000
"""The limit of the reference reader, too."""


class Entry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor and where its bytes lie, counted from the start of the file."""

    spec: TensorSpec
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """One file's header."""

    path: Path
    head: bytes
    """All bytes before the tensors': the length and the JSON, as they stand in the file."""
    tensors: tuple[Stored, ...]
    """In the order of their bytes, without holes."""
    metadata: Mapping[str, str]
    """The free text pairs; empty where there are none."""


def read_header(path: Path) -> SafetensorsFile:
    """Read a file's header and check all of it.

    Raises: InputError that names the file for anything that does not fit the format or the file's size; OSError where the
    file cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = _length(file.read(8), size, path)
        head = struct.pack("<Q", length) + file.read(length)
    if len(head) != 8 + length:
        raise InputError(f"{path} got shorter while it was read")
    table = _table(head[8:], path)
    metadata = _converted(table.pop(METADATA, {}), dict[str, str], METADATA, path)
    stored = [_stored(name, value, len(head), path) for name, value in table.items()]
    stored.sort(key=lambda tensor: (tensor.start, tensor.stop))
    at = len(head)
    for tensor in stored:
        if tensor.start != at:
            raise InputError(f"{path}: need {tensor.spec.name!r} at byte {at}, its header says {tensor.start}")
        at = tensor.stop
    if at != size:
        raise InputError(f"{path}: need {at} bytes as its header says, got {size}")
    return SafetensorsFile(path, head, tuple(stored), metadata)


def make_header(
    specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[TensorSpec]]:
    """The first bytes of a file of these tensors, and the order in which their bytes must follow.

    Wide types come first, so that every tensor is aligned to its elements; the JSON is padded to 8 bytes for that, too.
    """
    order = sorted(specs, key=lambda spec: (-ITEM_BYTES[spec.dtype], spec.name))
    table: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    at = 0
    for spec in order:
        table[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": (at, at + spec.nbytes)}
        at += spec.nbytes
    text = msgspec.json.encode(table)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, order


def _length(raw: bytes, size: int, path: Path) -> int:
    if len(raw) < 8:
        raise InputError(f"{path}: need at least 8 bytes, got {size}")
    (length,) = struct.unpack("<Q", raw)
    if length > min(MOST_HEADER_BYTES, size - 8):
        raise InputError(f"{path} is no safetensors file: its header claims {length} bytes, the file has {size}")
    return int(length)


def _table(text: bytes, path: Path) -> dict[str, Any]:
    try:
        # The standard reader shows keys that stand twice; others keep one of them silently.
        table = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no safetensors file: its header cannot be read: {_first_line(error)}") from error
    if not isinstance(table, dict):
        raise InputError(f"{path} is no safetensors file: its header is not a JSON object")
    return table


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return table


def _stored(name: str, value: Any, base: int, path: Path) -> Stored:
    entry = _converted(value, Entry, name, path)
    if entry.dtype not in ITEM_BYTES:
        raise InputError(f"{path}: no tensor type {entry.dtype!r} of {name!r}; known are {', '.join(ITEM_BYTES)}")
    spec = TensorSpec(name=name, dtype=entry.dtype, shape=entry.shape)
    start, stop = entry.data_offsets
    if min(entry.shape, default=0) < 0 or start < 0 or stop - start != spec.nbytes:
        raise InputError(
            f"{path}: {name!r} of type {entry.dtype} and shape {list(entry.shape)} cannot lie in bytes {start} to {stop}"
        )
    return Stored(spec, base + start, base + stop)


def _converted(value: Any, kind: Any, name: str, path: Path) -> Any:
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        raise InputError(f"{path}: what its header says of {name!r} cannot be read: {error}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

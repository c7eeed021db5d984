"""A checkpoint on disk as a canonical state: a safetensors file, or a Hugging Face folder of any number of them.

Files are memory-mapped and written tensor by tensor, so that a checkpoint may be larger than memory. No torch is needed.
"""

import logging
import mmap
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from groundhop.errors import InputError, MissingError
from groundhop.progress import progress
from groundhop.training.hotload.atomic import replacing
from groundhop.training.hotload.bits import Bits, TensorSpec, Weights
from groundhop.training.hotload.fingerprint import Fingerprint, fingerprint, state_digest
from groundhop.training.hotload.safetensors_file import SafetensorsFile, Stored, make_header, read_header

logger = logging.getLogger(__name__)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MOST_INDEX_BYTES = 200_000_000
SHOWN_BYTES = 2 * 10**9
"""From this size on, reading and writing show how far they are."""
OTHER_WEIGHTS = ("*.safetensors", "pytorch_model*", "*.gguf", "*.pth", "*.ckpt", "*.h5", "*.msgpack")
"""Other files that hold the same weights; they would be of another version in a folder that is written anew."""


class _Index(Struct, frozen=True, kw_only=True):
    """`model.safetensors.index.json`, as transformers writes it; other keys are allowed."""

    weight_map: dict[str, str]


class Checkpoint:
    """A `Weights` that can only be read."""

    def __init__(self, path: Path, shards: Iterable[SafetensorsFile]) -> None:
        self.path = path
        self.shards = tuple(shards)
        self._places: dict[str, tuple[SafetensorsFile, Stored]] = {}
        self._maps: dict[Path, NDArray[np.uint8]] = {}
        for shard in self.shards:
            for tensor in shard.tensors:
                name = tensor.spec.name
                if name in self._places:
                    raise InputError(f"{shard.path} and {self._places[name][0].path} both hold {name!r}")
                self._places[name] = (shard, tensor)
        self.specs: Mapping[str, TensorSpec] = {name: tensor.spec for name, (_, tensor) in self._places.items()}

    def bits(self, name: str) -> Bits:
        """The bits of a tensor, read-only; they lie in the mapped file unless it stores them unaligned.

        Raises: InputError for a name that is not here.
        """
        if name not in self._places:
            raise InputError(f"{self.path} has no tensor {name!r}")
        shard, tensor = self._places[name]
        raw = self._mapped(shard.path)[tensor.start : tensor.stop]
        if raw.size and raw.__array_interface__["data"][0] % tensor.spec.unit.itemsize:
            raw = raw.copy()
            raw.flags.writeable = False
        return raw.view(tensor.spec.unit)

    @cached_property
    def prints(self) -> Mapping[str, Fingerprint]:
        """The fingerprint of each tensor; reads all of it once."""
        specs = watched(f"reading {self.path.name}, MB", self.specs.values())
        return {spec.name: fingerprint(self.bits(spec.name)) for spec in specs}

    @cached_property
    def digest(self) -> str:
        """The digest of the whole state; reads all of it once."""
        return state_digest(self.specs, self.prints)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.specs.values())

    def _mapped(self, path: Path) -> NDArray[np.uint8]:
        if path not in self._maps:
            with path.open("rb") as file:
                self._maps[path] = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        return self._maps[path]


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a safetensors file, or a folder with `model.safetensors`, with shards and their index, or with shards alone.

    Raises: MissingError where there is none; InputError that names the file for one that is damaged or ambiguous.
    """
    if path.is_file():
        return Checkpoint(path, [read_header(path)])
    if not path.is_dir():
        raise MissingError(f"no checkpoint {path}: need a safetensors file or a folder of them")
    return Checkpoint(path, _shards(path))


def write_checkpoint(weights: Weights, out: Path, like: Checkpoint | Path | None = None) -> None:
    """Write a whole state at once; what stands at `out` is replaced when all of it is on disk, and untouched until then.

    With `like`: the same file, or a folder with the same shards and all other files that are not weights; headers are
    taken over byte for byte. Without: a file where `out` ends in `.safetensors`, else a folder with one shard.
    Raises: InputError where the tensors are not those of `like`, or `out` is something that must not be replaced.
    """
    like = open_checkpoint(like) if isinstance(like, Path) else like
    folder = like.path.is_dir() if like is not None else out.suffix != ".safetensors"
    if like is not None:
        same_tensors(weights.specs, like.specs, str(like.path))
    _check_out(out, folder, like)
    with replacing(out) as path:
        if not folder:
            _write_file(weights, path, like.shards[0] if like is not None else None)
            return
        path.mkdir()
        if like is None:
            _write_file(weights, path / SINGLE, None)
            return
        _copy_other_files(like, path)
        for shard in like.shards:
            _write_file(weights, path / shard.path.name, shard)


def same_tensors(found: Mapping[str, TensorSpec], wanted: Mapping[str, TensorSpec], where: str) -> None:
    """Check that two states have the same names, types and shapes. Raises: InputError that names the first that differs."""
    for name in sorted(found.keys() | wanted.keys()):
        one, other = found.get(name), wanted.get(name)
        if one != other:
            raise InputError(f"need the tensors of {where}: {name!r} is {_said(other)} there and {_said(one)} here")


def watched(name: str, specs: Collection[TensorSpec]) -> Iterator[TensorSpec]:
    """Go through tensors; where they are large together, show how many megabytes are done."""
    total = sum(spec.nbytes for spec in specs)
    if total < SHOWN_BYTES:
        yield from specs
        return
    with progress(name, total // 10**6) as shown:
        for spec in specs:
            yield spec
            shown.advance(spec.nbytes // 10**6)


def _said(spec: TensorSpec | None) -> str:
    return "absent" if spec is None else f"{spec.dtype}{list(spec.shape)}"


def _shards(folder: Path) -> list[SafetensorsFile]:
    index, single = folder / INDEX, folder / SINGLE
    if index.exists():
        if single.exists() and SINGLE not in _weight_map(index).values():
            raise InputError(f"{folder} holds both {SINGLE} and an index of other files: which one counts is not known")
        return _indexed_shards(folder, index)
    found = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not found:
        raise MissingError(f"no safetensors in {folder}")
    return [read_header(path) for path in found]


def _indexed_shards(folder: Path, index: Path) -> list[SafetensorsFile]:
    table = _weight_map(index)
    shards: dict[str, SafetensorsFile] = {}
    for name in sorted(set(table.values())):
        if "/" in name or "\\" in name or name in ("", ".", ".."):
            raise InputError(f"{index}: need plain file names, got {name!r}")
        if not (folder / name).is_file():
            raise MissingError(f"{index} names {name!r}, which is not there")
        shards[name] = read_header(folder / name)
    held = {name: {tensor.spec.name for tensor in shard.tensors} for name, shard in shards.items()}
    for tensor, file in table.items():
        if tensor not in held[file]:
            raise InputError(f"{index} says that {file!r} holds {tensor!r}, but it does not")
    return list(shards.values())


def _weight_map(index: Path) -> dict[str, str]:
    if index.stat().st_size > MOST_INDEX_BYTES:
        raise InputError(f"{index}: need at most {MOST_INDEX_BYTES} bytes, got {index.stat().st_size}")
    try:
        table = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InputError(f"{index} cannot be read: {error}") from error
    if not table:
        raise InputError(f"{index} names no tensors")
    return table


def _check_out(out: Path, folder: bool, like: Checkpoint | None) -> None:
    real = Path(os.path.realpath(out))
    if not folder:
        if real.is_dir():
            raise InputError(f"{out} is a folder: need the name of a file to write")
        return
    if real.is_file():
        raise InputError(f"{out} is a file: need the name of a folder to write")
    if real.is_dir() and any(real.iterdir()) and not any(real.glob("*.safetensors")):
        raise InputError(f"{out} holds other things than a checkpoint: not replaced")
    if like is not None:
        source = Path(os.path.realpath(like.path))
        if real != source and (real in source.parents or source in real.parents):
            raise InputError(f"{out} and {like.path} lie in each other")


def _write_file(weights: Weights, path: Path, like: SafetensorsFile | None) -> None:
    if like is not None:
        head, order = like.head, [tensor.spec for tensor in like.tensors]
    else:
        head, order = make_header(weights.specs.values(), {"format": "pt"})
    with path.open("wb") as file:
        file.write(head)
        for spec in watched(f"writing {path.name}, MB", order):
            bits = weights.bits(spec.name)
            if bits.nbytes != spec.nbytes:
                raise InputError(f"{spec.name}: need {spec.nbytes} bytes, got {bits.nbytes}")
            file.write(np.ascontiguousarray(bits).view(np.uint8).data)


def _copy_other_files(source: Checkpoint, target: Path) -> None:
    """Copy a folder's files and sub-folders, but no weights."""
    read = {shard.path for shard in source.shards}
    stale = {path for pattern in OTHER_WEIGHTS for path in source.path.rglob(pattern)} - read
    if stale:
        names = sorted(str(path.relative_to(source.path)) for path in stale)
        logger.warning("left out, as they may hold weights of another version: %s", ", ".join(names[:5]))
    shutil.copytree(source.path, target, ignore=_weights_in, dirs_exist_ok=True)
    # A folder that nobody may write to gives its mode to its copy.
    target.chmod(target.stat().st_mode | 0o700)


def _weights_in(_: Any, names: list[str]) -> set[str]:
    return {name for name in names if any(Path(name).match(pattern) for pattern in OTHER_WEIGHTS)}

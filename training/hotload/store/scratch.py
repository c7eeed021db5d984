"""A checkpoint folder whose tensors can be written in place: a scratch copy that nobody else reads yet."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import numpy as np

from groundhop.training.hotload.bits import Bits, TensorSpec
from groundhop.training.hotload.checkpoint import Checkpoint
from groundhop.training.hotload.safetensors_file import Stored, read_header


class Scratch:
    """A `Weights` over mapped shards. Leave it as a context, or by `close`, so that everything is in the files."""

    def __init__(self, folder: Path, shards: list[Path]) -> None:
        checkpoint = Checkpoint(folder, [read_header(path) for path in shards])
        self.specs: Mapping[str, TensorSpec] = checkpoint.specs
        self._maps = {
            shard.path: np.memmap(shard.path, np.uint8, "r+")
            for shard in checkpoint.shards
            if shard.path.stat().st_size
        }
        self._places: dict[str, tuple[Path, Stored]] = {
            tensor.spec.name: (shard.path, tensor) for shard in checkpoint.shards for tensor in shard.tensors
        }
        self._unaligned: dict[str, Bits] = {}

    def __enter__(self) -> "Scratch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def bits(self, name: str) -> Bits:
        """The bits of a tensor; what is written to them is in the file at `close`."""
        if name in self._unaligned:
            return self._unaligned[name]
        path, tensor = self._places[name]
        raw = np.asarray(self._maps[path][tensor.start : tensor.stop])
        if raw.size and raw.ctypes.data % tensor.spec.unit.itemsize:
            # A type that lies across its natural addresses is held apart: compiled loops take aligned arrays only.
            self._unaligned[name] = raw.copy().view(tensor.spec.unit)
            return self._unaligned[name]
        return raw.view(tensor.spec.unit)

    def close(self) -> None:
        """Put everything into the files."""
        for name, bits in self._unaligned.items():
            path, tensor = self._places[name]
            self._maps[path][tensor.start : tensor.stop] = bits.view(np.uint8)
        self._unaligned.clear()
        for mapped in self._maps.values():
            mapped.flush()
        self._maps.clear()

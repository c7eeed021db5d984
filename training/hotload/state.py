"""The canonical state of a policy: a Hugging Face checkpoint's tensors as BF16 bits under the checkpoint's own names.

Trainer and servers compare states by one digest: SHA-256 over name, shape and SHA-256 of the bytes of each tensor, by name.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from groundhop.errors import ChecksumError, InputError, MissingError
from groundhop.training.hotload import sparse
from groundhop.training.hotload.sparse import Bits, Delta


@dataclass(slots=True)
class State:
    """Tensors of one version, changed in place by `patch`."""

    bits: dict[str, Bits]
    shapes: dict[str, tuple[int, ...]]
    digests: dict[str, str] = field(default_factory=dict)
    """SHA-256 (hex) of each tensor's bytes."""

    def __post_init__(self) -> None:
        if not self.digests:
            self.digests = {name: sparse.digest_bits(bits) for name, bits in self.bits.items()}

    @property
    def digest(self) -> str:
        """The digest of the whole state."""
        return digest_of(self.digests, self.shapes)

    def patch(self, delta: Delta) -> None:
        """Move to `delta.target`; a delta that leads to the present state changes nothing.

        Raises: ChecksumError, with the state as before, when this is not `delta.base` or the result is not `delta.target`;
        InputError for a tensor that is not here.
        """
        if self.digest == delta.target:
            return
        if self.digest != delta.base:
            raise ChecksumError(
                f"version {delta.version} builds on {delta.base[:12]}, this state is {self.digest[:12]}"
            )
        done: list[tuple[str, Any, Bits]] = []
        before = dict(self.digests)
        try:
            for patch in delta.patches:
                if patch.name not in self.bits:
                    raise InputError(
                        f"version {delta.version} changes {patch.name}, which the checkpoint does not have"
                    )
                done.append((patch.name, patch.positions, sparse.apply(patch, self.bits[patch.name])))
                self.digests[patch.name] = sparse.digest_bits(self.bits[patch.name])
            if self.digest != delta.target:
                raise ChecksumError(
                    f"version {delta.version} gives {self.digest[:12]}, promised was {delta.target[:12]}"
                )
        except BaseException:
            for name, positions, old in reversed(done):
                self.bits[name][positions] = old
            self.digests = before
            raise


def digest_of(digests: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The digest of a state from its tensors' digests."""
    rows = [[name, list(shapes[name]), digests[name]] for name in sorted(digests)]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def bits_of(tensor: Any) -> Bits:
    """The row-major BF16 bits of a torch tensor of any float type and layout; sharded ones are gathered."""
    import torch

    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    plain = full.detach().to(device="cpu", dtype=torch.bfloat16).contiguous()
    bits: Bits = plain.view(torch.int16).numpy().view(np.uint16).reshape(-1)
    return bits


def tensor_of(bits: Bits, shape: tuple[int, ...]) -> Any:
    """A BF16 torch tensor that shares memory with `bits`."""
    import torch

    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).reshape(shape)


def read_checkpoint(folder: Path) -> State:
    """Read a folder's safetensors, cast to BF16. Raises: MissingError without any, InputError for a type that is not float."""
    import torch
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise MissingError(f"no safetensors in {folder}")
    state: dict[str, Bits] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                tensor = file.get_tensor(name)
                if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
                    raise InputError(
                        f"{path}: {name} is {tensor.dtype}; only plain float checkpoints take weights in place"
                    )
                state[name] = bits_of(tensor).copy()
                shapes[name] = tuple(tensor.shape)
    return State(state, shapes)


def write_checkpoint(state: State, folder: Path, like: Path) -> None:
    """Write `state` as an HF folder at once, with the other files of the folder `like`."""
    import shutil
    import tempfile

    from safetensors.torch import save_file

    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-", suffix=".tmp"))
    try:
        for path in like.iterdir():
            if path.is_file() and ".safetensors" not in path.name:
                shutil.copy2(path, work / path.name)
        tensors = {name: tensor_of(bits, state.shapes[name]) for name, bits in state.bits.items()}
        save_file(tensors, work / "model.safetensors", metadata={"format": "pt"})
        work.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(work, folder)  # noqa: PTH105
    finally:
        shutil.rmtree(work, ignore_errors=True)

"""A trainer's tensors as the bits that a checkpoint would hold: names, shapes and types checked against the baseline."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from groundhop.errors import InputError
from groundhop.training.hotload.bits import Bits, TensorSpec, Weights, bits_of
from groundhop.training.hotload.compare import New

Named = Iterable[tuple[str, Any]]
"""All of a model's parameters by checkpoint name, each once; torch tensors (sharded ones too) or numpy arrays."""

TIED_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

TORCH_NAMES: Mapping[str, str] = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "bool": "BOOL", "complex64": "C64",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
}  # fmt: skip
"""Type names of torch and numpy, and those of the safetensors format."""

CASTS = frozenset({"F64", "F32", "F16", "BF16"})
"""Among these a trainer's type may differ from the checkpoint's, as FP32 masters do; quantised types have scales besides."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor that is its bits already, as `Named` may hold one too."""

    spec: TensorSpec
    bits: Bits

    @property
    def shape(self) -> tuple[int, ...]:
        """As of a tensor."""
        return self.spec.shape


class Given:
    """A trainer's tensors as a `Weights`, in the trainer's own types. Raises: InputError for a name that comes twice."""

    def __init__(self, named: Named) -> None:
        self._tensors: dict[str, Any] = {}
        for name, tensor in named:
            if name in self._tensors:
                raise InputError(f"the trainer gave {name} twice")
            self._tensors[name] = tensor
        self.specs: Mapping[str, TensorSpec] = {name: spec_of(name, one) for name, one in self._tensors.items()}

    def bits(self, name: str) -> Bits:
        """The bits of a tensor; a sharded one is gathered."""
        return cast(self._tensors[name], self.specs[name])


def spec_of(name: str, tensor: Any) -> TensorSpec:
    """What a checkpoint would say of a tensor. Raises: InputError for a type that no checkpoint holds."""
    if isinstance(tensor, Whole):
        return TensorSpec(name=name, dtype=tensor.spec.dtype, shape=tensor.spec.shape)
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind not in TORCH_NAMES:
        raise InputError(f"{name}: a checkpoint holds no {kind}")
    return TensorSpec(name=name, dtype=TORCH_NAMES[kind], shape=tuple(int(n) for n in tensor.shape))


def cast(tensor: Any, spec: TensorSpec) -> Bits:
    """The bits that a checkpoint of `spec` holds for a tensor, rounded as the engine's own `.to()` rounds.

    A sharded tensor is gathered. Raises: InputError for another shape, or a type that is not cast.
    """
    typed = as_stored(tensor, spec)
    return typed.bits if isinstance(typed, Whole) else bits_of(typed).view(spec.unit)


def as_stored(tensor: Any, spec: TensorSpec) -> Any:
    """A tensor whole and in the checkpoint's type, where it lies. Raises: as `cast`."""
    given = spec_of(spec.name, tensor)
    if given.shape != spec.shape:
        raise InputError(f"{spec.name}: need the shape {list(spec.shape)}, the trainer gave {list(given.shape)}")
    if isinstance(tensor, Whole):
        if given.dtype != spec.dtype:
            raise InputError(f"{spec.name}: need {spec.dtype}, got bits of {given.dtype}")
        return tensor
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    if given.dtype == spec.dtype:
        return tensor
    if given.dtype not in CASTS or spec.dtype not in CASTS:
        raise InputError(f"{spec.name}: need {spec.dtype}, the trainer gave {given.dtype}, which is not cast")
    import torch

    kind = next(name for name, dtype in TORCH_NAMES.items() if dtype == spec.dtype)
    plain = torch.from_numpy(tensor) if isinstance(tensor, np.ndarray) else tensor.detach()
    return plain.to(getattr(torch, kind))


Take = Callable[[Any, TensorSpec], New]
"""How a trainer's tensor becomes bits; as `cast`, which brings them to the host."""


def matched(named: Named, base: Weights, take: Take = cast) -> Iterator[tuple[TensorSpec, New]]:
    """Each tensor of `base` once, with the trainer's bits for it, in the trainer's order.

    A tied output head that only one side has is no error: where only the trainer has it, it must equal the embedding; where
    only the checkpoint has it, and holds the same bits for both, it follows the embedding.
    Raises: InputError for a name that comes twice, is missing or is not the checkpoint's; the missing ones at the end.
    """
    left = dict(base.specs)
    embedding: New | None = None
    head: Any = None
    seen: set[str] = set()
    for name, tensor in named:
        if name in seen:
            raise InputError(f"the trainer gave {name} twice")
        seen.add(name)
        spec = left.pop(name, None)
        if spec is None:
            if name != TIED_HEAD:
                raise InputError(f"the trainer has {name}, which the checkpoint has not")
            head = tensor
            continue
        bits = take(tensor, spec)
        if name == EMBEDDING:
            embedding = bits
        yield spec, bits
    if head is not None:
        _require_tied(head, embedding, base)
    if list(left) == [TIED_HEAD] and embedding is not None and _is_tied(base):
        yield left.pop(TIED_HEAD), embedding
    if left:
        raise InputError(f"the trainer did not give {len(left)} of the checkpoint's tensors, first {min(left)}")


def _require_tied(head: Any, embedding: New | None, base: Weights) -> None:
    spec = base.specs.get(EMBEDDING)
    if spec is not None and embedding is not None and spec.shape == tuple(head.shape):
        as_embedding = TensorSpec(name=TIED_HEAD, dtype=spec.dtype, shape=spec.shape)
        held = embedding if isinstance(embedding, np.ndarray) else embedding.all()
        if np.array_equal(cast(head, as_embedding), held):
            return
    raise InputError(f"{TIED_HEAD} is not in the checkpoint, so it is tied, but it differs from {EMBEDDING}")


def _is_tied(base: Weights) -> bool:
    """Whether the checkpoint holds the same bits for the head and the embedding."""
    head, embedding = base.specs[TIED_HEAD], base.specs[EMBEDDING]
    same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape)
    return same and bool(np.array_equal(base.bits(TIED_HEAD), base.bits(EMBEDDING)))

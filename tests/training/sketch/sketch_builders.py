"""Trainers and steps for the tests of sketch sync: torch on one side, numpy on the other."""

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from groundhop.training.hotload.bits import Bits, TensorSpec
from groundhop.training.logra.signs import projection_seed, sign_tensor
from groundhop.training.sketch.quantise import SketchUpdate, apply_exact, quantise

TARGETS = ("layer.0.weight", "layer.1.weight")
"""Updated by sketches."""
OTHER = "norm.weight"
"""Updated in another way."""
SHAPES: Mapping[str, tuple[int, ...]] = {"layer.0.weight": (48, 400), "layer.1.weight": (30, 600), "norm.weight": (64,)}


def bfloat16_of(weight: torch.Tensor) -> Bits:
    """The flat bits of a weight in bfloat16, rounded by torch."""
    return weight.detach().bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(-1)


class Trainer:
    """FP32 weights that move by sketches (and, in `OTHER`, by anything), as LoGRA's optimizer moves them."""

    def __init__(self, *, bits: int = 8, rank: int = 4, rate: float = 2e-3, decay: float = 1.0, seed: int = 0) -> None:
        self.bits, self.rank, self.rate, self.decay, self.seed, self.steps = bits, rank, rate, decay, seed, 0
        generator = torch.Generator().manual_seed(seed)
        self.weights = {
            # As read from a bfloat16 checkpoint.
            name: (torch.randn(shape, generator=generator) * 0.02).bfloat16().float()
            for name, shape in SHAPES.items()
        }

    def step(self) -> dict[str, SketchUpdate]:
        """One optimizer step; says what it did to the targets."""
        self.steps += 1
        generator = torch.Generator().manual_seed(1000 * self.seed + self.steps)
        updates = {}
        for name in TARGETS:
            rows, columns = SHAPES[name]
            factor = torch.randn(rows, self.rank, generator=generator) * (self.rate / self.rank**0.5)
            seed = projection_seed(self.seed, self.steps, name)
            quantised = quantise(factor, self.bits)  # type: ignore[arg-type]
            signs = sign_tensor(seed, self.rank, columns, "cpu")
            apply_exact(self.weights[name], quantised, signs, self.decay)
            updates[name] = SketchUpdate(name, rows, columns, self.rank, seed, self.decay, quantised)
        self.weights[OTHER] += torch.randn(SHAPES[OTHER], generator=generator) * self.rate
        return updates

    def named(self) -> list[tuple[str, torch.Tensor]]:
        return list(self.weights.items())

    def canonical(self) -> dict[str, Bits]:
        """The bits of a bfloat16 checkpoint, rounded by torch."""
        return {name: bfloat16_of(weight) for name, weight in self.weights.items()}

    def checkpoint(self) -> "Bfloat16":
        return Bfloat16(self.canonical())


class Bfloat16:
    """A `Weights` of bfloat16 bits."""

    def __init__(self, held: Mapping[str, Bits], shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> None:
        self.held = {name: bits.copy() for name, bits in held.items()}
        self.specs = {name: TensorSpec(name=name, dtype="BF16", shape=tuple(shapes[name])) for name in held}

    def bits(self, name: str) -> Bits:
        return self.held[name]


class Wide:
    """Weights as an FP32 checkpoint."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.held = {name: weight.detach().numpy().copy() for name, weight in named}
        self.specs = {name: TensorSpec(name=name, dtype="F32", shape=one.shape) for name, one in self.held.items()}

    def bits(self, name: str) -> Bits:
        return self.held[name].reshape(-1).view(np.uint32)

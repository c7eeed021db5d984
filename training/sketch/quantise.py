"""Factors as integers times powers of two: `factor @ signs` then has the same bits in any order of summation, on any device.

A row of the factor is q * 2^e with integers q of 8 or 16 bits. Its product with signs of ±1 is a sum of integers whose size stays
below 2^24, where float32 holds every integer: no partial sum is ever rounded. What follows is one rounding each (docs/logra.md).
The trainer quantises before its own update and applies the same integers that it sends.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from groundhop.errors import InputError
from groundhop.training.sketch.expand import GREATEST_EXPONENT, LEAST_EXPONENT, SUM_LIMIT

SLICE_ELEMENTS = 1 << 24
"""Elements of a weight that are updated at a time: what bounds the temporary memory."""

_EXPONENT_BIAS, _MANTISSA_BITS = 127, 23


@dataclass(frozen=True, slots=True)
class Quantised:
    """A factor of an update: row i is `integers[i] * 2^exponents[i]`."""

    integers: Tensor
    """int8 or int16, (d, r)."""
    exponents: Tensor
    """int16, (d,)."""

    def factor(self) -> Tensor:
        """The factor that is applied and sent, float32 (d, r)."""
        return self.integers.float().mul_(_power(self.exponents).unsqueeze(1))


@dataclass(frozen=True, slots=True)
class SketchUpdate:
    """What a step did to one weight: W <- W * decay - factor @ signs(seed)."""

    name: str
    """The weight's name in the checkpoint."""
    rows: int
    columns: int
    """The weight's shape (d, k), of the whole weight where `quantised` has a shard's rows."""
    rank: int
    seed: int
    """Of the projection's signs (`logra/signs.py`)."""
    decay: float
    """A float32 number."""
    quantised: Quantised


def most_integer(bits: int, rank: int) -> int:
    """The largest integer of a factor: what fits the type, and what no sum of `rank` of them takes to 2^24."""
    return min((1 << (bits - 1)) - 1, (SUM_LIMIT - 1) // rank)


@torch.no_grad()
def quantise(factor: Tensor, bits: Literal[8, 16]) -> Quantised:
    """Round a factor (d, r) row by row to the finest power of two at which its largest entry fits; ties go to even.

    Every row is quantised by itself, so a shard's rows come out as the whole factor's do.
    Raises: InputError for numbers that are not finite or too large (about 2^107 at 8 bits, 2^115 at 16).
    """
    if factor.ndim != 2 or not factor.shape[1] or bits not in (8, 16):
        raise InputError(f"need a factor (rows, rank) and 8 or 16 bits, got {list(factor.shape)} and {bits}")
    wide = factor.float()
    greatest = wide.abs().amax(dim=1)
    most = most_integer(bits, factor.shape[1])
    _, exponents = torch.frexp(greatest)
    exponents = exponents.to(torch.int32) - most.bit_length()
    exponents += _rounds_past(greatest, exponents, most)
    if not bool(torch.isfinite(greatest).all()) or bool((exponents > GREATEST_EXPONENT).any()):
        raise InputError(f"need a finite factor whose rows fit {bits} bits, got one with {float(greatest.max()):g}")
    exponents = torch.where(greatest == 0, 0, exponents).clamp_(min=LEAST_EXPONENT)
    integers = (wide * _power(-exponents).unsqueeze(1)).round_()
    return Quantised(integers.to(torch.int8 if bits == 8 else torch.int16), exponents.to(torch.int16))


@torch.no_grad()
def apply_exact(weight: Tensor, quantised: Quantised, signs: Tensor, decay: float = 1.0) -> None:
    """W <- W * decay - (integers @ signs) * 2^exponents in place; `weight` is float32 (d, k), `signs` ±1 (r, k).

    `sketch/expand.py` gives the same bits. The product is exact, then each operation rounds once: decay (left out at 1),
    subtraction. They are kernels of their own, so that no compiler makes one rounding of two.
    Raises: InputError for other shapes or types, or integers whose sums could reach 2^24.
    """
    _check(weight, quantised, signs)
    wide_signs = signs.to(torch.float32)
    scales = _power(quantised.exponents).unsqueeze(1)
    step = max(1, SLICE_ELEMENTS // max(1, weight.shape[1]))
    with _exact_products(weight.device.type):
        for start in range(0, weight.shape[0], step):
            rows = slice(start, start + step)
            delta = (quantised.integers[rows].to(torch.float32) @ wide_signs).mul_(scales[rows])
            if decay != 1.0:
                weight[rows].mul_(decay)
            weight[rows].sub_(delta)


@contextmanager
def _exact_products(device: str) -> Iterator[None]:
    """Keep matrix products in float32: autocast, TF32 and bfloat16 would drop bits of 16-bit integers."""
    places = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # pyright: ignore[reportAttributeAccessIssue]
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "ieee"
        with torch.autocast(device, enabled=False):
            yield
    finally:
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision


def _rounds_past(greatest: Tensor, exponents: Tensor, most: int) -> Tensor:
    """1 where the largest entry of a row would be rounded above `most`."""
    safe = exponents.clamp(LEAST_EXPONENT, GREATEST_EXPONENT)
    return ((greatest * _power(-safe)).round() > most).to(torch.int32)


def _power(exponents: Tensor) -> Tensor:
    """2^e by its bits: `pow` and `ldexp` are not exact on every device."""
    return ((exponents.to(torch.int32) + _EXPONENT_BIAS) << _MANTISSA_BITS).view(torch.float32)


def _check(weight: Tensor, quantised: Quantised, signs: Tensor) -> None:
    rows, rank = quantised.integers.shape
    shapes = tuple(weight.shape), tuple(signs.shape), tuple(quantised.exponents.shape)
    if shapes != ((rows, signs.shape[-1]), (rank, weight.shape[-1]), (rows,)) or weight.dtype != torch.float32:
        raise InputError(
            f"need a float32 weight (d, k), signs (r, k) and exponents (d,) for integers {[rows, rank]}, "
            f"got {weight.dtype}, {' '.join(map(str, shapes))}"
        )
    size = quantised.integers.element_size()
    if rank << (8 * size - 1) < SUM_LIMIT or not rows:
        return
    sums = quantised.integers.to(torch.int32).abs().sum(dim=1)
    if int(sums.max()) >= SUM_LIMIT:
        raise InputError(f"need integers whose rows sum to less than 2^24, got {int(sums.max())}")

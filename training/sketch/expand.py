"""A sketch's step on an FP32 master in numpy: the same bits as `quantise.apply_exact`, where there is no torch.

W <- W * decay; W <- W - (integers @ signs) * 2^exponents; the checkpoint's bits are W rounded to nearest, ties to even
(docs/logra.md). The product is exact in float32 in any order, so it is left to numpy's own matrix product.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from groundhop.errors import InputError
from groundhop.training.hotload.bits import Bits
from groundhop.training.logra.signs import sign_matrix

SUM_LIMIT = 1 << 24
"""Integers below it are exact in float32."""
LEAST_EXPONENT, GREATEST_EXPONENT = -126, 100
"""Of a row's power of two: 2^e and 2^-e are normal numbers, and 2^24 * 2^e is finite."""
MASTER_TYPES = ("BF16", "F32")
"""Types of a checkpoint that follow from an FP32 master."""
DIGEST_BYTES = 16

_SLICE_ELEMENTS = 1 << 22
_QUIET_NAN = 0x7FC0

Master = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Step:
    """What one optimizer step did to one weight (d, k)."""

    seed: int
    decay: float
    """A float32 number."""
    integers: NDArray[Any]
    """int8 or int16, (d, r)."""
    exponents: NDArray[np.int16]
    """(d,)"""
    sign_digest: bytes
    """`digest_signs` of the projection, so that another generator is named as the cause."""

    @property
    def rank(self) -> int:
        """Columns of the factor."""
        return int(self.integers.shape[1])


def check_step(step: Step, shape: tuple[int, ...], where: str) -> None:
    """Check what the arithmetic rests on. Raises: InputError for another shape, exponents out of range, sums that reach 2^24."""
    rows, _ = shape
    if step.integers.shape[0] != rows or step.exponents.shape != (rows,):
        raise InputError(
            f"{where}: need {rows} rows, got {step.integers.shape[0]} and {step.exponents.shape[0]} exponents"
        )
    if not (np.isfinite(step.decay) and float(np.float32(step.decay)) == step.decay):
        raise InputError(f"{where}: need a float32 decay, got {step.decay}")
    if not rows:
        return
    low, high = int(step.exponents.min()), int(step.exponents.max())
    if low < LEAST_EXPONENT or high > GREATEST_EXPONENT:
        raise InputError(f"{where}: need exponents from {LEAST_EXPONENT} to {GREATEST_EXPONENT}, got {low} to {high}")
    greatest = int(np.abs(step.integers.astype(np.int32)).sum(axis=1, dtype=np.int64).max())
    if greatest >= SUM_LIMIT:
        raise InputError(f"{where}: need integers whose rows sum to less than 2^24, got {greatest}")


def expand(master: Master, step: Step, signs: NDArray[np.int8] | None = None) -> Master:
    """The master (d, k) after a step that `check_step` has passed; `master` itself stays as it is.

    `signs` are those of the step's seed, where the caller has drawn them.
    """
    if signs is None:
        signs = sign_matrix(step.seed, step.rank, master.shape[1])
    wide_signs, scales = signs.astype(np.float32), _power(step.exponents)[:, np.newaxis]
    rows = max(1, _SLICE_ELEMENTS // max(1, master.shape[1]))
    # Infinite and not-a-number weights go the same way here as at the trainer.
    with np.errstate(all="ignore"):
        after = master.copy() if step.decay == 1.0 else master * np.float32(step.decay)
        for start in range(0, master.shape[0], rows):
            part = slice(start, start + rows)
            delta = step.integers[part].astype(np.float32) @ wide_signs
            delta *= scales[part]
            after[part] -= delta
    return after


def digest_signs(signs: NDArray[Any]) -> bytes:
    """BLAKE2b of the signs' bits, row-major, 16 bytes."""
    return blake2b(np.packbits(signs.reshape(-1) > 0, bitorder="little").tobytes(), digest_size=DIGEST_BYTES).digest()


def rounded(master: Master, dtype: str) -> Bits:
    """The flat bits that a checkpoint of type `dtype` (of `MASTER_TYPES`) holds for a master."""
    wide: Bits = np.ascontiguousarray(master).reshape(-1).view(np.uint32)
    return bfloat16(wide) if dtype == "BF16" else wide


def bfloat16(wide: Bits) -> Bits:
    """Bits of float32 rounded to bfloat16, to nearest, ties to even.

    Every NaN becomes 0x7FC0: what torch makes of one differs between its own kernels, so digests catch it.
    """
    half: Bits = ((wide + (0x7FFF + ((wide >> 16) & 1))) >> 16).astype(np.uint16)
    half[(wide & 0x7FFFFFFF) > 0x7F800000] = _QUIET_NAN
    return half


def widened(bits: Bits, dtype: str, shape: tuple[int, ...]) -> Master:
    """A copy of a checkpoint's tensor as an FP32 master. Raises: InputError for a type that is not of `MASTER_TYPES`."""
    if dtype not in MASTER_TYPES:
        raise InputError(f"need a tensor of {' or '.join(MASTER_TYPES)} for an FP32 master, got {dtype}")
    wide = bits.astype(np.uint32) << 16 if dtype == "BF16" else bits.astype(np.uint32)
    master: Master = wide.view(np.float32).reshape(shape)
    return master


def _power(exponents: NDArray[np.int16]) -> NDArray[np.float32]:
    """2^e by its bits."""
    return ((exponents.astype(np.int32) + 127) << 23).view(np.float32)

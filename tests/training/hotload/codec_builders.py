"""Small tensors and deltas for the tests of the codec."""

from collections.abc import Mapping

import numpy as np

from groundhop.training.hotload.bits import Bits, TensorSpec
from groundhop.training.hotload.delta import Delta, Encoding, dump_delta, encode_tensor, read_delta

ENCODINGS: tuple[Encoding, ...] = ("auto", "context", "xor", "add", "overwrite", "dense")


class Held:
    """Weights in memory; the type of each tensor follows from its bits unless it is named."""

    def __init__(self, held: dict[str, Bits], dtypes: Mapping[str, str] | None = None) -> None:
        self.held = held
        self.specs = {name: spec(name, bits, (dtypes or {}).get(name)) for name, bits in held.items()}

    def bits(self, name: str) -> Bits:
        return self.held[name]


def spec(name: str, bits: Bits, dtype: str | None = None) -> TensorSpec:
    dtype = dtype or {1: "U8", 2: "BF16", 4: "F32"}[bits.itemsize]
    return TensorSpec(name=name, dtype=dtype, shape=(bits.size,))


def noise(unit: object, size: int, seed: int = 0) -> Bits:
    """Bits at random: NaN, infinities, subnormals and all."""
    raw = np.random.default_rng(seed).integers(0, 256, size * np.dtype(unit).itemsize, dtype=np.uint8)  # type: ignore[call-overload]
    return raw.view(unit)  # type: ignore[no-any-return, call-overload]


def scrambled(old: Bits, share: float, seed: int = 1) -> Bits:
    """A copy in which about `share` of the elements are others at random."""
    random, new = np.random.default_rng(seed), old.copy()
    chosen = random.random(old.size) < share
    new[chosen] = noise(old.dtype, int(chosen.sum()), seed + 1)
    return new


def bfloat16(values: np.ndarray) -> Bits:
    """FP32 rounded to nearest, ties to even."""
    wide = values.astype(np.float32).view(np.uint32)
    return ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)


def adam_like(size: int, rate: float, seed: int = 3) -> tuple[Bits, Bits]:
    """A BF16 tensor before and after an optimiser step on its FP32 master."""
    random = np.random.default_rng(seed)
    master = random.standard_normal(size).astype(np.float32) * np.float32(0.02)
    update = np.float32(rate) * np.clip(0.7 * random.standard_normal(size), -3, 3).astype(np.float32)
    return bfloat16(master), bfloat16(master - update)


def uniform(size: int, share: float, seed: int = 4) -> tuple[Bits, Bits]:
    """A BF16 tensor before and after `share` of it, spread evenly, moved by 1 to 3 steps up or down."""
    random = np.random.default_rng(seed)
    old = bfloat16(random.standard_normal(size) * 0.02)
    new = old.copy()
    chosen = random.choice(size, int(size * share), replace=False)
    new[chosen] += (random.integers(1, 4, chosen.size) * random.choice([-1, 1], chosen.size)).astype(np.uint16)
    return old, new


def dumped(old: Bits, new: Bits, encoding: Encoding = "auto", dtype: str | None = None) -> bytes:
    """One tensor named `w` as a delta file."""
    coded = encode_tensor(spec("w", old, dtype), old, new, encoding=encoding, threads=1)
    return dump_delta([coded] if coded else [], version=7, base_digest="", digest="")


def step(old: Bits, new: Bits, encoding: Encoding = "auto", dtype: str | None = None) -> Delta:
    """The same, read back."""
    return read_delta(dumped(old, new, encoding, dtype))

"""Random ±1 projections from a counter-based generator, the same bits on every device and in every library version.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3), written with 64-bit integer
operations that numpy arrays and torch tensors share. Sign (i, j) of a projection is one bit of the block whose counter is its place, so
any part of a projection can be drawn alone.
"""

from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_BITS_PER_BLOCK = 128


def philox(counters: Any, key: int) -> tuple[Any, Any, Any, Any]:
    """Four 32-bit words for each 64-bit block number of an int64 array; the words are int64 too, in [0, 2^32).

    `counters` is a numpy array or a torch tensor on any device, all values at least 0; `key` has 64 bits. The upper half of Philox's
    128-bit counter is 0.
    """
    words = [counters & _LOW, (counters >> 32) & _LOW, counters & 0, counters & 0]
    keys = [key & _LOW, (key >> 32) & _LOW]
    for _ in range(_ROUNDS):
        high_0, low_0 = _multiply(words[0], _MULTIPLIERS[0])
        high_1, low_1 = _multiply(words[2], _MULTIPLIERS[1])
        words = [high_1 ^ words[1] ^ keys[0], low_1, high_0 ^ words[3] ^ keys[1], low_0]
        keys = [(part + bump) & _LOW for part, bump in zip(keys, _WEYL, strict=True)]
    return words[0], words[1], words[2], words[3]


def projection_seed(base: int, update: int, name: str) -> int:
    """The 62-bit seed of one weight's projection at one update (the rule of NeMo RL's LoGRA, docs/logra.md).

    `name` is the weight's name in the checkpoint, without the wrappers that FSDP, compile and checkpointing put around modules.
    """
    hashed = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
    return (base * 1_000_003 + update * 7_919 + hashed) & (2**62 - 1)


def sign_matrix(seed: int, rank: int, columns: int) -> NDArray[np.int8]:
    """The projection's signs, int8 of shape (rank, columns), +1 or -1 with equal chance.

    Element (i, j) is bit `n % 32` of word `n % 128 // 32` of Philox block `n // 128`, where n = i * columns + j; a set bit is +1.
    """
    blocks = np.arange(-(-rank * columns // _BITS_PER_BLOCK), dtype=np.int64)
    words = np.stack(philox(blocks, seed), axis=1).astype("<u4")
    bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=rank * columns)
    return (bits.astype(np.int8) * 2 - 1).reshape(rank, columns)


def sign_tensor(seed: int, rank: int, columns: int, device: Any) -> Any:
    """`sign_matrix` as a float32 torch tensor, drawn on `device`."""
    import torch

    blocks = torch.arange(-(-rank * columns // _BITS_PER_BLOCK), dtype=torch.int64, device=device)
    words = torch.stack(philox(blocks, seed), dim=1)
    shifts = torch.arange(32, dtype=torch.int64, device=device)
    bits = (words.unsqueeze(-1) >> shifts) & 1
    signs = bits.flatten()[: rank * columns].to(torch.float32)
    return signs.mul_(2).sub_(1).view(rank, columns)


def _multiply(values: Any, by: int) -> tuple[Any, Any]:
    # The product of two 32-bit numbers can pass 2^63: by halves, nothing ever overflows a signed 64-bit integer.
    low = values * (by & 0xFFFF)
    high = values * (by >> 16) + (low >> 16)
    return (high >> 16) & _LOW, ((high & 0xFFFF) << 16) | (low & 0xFFFF)

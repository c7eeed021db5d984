"""Draw the projections of all targets for an update: on a GPU with one Philox for all, whose many small steps would else be launched for each."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from groundhop.training.logra.signs import philox, sign_matrix

_BITS_PER_BLOCK, _BITS_PER_WORD = 128, 32


def draw_signs(seeds: Sequence[int], rank: int, columns: Sequence[int], device: torch.device) -> list[Tensor]:
    """`signs.sign_matrix` of each seed and number of columns, int8 (rank, columns) on `device`."""
    if device.type == "cpu":
        pairs = zip(seeds, columns, strict=True)
        return [torch.from_numpy(sign_matrix(seed, rank, width)) for seed, width in pairs]
    return draw_together(seeds, rank, columns, device)


def draw_together(seeds: Sequence[int], rank: int, columns: Sequence[int], device: torch.device) -> list[Tensor]:
    """The same with torch's integer operations, all blocks at once."""
    blocks = [-(-rank * width // _BITS_PER_BLOCK) for width in columns]
    counters = torch.cat([torch.arange(count, dtype=torch.int64, device=device) for count in blocks])
    keys = torch.repeat_interleave(torch.tensor(seeds, dtype=torch.int64), torch.tensor(blocks)).to(device)
    words = torch.stack(philox(counters, cast(Any, keys)), dim=1)
    shifts = torch.arange(_BITS_PER_WORD, dtype=torch.int64, device=device)
    drawn = []
    for part, width in zip(words.split(blocks), columns, strict=True):
        bits = ((part.unsqueeze(-1) >> shifts) & 1).flatten()[: rank * width]
        drawn.append(bits.to(torch.int8).mul_(2).sub_(1).view(rank, width))
    return drawn

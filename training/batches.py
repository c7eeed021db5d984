"""The order in which SFT reads its rows: fixed by the seed alone, rows of like length side by side."""

import random
from collections.abc import Sequence

POOL = 8
"""Batches that are sorted by length together: enough to save padding, few enough to keep the order random."""


def order(lengths: Sequence[int], *, epochs: float, batch: int, seed: int) -> list[int]:
    """Indices of all rows an SFT run reads, in order; each next `batch` of them are one optimizer step.

    Every row comes once an epoch; a fractional last epoch takes the first rows of its shuffle. Inside a pool of
    `POOL` batches rows are sorted, longest first, so that micro-batches hold like lengths; batches are then shuffled.
    Rows that fill no batch at an epoch's end open the next epoch; only the very last batch can be short.
    """
    shuffler = random.Random(seed)
    wanted = max(1, round(len(lengths) * epochs))
    reads: list[int] = []
    waiting: list[int] = []
    while len(reads) + len(waiting) < wanted:
        epoch = list(range(len(lengths)))
        shuffler.shuffle(epoch)
        rows = waiting + epoch[: wanted - len(reads) - len(waiting)]
        full = len(rows) - len(rows) % batch
        for start in range(0, full, batch * POOL):
            reads += _grouped(rows[start : min(start + batch * POOL, full)], lengths, batch, shuffler)
        waiting = rows[full:]
    return reads + waiting


def _grouped(rows: list[int], lengths: Sequence[int], batch: int, shuffler: random.Random) -> list[int]:
    by_length = sorted(rows, key=lambda row: -lengths[row])
    batches = [by_length[start : start + batch] for start in range(0, len(rows), batch)]
    shuffler.shuffle(batches)
    return [row for rows in batches for row in rows]

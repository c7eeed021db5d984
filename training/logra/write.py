"""Write a step W <- W * decay - alpha * U signs into the weights, in floating point or in integers that a receiver can repeat."""

from collections.abc import Mapping
from typing import Literal

import torch

from groundhop.training.logra.capture import Sketches
from groundhop.training.logra.ranks import Rows, here, rows_of
from groundhop.training.sketch.quantise import Quantised, SketchUpdate, apply_exact, quantise


def code(sketches: Sketches, alpha: float, decay: float, bits: Literal[8, 16]) -> dict[str, SketchUpdate]:
    """All updates as integers, by the weight's name; the sketches hold the factors U.

    Raises: InputError for a factor that does not fit.
    """
    return {
        target.name: SketchUpdate(
            name=target.name,
            rows=target.rows,
            columns=target.columns,
            rank=sketches.rank,
            seed=sketches.seeds[target.name],
            decay=decay,
            quantised=quantise(target.sketch if alpha == 1.0 else target.sketch * alpha, bits),
        )
        for target in sketches.targets
    }


def write(sketches: Sketches, alpha: float, decay: float, updates: Mapping[str, SketchUpdate]) -> None:
    """Move the rows of each weight that are here, by its integers where `updates` has them."""
    for target in sketches.targets:
        rows, weight = rows_of(target.weight), here(target.weight)
        signs = target.signs.to(weight.device)
        update = updates.get(target.name)
        if update is None:
            factor = target.sketch[rows.start : rows.stop].to(weight.device)
            weight.addmm_(factor, signs.float(), beta=decay, alpha=-alpha)
        else:
            apply_exact(weight, _cut(update.quantised, rows, weight.device), signs, update.decay)


def _cut(quantised: Quantised, rows: Rows, device: torch.device) -> Quantised:
    part = slice(rows.start, rows.stop)
    return Quantised(quantised.integers[part].to(device), quantised.exponents[part].to(device))

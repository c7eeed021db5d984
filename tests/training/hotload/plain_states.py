"""Small states that a trainer without torch could have: numpy's types only."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import small_states
from small_states import Held

from groundhop.training.hotload.bits import TensorSpec

KINDS = {"F16": np.float16, "F32": np.float32, "U8": np.uint8}


def state() -> Held:
    """As `small_states.state`, with F16 where that has BF16."""
    made = small_states.state()
    specs = {
        name: TensorSpec(name=name, dtype={"BF16": "F16"}.get(spec.dtype, spec.dtype), shape=spec.shape)
        for name, spec in made.specs.items()
    }
    return Held(specs, made.held)


def arrays_of(weights: Held) -> Iterator[tuple[str, Any]]:
    """Each tensor by name, bit for bit."""
    for name, spec in weights.specs.items():
        yield name, weights.bits(name).view(KINDS[spec.dtype]).reshape(spec.shape)

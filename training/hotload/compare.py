"""Where two arrays of bits differ."""

import numpy as np
from numpy.typing import NDArray

from groundhop.training.hotload.bits import Bits
from groundhop.training.hotload.kernels import in_parallel, spans

CHUNK_ELEMENTS = 1 << 20
"""Elements that are compared at a time: what both sides of it take fits a core's cache."""


def differences(old: Bits, new: Bits) -> NDArray[np.int64]:
    """Positions whose bits differ, increasing. Bits, so that -0.0 differs from 0.0 and a NaN equals itself."""

    def one(span: tuple[int, int]) -> NDArray[np.int64]:
        start, stop = span
        return np.flatnonzero(old[start:stop] != new[start:stop]) + start

    found = in_parallel(one, spans(old.size, CHUNK_ELEMENTS))
    return np.concatenate(found) if found else np.empty(0, np.int64)

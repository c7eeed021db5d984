"""Where the baseline's bits and a trainer's new ones differ."""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from groundhop.training.hotload.bits import Bits
from groundhop.training.hotload.fingerprint import Fingerprint
from groundhop.training.hotload.kernels import in_parallel, spans

CHUNK_ELEMENTS = 1 << 20
"""Elements that are compared at a time: what both sides of it take fits a core's cache."""


class Differences(NamedTuple):
    """Elements whose bits differ, increasing, and their new bits."""

    positions: NDArray[np.int64]
    values: Bits


class Elsewhere(Protocol):
    """New bits that do not lie in host memory (`torch_baseline.py`)."""

    def all(self) -> Bits:
        """Every one of them."""
        ...

    def compare(self, old: Bits, before: Fingerprint) -> Differences:
        """Where they differ from `old`, whose print is `before`."""
        ...


New = Bits | Elsewhere
"""The bits that a tensor becomes."""


def compare(old: Bits, new: New, before: Fingerprint) -> Differences:
    """Where a tensor's new bits differ from `old`, whose print is `before`."""
    if not isinstance(new, np.ndarray):
        return new.compare(old, before)
    positions = differences(old, new)
    return Differences(positions, new[positions])


def differences(old: Bits, new: Bits) -> NDArray[np.int64]:
    """Positions whose bits differ, increasing. Bits, so that -0.0 differs from 0.0 and a NaN equals itself."""

    def one(span: tuple[int, int]) -> NDArray[np.int64]:
        start, stop = span
        return np.flatnonzero(old[start:stop] != new[start:stop]) + start

    found = in_parallel(one, spans(old.size, CHUNK_ELEMENTS))
    return np.concatenate(found) if found else np.empty(0, np.int64)

"""One step's changes: every tensor compared with the baseline, what differs coded and on its way."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from groundhop.training.hotload.baseline import Baseline
from groundhop.training.hotload.bits import Bits, TensorSpec
from groundhop.training.hotload.compare import differences
from groundhop.training.hotload.fingerprint import Fingerprint, fingerprint_at, state_digest
from groundhop.training.hotload.named import Named, matched
from groundhop.training.hotload.parts import PartWriter
from groundhop.training.hotload.touched import End, Touched, TouchedWriter

Together = Mapping[str, NDArray[np.int64]]
"""Positions by tensor, increasing."""

NOTHING: NDArray[np.int64] = np.empty(0, np.int64)


def encode_step(
    named: Named, baseline: Baseline, overwrite: Together | None, journal: TouchedWriter, parts: PartWriter
) -> End:
    """Code `named` against `baseline` into `parts`, each row in `journal` before its part leaves.

    `overwrite`: None for a differential step; else what unfinished attempts may have written, which is sent with what
    differs. Raises: InputError for other tensors than the baseline's.
    """
    prints = dict(baseline.prints)
    changed = 0
    for spec, bits in matched(named, baseline):
        old = baseline.bits(spec.name)
        positions = differences(old, bits)
        changed += positions.size
        before = prints[spec.name]
        after = before + fingerprint_at(positions, bits[positions]) - fingerprint_at(positions, old[positions])
        also = None if overwrite is None else overwrite.get(spec.name, NOTHING)
        sent = positions if also is None else np.union1d(positions, also)
        if sent.size:
            prints[spec.name] = after
            journal.append(_row(spec, sent, bits, after))
            parts.add(spec, old, bits, positions, also, (before, after))
    parts.finish()
    total = sum(spec.size for spec in baseline.specs.values())
    return End(digest=state_digest(baseline.specs, prints), changed=changed, total=total, bytes=parts.bytes)


def _row(spec: TensorSpec, positions: NDArray[np.int64], bits: Bits, after: Fingerprint) -> Touched:
    whole = positions.size == spec.size
    return Touched(spec.name, spec.size, None if whole else positions, bits if whole else bits[positions], after)

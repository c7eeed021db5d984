"""One step's changes: every tensor compared with the baseline, what differs coded and on its way."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from groundhop.training.hotload.baseline import Baseline
from groundhop.training.hotload.bits import Bits
from groundhop.training.hotload.compare import compare
from groundhop.training.hotload.fingerprint import fingerprint_change, state_digest
from groundhop.training.hotload.named import Named, Take, cast, matched
from groundhop.training.hotload.parts import PartWriter, Sent
from groundhop.training.hotload.touched import End, Touched, TouchedWriter

Together = Mapping[str, NDArray[np.int64]]
"""Positions by tensor, increasing."""

NOTHING: NDArray[np.int64] = np.empty(0, np.int64)


def encode_step(
    named: Named,
    baseline: Baseline,
    overwrite: Together | None,
    journal: TouchedWriter,
    parts: PartWriter,
    take: Take = cast,
) -> End:
    """Code `named` against `baseline` into `parts`, each row in `journal` before its part leaves.

    `overwrite`: None for a differential step; else what unfinished attempts may have written, which is sent with what
    differs. `take`: how the trainer's tensors become bits. Raises: InputError for other tensors than the baseline's.
    """
    prints = dict(baseline.prints)
    changed = 0
    for spec, new in matched(named, baseline, take):
        old, before = baseline.bits(spec.name), prints[spec.name]
        differ = compare(old, new, before)
        changed += differ.positions.size
        after = before + fingerprint_change(differ.positions, old[differ.positions], differ.values)
        sent = Sent(*differ)
        if overwrite is not None:
            sent = _with_also(sent, old, overwrite.get(spec.name, NOTHING))
        if sent.positions.size:
            prints[spec.name] = after
            whole = sent.positions.size == spec.size
            journal.append(Touched(spec.name, spec.size, None if whole else sent.positions, sent.values, after))
            parts.add(spec, old, sent, (before, after))
    parts.finish()
    total = sum(spec.size for spec in baseline.specs.values())
    return End(digest=state_digest(baseline.specs, prints), changed=changed, total=total, bytes=parts.bytes)


def _with_also(sent: Sent, old: Bits, also: NDArray[np.int64]) -> Sent:
    """Together with elements that are sent whatever they hold."""
    positions = np.union1d(sent.positions, also)
    values = old[positions]
    values[np.searchsorted(positions, sent.positions)] = sent.values
    return Sent(positions, values, overwrite=True)

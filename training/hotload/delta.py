"""Deltas: a step from one state to the next, coded, written, read and applied. The names that others use, in one place.

    delta = encode_tensor(spec, old, new)                        # a tensor; None when it did not change
    write_delta(path, [delta], version=7, base_digest=..., digest=...)
    apply_delta(read_delta(path), weights)

The format is described in docs/hotload.md; `fold.py` makes one delta of several.
"""

from groundhop.training.hotload.changes import Change, Encoding, Operation
from groundhop.training.hotload.delta_file import dump_delta, read_delta, summarise, write_delta
from groundhop.training.hotload.patch import apply_delta, print_of, prints_of
from groundhop.training.hotload.tensor_delta import (
    Delta,
    DeltaSummary,
    Entry,
    Old,
    TensorDelta,
    encode_moved,
    encode_tensor,
)

__all__ = [
    "Change",
    "Delta",
    "DeltaSummary",
    "Encoding",
    "Entry",
    "Old",
    "Operation",
    "TensorDelta",
    "apply_delta",
    "dump_delta",
    "encode_moved",
    "encode_tensor",
    "print_of",
    "prints_of",
    "read_delta",
    "summarise",
    "write_delta",
]

"""A checkpoint as it is after a delta: a state whose tensors are made one at a time, when they are asked for.

Nothing on disk is changed. A tied output head may be stored on one side and left out on the other (`tie_word_embeddings`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from groundhop.errors import ChecksumError, InputError
from groundhop.training.hotload.bits import Bits, TensorSpec, Weights
from groundhop.training.hotload.checkpoint import Checkpoint
from groundhop.training.hotload.delta import Delta, Entry, apply_delta
from groundhop.training.hotload.fingerprint import Fingerprint, state_digest
from groundhop.training.hotload.named import EMBEDDING, TIED_HEAD


@dataclass(frozen=True, slots=True)
class One:
    """A state of one tensor."""

    spec: TensorSpec
    held: Bits

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The one tensor."""
        return {self.spec.name: self.spec}

    def bits(self, name: str) -> Bits:
        """Its bits."""
        assert name == self.spec.name
        return self.held


class Moved:
    """The `Weights` that `delta` makes of `base`. A base that is there already, in whole or in part, moves the rest of the way.

    Raises: ChecksumError where the result would not be the state that the delta promises; InputError where its tensors
    are not those of `base`. Both before any tensor is made.
    """

    def __init__(self, base: Checkpoint, delta: Delta) -> None:
        self.specs = base.specs
        self._base = base
        self._delta = delta
        self._entries = _entries_for(base, delta)
        self.moved = sum(entry.fingerprint != base.prints[name] for name, entry in self._entries.items())
        """Tensors that differ from the base's."""

    def bits(self, name: str) -> Bits:
        """The bits of a tensor, checked. Raises: ChecksumError, InputError as `apply_delta`."""
        entry, bits = self._entries.get(name), self._base.bits(name)
        if entry is None:
            return bits
        one = One(self.specs[name], bits.copy())
        apply_delta(replace(self._delta, base_digest="", digest="", entries=(entry,)), one)
        return one.held


@dataclass(frozen=True, slots=True)
class WithHead:
    """A state with a tied output head that is stored once, seen as if it were stored twice."""

    weights: Weights

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """All tensors and the head."""
        embedding = self.weights.specs[EMBEDDING]
        head = TensorSpec(name=TIED_HEAD, dtype=embedding.dtype, shape=embedding.shape)
        return {**self.weights.specs, TIED_HEAD: head}

    def bits(self, name: str) -> Bits:
        """The bits of a tensor; the head's are the embedding's."""
        return self.weights.bits(EMBEDDING if name == TIED_HEAD else name)


@dataclass(frozen=True, slots=True)
class WithoutHead:
    """A state with a tied output head that is stored twice, seen as if it were stored once."""

    weights: Weights

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """All tensors but the head."""
        return {name: spec for name, spec in self.weights.specs.items() if name != TIED_HEAD}

    def bits(self, name: str) -> Bits:
        """The bits of a tensor."""
        return self.weights.bits(name)


def tied(weights: Weights) -> bool:
    """Whether a state holds an output head and an embedding of the same bits."""
    head, embedding = weights.specs.get(TIED_HEAD), weights.specs.get(EMBEDDING)
    if head is None or embedding is None or (head.dtype, head.shape) != (embedding.dtype, embedding.shape):
        return False
    return bool(np.array_equal(weights.bits(TIED_HEAD), weights.bits(EMBEDDING)))


def _entries_for(base: Checkpoint, delta: Delta) -> Mapping[str, Entry]:
    entries = {entry.name: entry for entry in delta.entries}
    for seen, prints in _ways_to_see(base):
        if entries.keys() <= seen.specs.keys() and all(_fits(entry, prints[name]) for name, entry in entries.items()):
            known = prints | {name: entry.fingerprint for name, entry in entries.items()}
            if not delta.digest or state_digest(seen.specs, known) == delta.digest:
                return _as_stored(entries, base, seen)
    for name, entry in entries.items():
        if base.specs.get(name) != entry.spec:
            raise InputError(f"the delta changes {name!r}, which {base.path} does not hold in that type and shape")
    raise ChecksumError(
        f"version {delta.version} builds on the state {delta.base_digest[:12]}, {base.path} holds {base.digest[:12]}"
    )


def _fits(entry: Entry, present: Fingerprint) -> bool:
    return entry.base_fingerprint is None or present in (entry.base_fingerprint, entry.fingerprint)


def _ways_to_see(base: Checkpoint) -> Iterator[tuple[Weights, dict[str, Fingerprint]]]:
    prints = dict(base.prints)
    yield base, prints
    if EMBEDDING in prints and TIED_HEAD not in prints:
        yield WithHead(base), {**prints, TIED_HEAD: prints[EMBEDDING]}
    elif tied(base):
        yield WithoutHead(base), {name: value for name, value in prints.items() if name != TIED_HEAD}


def _as_stored(entries: dict[str, Entry], base: Checkpoint, seen: Weights) -> Mapping[str, Entry]:
    """What of a delta is done to which stored tensor: a head that one side leaves out goes where the embedding goes."""
    embedding, head = entries.get(EMBEDDING), entries.get(TIED_HEAD)
    if isinstance(seen, WithHead) and head is not None:
        if embedding is None or embedding.fingerprint != head.fingerprint:
            raise InputError(f"the delta unties {TIED_HEAD!r}, which {base.path} does not store")
        return {name: entry for name, entry in entries.items() if name != TIED_HEAD}
    if isinstance(seen, WithoutHead) and embedding is not None:
        return {**entries, TIED_HEAD: replace(embedding, name=TIED_HEAD)}
    return entries

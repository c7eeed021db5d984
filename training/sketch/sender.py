"""The trainer's side of sketch sync: for each weight the smaller of its sketch and its delta.

A weight that goes as a delta leaves the site's FP32 master behind. Its steps are kept: once they are smaller than a delta, or a
resync is due, they bring the master up again; where they grow past the master itself, only the master does.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from groundhop.errors import InputError
from groundhop.training.hotload.bits import Bits, TensorSpec, Weights
from groundhop.training.hotload.delta import TensorDelta, dump_delta, encode_tensor
from groundhop.training.hotload.fingerprint import Fingerprint, fingerprint, state_digest
from groundhop.training.hotload.named import Named, cast, matched
from groundhop.training.logra.signs import sign_tensor
from groundhop.training.sketch.expand import Step, digest_signs
from groundhop.training.sketch.masters import master_specs
from groundhop.training.sketch.quantise import SketchUpdate
from groundhop.training.sketch.record import Head, Sketch, SketchRow, StepRow, dump_record, encode_step

State = Literal["MASTER_VALID", "MASTER_STALE"]


@dataclass(frozen=True, slots=True)
class Sent:
    """One sync, and what it would have been as a delta alone."""

    content: bytes
    version: int
    delta_bytes: int
    """Size of an ordinary delta file that leads to the same state."""
    sketched: tuple[str, ...]
    """Weights that went as sketches."""
    resynced: tuple[str, ...]
    """Weights whose masters went whole."""


@dataclass(slots=True)
class _Lane:
    """What is known of one target's master at the site."""

    since: int | None
    """The version that the master is exact at, before `steps`; None where it must be sent whole."""
    steps: list[tuple[StepRow, bytes]] = field(default_factory=list)
    behind: bool = False
    """Whether a delta went instead of `steps`."""

    @property
    def nbytes(self) -> int:
        return sum(len(body) for _, body in self.steps)


@dataclass(slots=True)
class _Made:
    """A record in the making."""

    sketches: list[Sketch] = field(default_factory=list)
    deltas: list[TensorDelta] = field(default_factory=list)
    masters: list[TensorDelta] = field(default_factory=list)
    alone: list[TensorDelta] = field(default_factory=list)
    """The deltas of all weights."""
    instead: dict[str, TensorDelta | None] = field(default_factory=dict)
    """What a delta says of the weights that go otherwise."""

    def put(self, delta: TensorDelta | None, chosen: Sketch | TensorDelta | None, name: str) -> None:
        """Take one weight's delta and what is sent in fact."""
        if delta is not None:
            self.alone.append(delta)
        if chosen is not delta:
            self.instead[name] = delta
        if isinstance(chosen, Sketch):
            self.sketches.append(chosen)
        elif chosen is not None:
            (self.deltas if chosen is delta else self.masters).append(chosen)


class Sender:
    """Makes records, one after the other; each must reach the site before the next one is of use to it."""

    def __init__(
        self, named: Named, base: Weights, targets: Collection[str], *, version: int = 0, resync_every: int = 0
    ) -> None:
        """Begin at the trainer's present weights `named`, which the site begins from too.

        `base`: the policy's checkpoint, for its names and types. `targets`: the weights that the optimizer updates by sketches,
        of two axes. `resync_every`: each so many versions, masters that are behind are brought up, though that takes more bytes
        than a delta; 0 leaves it to `resync`.
        Raises: InputError for tensors that are not those of `base`, and for targets that no master can be of.
        """
        tensors = dict(named)
        self._base, self._every = base, resync_every
        self._bits: dict[str, Bits] = {spec.name: bits.copy() for spec, bits in _canonical(tensors, base)}
        self._prints = {name: fingerprint(bits) for name, bits in self._bits.items()}
        self._targets = master_specs(base.specs, targets)
        if missing := sorted(self._targets.keys() - tensors.keys()):
            raise InputError(f"the trainer did not give the target {missing[0]}")
        masters = {name: fingerprint(cast(tensors[name], spec)) for name, spec in self._targets.items()}
        self.chain = state_digest(self._targets, masters)
        self.version = version
        self._lanes = {name: _Lane(version) for name in self._targets}
        self._due: set[str] = set()
        self._fallback: dict[str, TensorDelta | None] = {}

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The checkpoint's tensors."""
        return self._base.specs

    def bits(self, name: str) -> Bits:
        """What the site's checkpoint holds of a tensor after the last record; not to be written to."""
        return self._bits[name]

    @property
    def states(self) -> Mapping[str, State]:
        """Of each target's master at the site."""
        return {
            name: "MASTER_STALE" if lane.since is None or lane.behind else "MASTER_VALID"
            for name, lane in self._lanes.items()
        }

    def add(self, updates: Mapping[str, SketchUpdate]) -> None:
        """Take what an optimizer step did; call it after each one, before the next. Raises: InputError for other weights."""
        for name, update in updates.items():
            lane, spec = self._lanes.get(name), self._targets.get(name)
            if lane is None or spec is None or spec.shape != (update.rows, update.columns):
                raise InputError(f"{name} [{update.rows}, {update.columns}] is not a target of this sender")
            if lane.since is not None:
                step = step_of(update)
                if step.integers.any() or step.decay != 1.0:
                    lane.steps.append(encode_step(step))

    def resync(self, names: Iterable[str] | None = None) -> None:
        """Bring masters up with the next record, by their steps or whole: those named, or all that are behind."""
        stale = {name for name, state in self.states.items() if state == "MASTER_STALE"}
        self._due |= stale if names is None else set(names) & self._lanes.keys()

    def send(self, named: Named) -> Sent:
        """Make the record from the version before to the trainer's weights in `named`. Raises: InputError for other tensors."""
        tensors, version = dict(named), self.version + 1
        # All of them first: what does not fit must not leave half a version behind.
        given = list(_canonical(tensors, self._base))
        if self._every and version % self._every == 0:
            self.resync()
        base_digest = state_digest(self.specs, self._prints)
        made = _Made()
        for spec, bits in given:
            delta = encode_tensor(spec, self._bits[spec.name], bits, prints=(self._prints[spec.name], None))
            made.put(delta, self._choose(spec, delta, tensors.get(spec.name), version), spec.name)
            if delta:
                self._bits[spec.name], self._prints[spec.name] = bits.copy(), delta.fingerprint
        digest = state_digest(self.specs, self._prints)
        head = Head(base=self.version, version=version, base_digest=base_digest, digest=digest, chain=self.chain)
        self.version, self._fallback, self._due = version, made.instead, set()
        return Sent(
            content=dump_record(head, made.sketches, made.deltas, made.masters),
            version=version,
            delta_bytes=len(dump_delta(made.alone, version=version, base_digest=base_digest, digest=digest)),
            sketched=tuple(sketch.row.name for sketch in made.sketches),
            resynced=tuple(delta.spec.name for delta in made.masters),
        )

    def delta(self, names: Collection[str]) -> bytes:
        """The delta of weights that the last record sketched, for a site where the sketch gave other bits.

        Their masters are sent whole before they are sketched again. Raises: InputError for other names.
        """
        if odd := sorted(set(names) - self._fallback.keys()):
            raise InputError(f"version {self.version} did not sketch {odd[0]}")
        made = []
        for name in names:
            self._lanes[name] = _Lane(None)
            made.append(self._fallback[name] or encode_tensor(self._base.specs[name], None, self._bits[name]))
        return dump_delta([one for one in made if one], version=self.version, base_digest="", digest="")

    def _choose(
        self, spec: TensorSpec, delta: TensorDelta | None, tensor: Any, version: int
    ) -> Sketch | TensorDelta | None:
        """What is sent of one weight: its steps, its delta, or its master as a dense F32 delta."""
        lane = self._lanes.get(spec.name)
        if lane is None:
            return delta
        sketch = _sketch(spec, lane, delta.fingerprint if delta else self._prints[spec.name])
        if sketch and sketch.nbytes <= (delta.nbytes if delta else 0):
            self._lanes[spec.name] = _Lane(version)
            return sketch
        if spec.name in self._due:
            self._lanes[spec.name] = _Lane(version)
            whole = encode_tensor(self._targets[spec.name], None, cast(tensor, self._targets[spec.name]))
            return sketch if sketch and whole and sketch.nbytes <= whole.nbytes else whole
        if (delta and not lane.steps) or lane.nbytes > 4 * spec.size:
            # It moved in a way that no step tells, or its steps are longer than the master.
            self._lanes[spec.name] = _Lane(None)
        else:
            lane.behind = bool(lane.steps)
        return delta


def _canonical(tensors: Mapping[str, Any], base: Weights) -> Iterator[tuple[TensorSpec, Bits]]:
    for spec, bits in matched(tensors.items(), base):
        assert isinstance(bits, np.ndarray)
        yield spec, bits


def step_of(update: SketchUpdate) -> Step:
    """An update as numpy holds it; a sharded one is gathered. The signs are drawn where the update was applied."""
    integers, exponents = (_gathered(tensor) for tensor in (update.quantised.integers, update.quantised.exponents))
    signs = sign_tensor(update.seed, update.rank, update.columns, integers.device)
    return Step(
        seed=update.seed,
        decay=update.decay,
        integers=integers.cpu().numpy(),
        exponents=exponents.cpu().numpy(),
        sign_digest=digest_signs((signs > 0).cpu().numpy()),
    )


def _gathered(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()


def _sketch(spec: TensorSpec, lane: _Lane, after: Fingerprint) -> Sketch | None:
    if lane.since is None or not lane.steps:
        return None
    rows, columns = spec.shape
    row = SketchRow(
        name=spec.name,
        rows=rows,
        columns=columns,
        since=lane.since,
        fingerprint=after.to_bytes(),
        steps=tuple(row for row, _ in lane.steps),
    )
    return Sketch(row, tuple(body for _, body in lane.steps))

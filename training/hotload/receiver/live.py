"""A model in service as one replica rank sees it: what it holds, how a hot-load changes that, and when it may say so.

Before the first write everything is decoded, placed and compared with the promised digests, by all ranks together; a
failure until then leaves the model as it was. After it the model is dirty until the new digest is proven, or the old
one after taking everything back.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from groundhop.errors import ChecksumError, InputError, PlacementError
from groundhop.training.hotload.bits import Bits, TensorSpec, Weights
from groundhop.training.hotload.delta import Delta, Entry, read_delta
from groundhop.training.hotload.fingerprint import Fingerprint, fingerprint, state_digest
from groundhop.training.hotload.receiver.apply import Placement, Staged, stage, take_back, write
from groundhop.training.hotload.receiver.certify import Certificate, certify
from groundhop.training.hotload.receiver.layout import guard_of, storages_of
from groundhop.training.hotload.receiver.placement import Plan
from groundhop.training.hotload.receiver.prints import Part, borrow, lend, merge_all, parts_of, row_print
from groundhop.training.hotload.receiver.ranks import Parts, Ranks
from groundhop.training.hotload.receiver.recorder import Loader
from groundhop.training.hotload.receiver.requests import Applied, ApplyRequest, Hook

logger = logging.getLogger("vllm.groundhop")

STAGED_BYTES = 4 << 30
"""Most memory for changes that are worked out before the first write; a larger delta goes tensor by tensor, without undo."""
SAMPLES = 64
"""Elements of each storage that are looked at before a delta, to notice that somebody else has written."""


Item = tuple[Delta, Entry]


def sampled(size: int) -> torch.Tensor:
    """Indices of at most `SAMPLES` elements of `size`, evenly spread."""
    # Whole numbers: above 2^24 a float32 rounds an index, and the last one up to beyond the end.
    count = min(SAMPLES, size)
    return torch.arange(count, dtype=torch.int64) * size // max(count, 1)


@dataclass(slots=True)
class _Journal:
    """What a hot-load found, and what it has done so far."""

    table: dict[str, Fingerprint]
    kept: dict[str, Bits]
    was_dirty: str
    wrote: bool = False
    done: list[Staged] = field(default_factory=list)


class LiveModel:
    """A certified model; also a `Weights` that is read from it, where this rank holds all of it."""

    staged_bytes = STAGED_BYTES

    def __init__(
        self,
        model: Any,
        load: Loader,
        checkpoint: Weights,
        *,
        hooks: Callable[[Mapping[int, int]], Iterable[Hook]] = lambda targets: (),
        ranks: Ranks | None = None,
        identity: str = "",
    ) -> None:
        """Certify `model`, which claims to hold `checkpoint`. Raises: PlacementError."""
        self.identity = identity
        self._model, self._ranks = model, ranks or Ranks()
        self._table: dict[str, Fingerprint] = {}
        self._digest = ""
        _, targets = storages_of(model)
        made: list[tuple[Certificate, tuple[Hook, ...]]] = []
        self._ranks.together(lambda: made.append((certify(model, load, checkpoint), tuple(hooks(targets)))))
        self.certificate, self._hooks = made[0]
        self.plan: Plan = self.certificate.plan
        self._placement = Placement(self.plan, load, targets, self.certificate.kept)
        self._own: dict[str, tuple[Fingerprint, ...]] = {}
        self._table = _prints_of(checkpoint)
        self._proven = self.digest
        self.audit()
        if self.dirty:
            raise PlacementError("the plan does not read back the checkpoint that it was certified against")
        self._samples = self._sample()

    @property
    def dirty(self) -> str:
        """Why nobody may say that the model holds `identity`; empty when clean."""
        return self._ranks.dirty

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The canonical tensors."""
        return self.plan.specs

    def bits(self, name: str) -> Bits:
        """A copy of a tensor's canonical bits, read from the model. Raises: PlacementError where a part is elsewhere."""
        return self._placement.read(name, 0, self.specs[name].size)

    @property
    def digest(self) -> str:
        """Of the whole state as it is known; see `audit` for as it is."""
        if not self._digest:
            self._digest = state_digest(self.specs, self._table)
        return self._digest

    def audit(self) -> str:
        """Read every live bit and return the state's digest.

        Another one than known makes the model dirty; the one that it last held for certain makes it clean again.
        """
        fresh: dict[str, tuple[Fingerprint, ...]] = {}

        def read() -> Parts:
            self._check_guard()
            fresh.update(self._read_prints())
            return {name: parts_of(placed, fresh[name]) for name, placed in self.plan.tensors.items()}

        found = self._merged(self._ranks.together(read), {})
        if found != self._table:
            self._ranks.dirty = self.dirty or "the live weights differ from what was loaded"
        self._own, self._table, self._digest = fresh, found, ""
        if self.digest == self._proven:
            self._ranks.dirty = ""
        return self.digest

    def apply(self, request: ApplyRequest) -> Applied:
        """Bring the model to the request's state; a state that it is in already costs nothing.

        Raises: InputError, ChecksumError, PlacementError or ServerError; `dirty` says whether the model is still what it was.
        """
        seconds: dict[str, float] = {}
        deltas: list[Delta] = []
        self._ranks.together(self._look)
        if self.digest == request.digest and not self.dirty:
            self.identity = request.identity
            return Applied(self.digest, 0, seconds)
        with _timed(seconds, "read"):
            self._ranks.together(lambda: self._open(request, deltas))
        if self.dirty:
            with _timed(seconds, "audit"):
                self.audit()
        items = [(delta, entry) for delta in deltas for entry in delta.entries]
        self._foresee(request, {entry.name: entry.fingerprint for _, entry in items})
        large = sum(_staged_bytes(entry) for _, entry in items) > self.staged_bytes
        journal = _Journal(dict(self._table), dict(self._placement.kept), self.dirty)
        changed = 0
        for step in [[item] for item in items] if large else _in_turn(items):
            changed += self._step(request, step, seconds, journal, keep=not large)
        with _timed(seconds, "verify"):
            if request.verify == "full":
                self.audit()
            if self.digest != request.digest:
                raise ChecksumError(f"the live weights are {self.digest[:12]}, promised was {request.digest[:12]}")
        self._samples = self._sample()
        self._proven = self.digest
        self.identity, self._ranks.dirty = request.identity, ""
        return Applied(self.digest, changed, seconds)

    def _look(self) -> None:
        self._check_guard()
        if not self.dirty and self._sample() != self._samples:
            self._ranks.dirty = "somebody else wrote to the live weights"

    def _open(self, request: ApplyRequest, deltas: list[Delta]) -> None:
        if request.operation != "overwrite":
            if self.dirty:
                raise PlacementError(f"dirty ({self.dirty}): only an overwrite or a whole load mends it")
            if self.digest != request.base_digest:
                raise ChecksumError(
                    f"{request.identity} builds on {request.base_digest[:12]}, this is {self.digest[:12]}"
                )
        deltas += [read_delta(Path(part)) for part in request.parts]
        for delta in deltas:
            differs = delta.operations - {"overwrite"} or any(delta.needs_old(entry) for entry in delta.entries)
            if request.operation == "overwrite" and differs:
                raise InputError(f"{request.identity} claims to overwrite, but its parts build on old bits")
            for entry in delta.entries:
                if entry.name not in self.plan.tensors:
                    raise InputError(f"{request.identity} changes {entry.name}, which the checkpoint does not have")

    def _foresee(self, request: ApplyRequest, promised: Mapping[str, Fingerprint]) -> None:
        """Check that the prints after a change give the promised digest and keep shared tensors equal."""
        after = {**self._table, **promised}
        for name, placed in self.plan.tensors.items():
            if placed.alias and after[name] != after[placed.alias]:
                raise PlacementError(f"{name} and {placed.alias} must stay equal: this engine keeps one copy of both")
        if (found := state_digest(self.specs, after)) != request.digest:
            raise ChecksumError(f"{request.identity} gives the state {found[:12]}, promised was {request.digest[:12]}")

    def _step(
        self, request: ApplyRequest, step: Sequence[Item], seconds: dict[str, float], journal: "_Journal", keep: bool
    ) -> int:
        """Work out, check, write and read back some tensors; with `keep` a failure takes back this step and those before."""
        staged = Staged()

        with _timed(seconds, "stage"):
            try:
                merged = self._work_out(step, staged, journal)
                self._check_promises(request, step, merged)
            except BaseException:
                self._take_back(journal)
                raise
        self._ranks.dirty = self.dirty or f"{request.txn} was writing {request.identity}"
        journal.wrote = True
        if keep:
            journal.done.append(staged)
        with _timed(seconds, "write"):
            try:
                self._ranks.together(lambda: self._put(staged))
            except BaseException:
                self._take_back(journal)
                raise
        self._own.update(staged.prints)
        self._placement.kept.update(staged.kept)
        self._table.update(merged)
        self._digest = ""
        return staged.changed

    def _work_out(self, step: Sequence[Item], staged: Staged, journal: "_Journal") -> dict[str, Fingerprint]:
        """Fill `staged`; returns the prints that all ranks together come to."""
        lending = self._ranks.count > 1 and any(delta.needs_old(entry) for delta, entry in step)
        merged: dict[str, Fingerprint] = {}
        for piece in [[item] for item in step] if lending else [step]:
            lent = self._lend(*piece[0]) if lending else None
            said = self._ranks.together(partial(self._stage, piece, staged, lent))
            merged |= self._merged(said, {entry.name: entry.fingerprint for _, entry in piece})
        # Nobody knows what an unfinished write left of tensors that cannot be read back.
        unsure = self._placement.kept if journal.was_dirty else {}
        self._ranks.together(lambda: staged.patches.extend(self._placement.groups({**unsure, **staged.kept})))
        return merged

    def _stage(self, piece: Sequence[Item], staged: Staged, lent: Bits | None) -> Parts:
        for delta, entry in piece:
            staged.add(stage(self._placement, delta, entry, self._own.get(entry.name, ()), lent))
        return {entry.name: self._said(entry.name, staged) for _, entry in piece}

    def _lend(self, delta: Delta, entry: Entry) -> Bits | None:
        """Give the other ranks this one's elements of a tensor, and get the old bits of all of it if this rank needs them."""
        if not delta.needs_old(entry):
            return None
        placed = self.plan.tensors[entry.name]
        mine = bool(placed.rows) and not placed.whole and not placed.kept
        said = self._ranks.together(lambda: {entry.name: lend(self._placement, placed) if mine else []})
        return borrow(placed.spec, (part for rank in said for part in rank[entry.name])) if mine else None

    def _check_promises(self, request: ApplyRequest, step: Sequence[Item], merged: Mapping[str, Fingerprint]) -> None:
        for _, entry in step:
            here, base = self._table[entry.name], entry.base_fingerprint
            if request.operation == "differential" and base not in (None, here):
                raise ChecksumError(f"{entry.name}: {request.identity} does not build on the bits that are here")
            if merged[entry.name] != entry.fingerprint:
                raise ChecksumError(f"{entry.name}: {request.identity} does not give the bits that it promises")

    def _put(self, staged: Staged) -> None:
        write(self.plan, staged.patches)
        self._derive(staged.storages)

    def _take_back(self, journal: "_Journal") -> None:
        """After a failed write: put the old bits back and see whether they are all there; else the model stays dirty."""
        if not journal.wrote:
            return

        def put_back() -> None:
            for staged in reversed(journal.done):
                take_back(self.plan, staged.patches)
                self._derive(staged.storages)

        self._placement.kept.update(journal.kept)
        try:
            self._ranks.together(put_back)
            self.audit()
        except Exception:
            logger.exception("groundhop: a failed write could not be taken back")
            return
        if self._table == journal.table:
            self._ranks.dirty = journal.was_dirty
            logger.warning("groundhop: a failed write was taken back")

    def _derive(self, storages: set[int]) -> None:
        for hook in self._hooks:
            if hook.storages & storages:
                hook.run()
        for device in {storage.flat.device for storage in self.plan.storages}:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)

    def _merged(self, said: Sequence[Parts], unheld: Mapping[str, Fingerprint]) -> dict[str, Fingerprint]:
        return merge_all(self.specs, said, {**self._table, **unheld})

    def _said(self, name: str, staged: Staged) -> list[Part]:
        placed = self.plan.tensors[name]
        return parts_of(placed, staged.prints[name]) if name in staged.prints else []

    def _read_prints(self) -> dict[str, tuple[Fingerprint, ...]]:
        """Read the prints of all parts from the model; what is kept beside it must give what the model holds."""
        placement = self._placement
        wrong = placement.kept_but_not_live()
        found: dict[str, tuple[Fingerprint, ...]] = {}
        for name, placed in self.plan.tensors.items():
            if placed.kept:
                kept = fingerprint(placement.kept[name])
                found[name] = (kept + Fingerprint(1, 1) if name in wrong else kept,)
            else:
                rows = [placed.rows[part] for part in placed.parts]
                found[name] = tuple(row_print(placed.spec, row, placement.flat(row, placed)) for row in rows)
        return found

    def _sample(self) -> bytes:
        """A few bytes of each storage that takes changes, evenly spread."""
        numbers = sorted({row.target for placed in self.plan.tensors.values() for row in placed.rows})
        taken = []
        for flat in (self.plan.storages[number].flat for number in numbers):
            taken.append(flat[sampled(flat.numel()).to(flat.device)])
        return torch.cat(taken).cpu().numpy().tobytes() if taken else b""

    def _check_guard(self) -> None:
        if guard_of(self._model) != self.plan.guard:
            raise PlacementError("parameters were moved, resized or replaced since they were certified: certify again")


def _prints_of(checkpoint: Weights) -> dict[str, Fingerprint]:
    known = getattr(checkpoint, "prints", None)
    return dict(known) if known else {name: fingerprint(checkpoint.bits(name)) for name in checkpoint.specs}


def _staged_bytes(entry: Entry) -> int:
    """About what working out a tensor's changes takes: values before and after, and an index for each."""
    return entry.changed * (8 + 2 * int(entry.spec.unit.itemsize))


def _in_turn(items: Sequence[Item]) -> list[list[Item]]:
    """Cut a chain of deltas into steps that each name a tensor once."""
    steps: list[list[Item]] = [[]]
    for item in items:
        if any(item[1].name == other.name for _, other in steps[-1]):
            steps.append([])
        steps[-1].append(item)
    return steps


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start

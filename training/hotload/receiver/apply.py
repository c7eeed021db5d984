"""Work out what a delta writes where, before anything is written; then write it, read it back, or take it back."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from groundhop.errors import ChecksumError, InputError, PlacementError
from groundhop.training.hotload.bits import Bits
from groundhop.training.hotload.changes import Change
from groundhop.training.hotload.delta import Delta, Entry
from groundhop.training.hotload.fingerprint import Fingerprint, fingerprint, fingerprint_at
from groundhop.training.hotload.receiver.layout import box_bytes, itemsize_of
from groundhop.training.hotload.receiver.placement import UNITS, Moved, Placed, Plan, Row, bits_from, cast, units_of
from groundhop.training.hotload.receiver.recorder import Box, Loader
from groundhop.training.hotload.receiver.shadow import shadow_load


@dataclass(frozen=True, slots=True)
class Patch:
    """Units of one storage before and after."""

    target: int
    itemsize: int
    places: Any
    """Indices, a slice, or a `Box` (then the units are its bytes)."""
    before: Any
    after: Any


@dataclass(slots=True)
class Staged:
    """What one delta, or one tensor of it, will do."""

    patches: list[Patch] = field(default_factory=list)
    prints: dict[str, tuple[Fingerprint, ...]] = field(default_factory=dict)
    """Prints afterwards of every part of every tensor that the delta names and this rank holds."""
    kept: dict[str, Bits] = field(default_factory=dict)
    changed: int = 0

    def add(self, other: "Staged") -> None:
        """Take in what another does."""
        self.patches += other.patches
        self.prints |= other.prints
        self.kept |= other.kept
        self.changed += other.changed

    @property
    def storages(self) -> set[int]:
        """Numbers of the storages that are written."""
        return {patch.target for patch in self.patches}


@dataclass(frozen=True, slots=True)
class Placement:
    """A certified model: its plan, and what the model itself does not hold."""

    plan: Plan
    load: Loader
    targets: Mapping[int, int]
    kept: dict[str, Bits]

    def flat(self, row: Row, placed: Placed) -> Any:
        """A row's storage in units."""
        return self.plan.storages[row.target].units(itemsize_of(placed.spec, row))

    def read(self, name: str, start: int, stop: int) -> Bits:
        """Canonical bits of a tensor that this rank holds entirely. Raises: PlacementError for any other."""
        placed = self.plan.tensors[name]
        if placed.kept:
            return self.kept[name][start:stop]
        if not placed.whole:
            raise PlacementError(f"{name}: this rank holds only a part of it, so its old bits cannot be given")
        device = self.plan.storages[placed.rows[0].target].flat.device if placed.rows else "cpu"
        size = min(stop, placed.spec.size) - start
        found = torch.empty(size, dtype=UNITS[placed.spec.unit.itemsize], device=device)
        for part in placed.parts:
            row = placed.rows[part]
            moved = row.find_run(start, start + size, device)
            units = self.flat(row, placed)[moved.places]
            found[moved.chosen] = units if row.dtype == placed.spec.dtype else cast(units, row.dtype, placed.spec.dtype)
        return bits_from(found)

    def kept_but_not_live(self) -> set[str]:
        """Names of tensors kept beside the model that do not give what the model holds."""
        wrong: set[str] = set()
        for patch, names in self._groups(self.kept):
            if not torch.equal(patch.before, patch.after):
                wrong |= set(names)
        for name, placed in self.plan.tensors.items():
            if placed.kept and placed.rows:
                units = units_of(self.kept[name], "cpu")
                for row in placed.rows:
                    loaded = torch.as_strided(units, row.sizes, row.source_strides, row.source_offset).reshape(-1)
                    live = row.read(self.flat(row, placed))
                    if not torch.equal(live, cast(loaded.to(live.device), placed.spec.dtype, row.dtype)):
                        wrong.add(name)
        return wrong

    def groups(self, kept: Mapping[str, Bits]) -> list[Patch]:
        """What the loader writes for the OPAQUE groups of which `kept` holds canonical bits."""
        return [patch for patch, _ in self._groups(kept)]

    def _groups(self, kept: Mapping[str, Bits]) -> Iterator[tuple[Patch, list[str]]]:
        specs = self.plan.specs
        for names in self.plan.groups().values():
            if not any(name in kept for name in names):
                continue
            tensors = {name: (specs[name], kept.get(name, self.kept[name]).copy()) for name in names}
            shadow = shadow_load(self.load, self.targets, tensors)
            for target, box in dict.fromkeys(shadow.places):
                live, new = self.plan.storages[target].flat, shadow.copies[target]
                yield Patch(target, 1, box, box_bytes(live, box).clone(), box_bytes(new, box).clone()), names


def stage(
    placement: Placement, delta: Delta, entry: Entry, prints: tuple[Fingerprint, ...], lent: Bits | None = None
) -> Staged:
    """Work out what one tensor's changes do here; `prints` are those of its parts now.

    `lent`: the old bits of the whole tensor, where this rank holds a part of it and they are needed.

    OPAQUE tensors only get their new canonical bits; `Placement.groups` says what the loader makes of them.
    Raises: InputError for what does not fit, PlacementError for what this engine cannot take.
    """
    placed = placement.plan.tensors[entry.name]
    if placed.spec != entry.spec:
        raise InputError(f"{entry.name}: the delta is for {entry.spec}, this engine loaded {placed.spec}")
    if not placed.rows and not placed.kept:
        return Staged()

    def old(start: int, stop: int) -> Bits:
        return placement.read(entry.name, start, stop) if lent is None else lent[start:stop]

    staged = Staged()
    found = list(prints)
    canonical = placement.kept[entry.name].copy() if placed.kept else None
    for change in delta.changes(entry, old):
        staged.changed += int(change.values.size)
        if canonical is not None:
            change = _keep(change, canonical, found)
        for number, row in enumerate(placed.rows):
            part = placed.parts.index(number) if canonical is None and number in placed.parts else None
            staged.patches += _patches(placement, placed, row, change, found, part)
    if canonical is not None:
        staged.kept[entry.name] = canonical
    staged.prints[entry.name] = tuple(found)
    return staged


def write(plan: Plan, patches: Iterable[Patch]) -> None:
    """Write; then read back. Raises: ChecksumError where a storage does not hold what was written."""
    done = list(patches)
    for patch in done:
        _put(plan, patch, patch.after)
    for patch in done:
        if not torch.equal(_view(plan, patch), patch.after):
            raise ChecksumError(f"{plan.storages[patch.target].names[0]} does not hold what was written to it")


def take_back(plan: Plan, patches: list[Patch]) -> None:
    """Put the former bits back, whichever of the patches were written."""
    for patch in reversed(patches):
        _put(plan, patch, patch.before)


def _keep(change: Change, canonical: Bits, found: list[Fingerprint]) -> Change:
    """Do a change to kept bits; returns it as an overwrite with the results."""
    before = change.gather(canonical)
    after = change.result(before)
    change.scatter(canonical, after)
    found[0] += _print(change, slice(None), after) - _print(change, slice(None), before)
    return Change(change.start, change.positions, "overwrite", after)


def _patches(
    placement: Placement, placed: Placed, row: Row, change: Change, found: list[Fingerprint], part: int | None
) -> Iterator[Patch]:
    flat = placement.flat(row, placed)
    moved = _find(row, change, flat.device)
    stored = flat[moved.places].clone()
    if not stored.numel():
        return
    values = units_of(change.values, flat.device)[moved.chosen]
    spec, same = placed.spec, row.dtype == placed.spec.dtype
    if change.operation == "overwrite":
        after, before = values, None
    else:
        before = stored if same else cast(stored, row.dtype, spec.dtype)
        after = before ^ values if change.operation == "xor" else before + values
    written = after if same else cast(after, spec.dtype, row.dtype)
    if part is not None:
        if not same and not torch.equal(cast(written, row.dtype, spec.dtype), after):
            raise PlacementError(f"{spec.name}: NaN cannot be read back from {row.dtype}, so it cannot be proven")
        before = before if before is not None else stored if same else cast(stored, row.dtype, spec.dtype)
        found[part] += _print(change, moved.chosen, after) - _print(change, moved.chosen, before)
    yield Patch(row.target, written.element_size(), moved.places, stored, written)


def _find(row: Row, change: Change, device: Any) -> Moved:
    if change.positions is None:
        return row.find_run(change.start, change.start + int(change.values.size), device)
    return row.find(torch.from_numpy(change.absolute()).to(device))


def _print(change: Change, chosen: Any, units: Any) -> Fingerprint:
    bits = bits_from(units) if isinstance(units, torch.Tensor) else units
    if change.positions is None and isinstance(chosen, slice):
        return fingerprint(bits, change.start + (chosen.start or 0))
    which = chosen if isinstance(chosen, slice) else chosen.cpu().numpy()
    return fingerprint_at(change.absolute()[which], bits)


def _view(plan: Plan, patch: Patch) -> Any:
    storage = plan.storages[patch.target]
    if isinstance(patch.places, Box):
        return box_bytes(storage.flat, patch.places)
    return storage.units(patch.itemsize)[patch.places]


def _put(plan: Plan, patch: Patch, units: Any) -> None:
    storage = plan.storages[patch.target]
    if isinstance(patch.places, Box):
        box_bytes(storage.flat, patch.places).copy_(units)
    else:
        storage.units(patch.itemsize)[patch.places] = units

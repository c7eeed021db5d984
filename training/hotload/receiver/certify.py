"""Learn where a model keeps each checkpoint tensor, and prove it bit for bit against the live weights; or refuse by name.

Order: note the addresses, run the engine's own loader under the recorder, compare every noted block with the live bits,
rehearse what only the loader can do, and account for every element of every parameter.
"""

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from groundhop.errors import PlacementError
from groundhop.training.hotload.bits import Bits, TensorSpec, Weights
from groundhop.training.hotload.receiver.classify import Classifier, count_writes, rows_by_storage
from groundhop.training.hotload.receiver.layout import (
    box_bytes,
    guard_of,
    rebound_again,
    refuse_emptied,
    signature_of,
    storages_of,
    tensors_of,
)
from groundhop.training.hotload.receiver.placement import Plan, tensor_of
from groundhop.training.hotload.receiver.recorder import Box, Loader, box_of, key_of, record
from groundhop.training.hotload.receiver.shadow import shadow_load

KEPT_BYTES = 64 << 20
KEPT_SHARE = 0.05
"""Canonical bits that the model does not hold may take this much host memory, or this share of the checkpoint."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """A plan that was proven, and what it cannot read back from the model."""

    plan: Plan
    kept: dict[str, Bits]
    """Canonical bits by name, writable."""
    unfed: tuple[str, ...]
    """Parameters and buffers that no checkpoint tensor feeds, e.g. rotary tables; they never change."""
    reasons: Mapping[str, str]
    """Why a tensor is not simply copied."""

    @property
    def counts(self) -> dict[str, int]:
        """Tensors by class."""
        return dict(Counter(placed.kind for placed in self.plan.tensors.values()))

    @property
    def overwrite_names(self) -> list[str]:
        """Tensors for which a publisher sends new values, never differences."""
        return sorted(name for name, placed in self.plan.tensors.items() if placed.kind in ("CAST", "OPAQUE"))


def certify(model: Any, load: Loader, checkpoint: Weights) -> Certificate:
    """Make the plan of `model`, which claims to hold `checkpoint`; `load` is its own loader. Nothing is written to it.

    Raises: PlacementError that names what cannot be placed or proven, and why.
    """
    refuse_emptied(model)
    storages, targets = storages_of(model)
    before = guard_of(model)
    with rebound_again(model):
        recording = record(load, _stream(checkpoint, checkpoint.specs), targets)
        if guard_of(model) != before:
            raise PlacementError("its loader replaces storages: pointers that kernels and graphs hold would go stale")
    work = Classifier(checkpoint, storages, recording)
    work.classify()
    plan = Plan(work.placed, storages, before, signature_of(model))
    computed = _rehearse(plan, load, targets, checkpoint, work.reasons)
    unfed = _account(model, plan, targets, computed)
    kept = {name: checkpoint.bits(name).copy() for name, placed in work.placed.items() if placed.kept}
    _check_kept(kept, checkpoint.specs, work.reasons)
    return Certificate(plan, kept, unfed, work.reasons)


def _stream(checkpoint: Weights, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    for name in names:
        with warnings.catch_warnings():
            # The recorder refuses loaders that write to what they are given.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            tensor = tensor_of(checkpoint.specs[name], checkpoint.bits(name))
        yield name, tensor


def _check_kept(kept: Mapping[str, Bits], specs: Mapping[str, TensorSpec], reasons: Mapping[str, str]) -> None:
    size = sum(bits.nbytes for bits in kept.values())
    if size > max(KEPT_BYTES, KEPT_SHARE * sum(spec.nbytes for spec in specs.values())):
        largest = max(kept, key=lambda name: kept[name].nbytes)
        raise PlacementError(
            f"{size} bytes of canonical weights cannot be read back from the model, e.g. {largest} "
            f"({reasons.get(largest, 'its cast loses bits')}). Publish in the type that the engine serves"
        )


def _rehearse(
    plan: Plan, load: Loader, targets: Mapping[int, int], checkpoint: Weights, reasons: Mapping[str, str]
) -> list[tuple[int, Box]]:
    """Load every OPAQUE group again, on copies, and demand the live bits; returns where that writes."""
    places: list[tuple[int, Box]] = []
    for names in plan.groups().values():
        reason = f"{names[0]}: {reasons[names[0]]}"
        held = {name: (checkpoint.specs[name], checkpoint.bits(name).copy()) for name in names}
        try:
            shadow = shadow_load(load, targets, held)
        except Exception as error:
            raise PlacementError(f"{reason}, and cannot be loaded again: {type(error).__name__}: {error}") from error
        for number, copy in shadow.copies.items():
            if not torch.equal(copy, plan.storages[number].flat):
                raise PlacementError(
                    f"{reason}, and loading it again does not give the live bits of {plan.storages[number].names[0]}: "
                    "its kernel rearranges or derives them. Choose another backend, e.g. --moe-backend triton"
                )
        if not shadow.places:
            raise PlacementError(f"{reason}, and loading it again writes nothing")
        places += shadow.places
    return places


def _account(model: Any, plan: Plan, targets: Mapping[int, int], computed: list[tuple[int, Box]]) -> tuple[str, ...]:
    """Account for every element of every parameter; returns the parameters and buffers that nothing feeds."""
    unfed: list[str] = []
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    named: dict[int, list[tuple[str, Any]]] = {}
    for name, tensor in tensors_of(model):
        if tensor.numel():
            named.setdefault(targets[key_of(tensor)], []).append((name, tensor))
    rows = rows_by_storage(plan.tensors)
    for number, storage in enumerate(plan.storages):
        counts = count_writes(storage.flat, rows.get(number, []))
        for target, box in computed:
            if target == number:
                box_bytes(counts, box).fill_(1)
        for name, tensor in named[number]:
            empty = box_bytes(counts, box_of(tensor)).reshape(-1, tensor.dtype.itemsize)[:, 0] == 0
            if not bool(empty.any()):
                continue
            bits = box_bytes(storage.flat, box_of(tensor)).reshape(-1, tensor.dtype.itemsize)[empty]
            if name in parameters and not bool((bits == bits[0]).all()):
                raise PlacementError(
                    f"{name}: {int(empty.sum())} of its {tensor.numel()} elements come from no checkpoint tensor "
                    "and are not constant padding"
                )
            if bool(empty.all()):
                unfed.append(name)
    return tuple(unfed)

"""Learn where a model keeps each checkpoint tensor, and prove it bit for bit against the live weights; or refuse by name.

Order: note the addresses, run the engine's own loader under the recorder, compare every noted block with the live bits,
rehearse what only the loader can do, and account for every element of every parameter.
"""

import contextlib
import hashlib
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from groundhop.errors import PlacementError
from groundhop.training.hotload.bits import Bits, TensorSpec, Weights
from groundhop.training.hotload.receiver.placement import (
    DTYPES,
    UNITS,
    Placed,
    Plan,
    Row,
    Storage,
    cast,
    make_row,
    tensor_of,
    units_of,
)
from groundhop.training.hotload.receiver.recorder import (
    Box,
    Copy,
    Loader,
    Recording,
    Shadow,
    flat_bytes,
    key_of,
    record,
)

KEPT_BYTES = 64 << 20
KEPT_SHARE = 0.05
"""Canonical bits that the model does not hold may take this much host memory, or this share of the checkpoint."""
WIDENED = {("BF16", "F32"), ("F16", "F32")}
"""Casts that lose nothing."""


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
    with _rebound_again(model):
        recording = record(load, _stream(checkpoint, checkpoint.specs), targets)
        if guard_of(model) != before:
            raise PlacementError("its loader replaces storages: pointers that kernels and graphs hold would go stale")
    work = _Work(model, load, checkpoint, storages, targets, recording)
    work.classify()
    work.rehearse()
    unfed = work.cover()
    plan = Plan(work.placed, storages, before, signature_of(model))
    kept = {name: checkpoint.bits(name).copy() for name, placed in work.placed.items() if placed.kept}
    _check_kept(kept, checkpoint.specs, work.reasons)
    return Certificate(plan, kept, unfed, work.reasons)


def refuse_emptied(model: Any) -> None:
    """Raise PlacementError for a model of which a parameter was thrown away after loading."""
    for name, parameter in model.named_parameters():
        if parameter.numel() == 0:
            raise PlacementError(f"{name} was emptied after loading: its kernel keeps a packed copy instead")


def tensors_of(model: Any) -> Iterator[tuple[str, Any]]:
    """Every parameter and buffer under each of its names; placeholders of other ranks' layers are left out."""
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            if tensor.device.type != "meta":
                yield name, tensor


def storages_of(model: Any) -> tuple[tuple[Storage, ...], dict[int, int]]:
    """The storages that parameters and buffers lie in, and their numbers by key."""
    names: dict[int, list[str]] = {}
    firsts: dict[int, Any] = {}
    for name, tensor in tensors_of(model):
        if tensor.numel():
            names.setdefault(key_of(tensor), []).append(name)
            firsts.setdefault(key_of(tensor), tensor)
    storages = tuple(Storage(tuple(names[key]), flat_bytes(tensor.detach())) for key, tensor in firsts.items())
    return storages, {key: number for number, key in enumerate(firsts)}


def guard_of(model: Any) -> str:
    """Digest of where everything lies; any move, resize or new type changes it."""
    return _digest((name, tensor.data_ptr(), *_geometry(tensor)) for name, tensor in tensors_of(model))


def signature_of(model: Any) -> str:
    """The same without addresses."""
    return _digest((name, *_geometry(tensor)) for name, tensor in tensors_of(model))


def _geometry(tensor: Any) -> tuple[Any, ...]:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), str(tensor.dtype)


def _digest(rows: Iterable[Any]) -> str:
    return hashlib.sha256(msgspec.json.encode(sorted(rows))).hexdigest()


@contextlib.contextmanager
def _rebound_again(model: Any) -> Iterator[None]:
    """Give every parameter its object and its storage back, whatever a loader put in its place."""
    held = [(m, name, p, p.data) for m in model.modules() for name, p in m._parameters.items() if p is not None]
    try:
        yield
    finally:
        for module, name, parameter, data in held:
            module._parameters[name] = parameter
            if parameter.data_ptr() != data.data_ptr() or parameter.shape != data.shape:
                parameter.data = data


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


@dataclass(slots=True)
class _Work:
    """One certification."""

    model: Any
    load: Loader
    checkpoint: Weights
    storages: tuple[Storage, ...]
    targets: Mapping[int, int]
    recording: Recording
    placed: dict[str, Placed] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    """Why a tensor is OPAQUE."""
    opaque_places: list[tuple[int, Box]] = field(default_factory=list)

    def classify(self) -> None:
        """Put every tensor into its class."""
        copies: dict[str, list[Copy]] = {}
        for copy in self.recording.copies:
            if copy not in copies.setdefault(copy.name, []):
                copies[copy.name].append(copy)
        self._suspect(copies)
        for name, spec in self.checkpoint.specs.items():
            self.placed[name] = self._place(spec, copies.get(name, []))
        self._separate()
        self._close(copies)

    def _suspect(self, copies: Mapping[str, list[Copy]]) -> None:
        for write in self.recording.writes:
            for name in write.names:
                self.reasons.setdefault(name, f"its loader computes with it ({write.operator})")
        for name in self.recording.consumed - copies.keys():
            self.reasons.setdefault(name, "its loader reads it and copies something else")

    def _place(self, spec: TensorSpec, copies: list[Copy]) -> Placed:
        if not spec.size:
            return Placed(spec, "XOR", whole=True)
        if spec.name in self.reasons:
            return Placed(spec, "OPAQUE")
        if not copies:
            return Placed(spec, "SKIP")
        rows = [self._row(spec, copy) for copy in copies]
        bits = units_of(self.checkpoint.bits(spec.name), "cpu")
        if None in rows:
            self.reasons[spec.name] = "its loader copies it in a way that has no exact map"
            return Placed(spec, "OPAQUE")
        found = tuple(row for row in rows if row is not None)
        kinds = {self._compare(spec, row, bits) for row in found}
        if "OPAQUE" in kinds:
            self.reasons[spec.name] = "live bits differ from what its loader copies"
            return Placed(spec, "OPAQUE")
        kind = "CAST" if "CAST" in kinds else "XOR"
        parts, whole = _parts(spec, found)
        if parts is None:
            self.reasons[spec.name] = "its loader copies overlapping pieces of it"
            return Placed(spec, "OPAQUE")
        invertible = all(self._invertible(spec, found[part], bits) for part in parts)
        return Placed(spec, "CAST" if kind == "CAST" else "XOR", found, parts, invertible, whole)

    def _row(self, spec: TensorSpec, copy: Copy) -> Row | None:
        wanted = DTYPES[spec.dtype]
        found = next((n for n, dtype in DTYPES.items() if dtype == copy.place.dtype), None)
        units = wanted.itemsize // spec.unit.itemsize
        if found is None or (found != spec.dtype and (units > 1 or copy.place.dtype.itemsize not in UNITS)):
            return None
        place = (copy.place.offset, copy.place.strides)
        return make_row(copy.target, copy.place.sizes, (copy.source.offset, copy.source.strides), place, found, units)

    def _compare(self, spec: TensorSpec, row: Row, bits: Any) -> str:
        live = row.read(self._flat(spec, row))
        loaded = torch.as_strided(bits, row.sizes, row.source_strides, row.source_offset).reshape(-1)
        if row.dtype == spec.dtype:
            return "XOR" if torch.equal(live, loaded.to(live.device)) else "OPAQUE"
        return "CAST" if torch.equal(live, cast(loaded.to(live.device), spec.dtype, row.dtype)) else "OPAQUE"

    def _invertible(self, spec: TensorSpec, row: Row, bits: Any) -> bool:
        if row.dtype == spec.dtype:
            return True
        if (spec.dtype, row.dtype) not in WIDENED:
            return False
        live = cast(row.read(self._flat(spec, row)).contiguous(), row.dtype, spec.dtype)
        loaded = torch.as_strided(bits, row.sizes, row.source_strides, row.source_offset).reshape(-1)
        return bool(torch.equal(live.cpu(), loaded))

    def _flat(self, spec: TensorSpec, row: Row) -> Any:
        return self.storages[row.target].units(itemsize_of(spec, row))

    def _separate(self) -> None:
        """Find elements with two sources: equal twins are aliases, all else is OPAQUE."""
        owners: dict[tuple[Row, ...], str] = {}
        for name, placed in self.placed.items():
            first = owners.setdefault(placed.rows, name) if placed.rows else name
            if first != name and placed.spec.shape == self.placed[first].spec.shape:
                self.placed[name] = Placed(placed.spec, "SKIP", alias=first)
        for number, mine in self._rows().items():
            counts = self._count(number, mine)
            if not bool((counts > 1).any()):
                continue
            for name, row in mine:
                if int(self._bytes(counts, self.placed[name].spec, row).max()) > 1:
                    self.reasons[name] = "another tensor is written to the same elements"
        for name in self.reasons:
            self.placed[name] = Placed(self.placed[name].spec, "OPAQUE")

    def _rows(self) -> dict[int, list[tuple[str, Row]]]:
        found: dict[int, list[tuple[str, Row]]] = {}
        for name, placed in self.placed.items():
            for row in placed.rows:
                found.setdefault(row.target, []).append((name, row))
        return found

    def _count(self, number: int, rows: Iterable[tuple[str, Row]]) -> Any:
        """How often each byte of a storage is written."""
        counts = torch.zeros_like(self.storages[number].flat)
        for name, row in rows:
            self._bytes(counts, self.placed[name].spec, row).add_(1)
        return counts

    def _bytes(self, flat: Any, spec: TensorSpec, row: Row) -> Any:
        each = itemsize_of(spec, row)
        strides = (*(stride * each for stride in row.place_strides), 1)
        return torch.as_strided(flat, (*row.sizes, each), strides, row.place_offset * each)

    def _close(self, copies: Mapping[str, list[Copy]]) -> None:
        """Put OPAQUE tensors that feed the same elements into one group, and draw in what shares elements with them."""
        places = [(name, c.target, c.place.span) for name, found in copies.items() for c in found]
        places += [(n, w.target, w.place.span) for w in self.recording.writes for n in w.names]
        places += [(n, w.target, w.place.span) for w in self.recording.fills for n in w.names if n in self.reasons]
        computed = [(w.target, w.place.span) for w in self.recording.writes if w.names]
        for name, target, span in places:
            if any(target == at and _overlap(span, other) for at, other in computed):
                self.reasons.setdefault(name, "its elements are written again by a computation")
        groups: dict[str, int] = {}
        for name in self.reasons:
            mine = [(target, span) for other, target, span in places if other == name]
            near = {n for n, t, s in places if n in self.reasons and any(t == at and _overlap(s, x) for at, x in mine)}
            near |= {name} | {n for w in self.recording.writes if name in w.names for n in w.names}
            numbers = {groups[n] for n in near if n in groups}
            number = min(numbers, default=len(groups))
            groups.update(dict.fromkeys(near, number))
            groups.update({n: number for n, old in groups.items() if old in numbers})
        for name, group in groups.items():
            self.placed[name] = Placed(self.placed[name].spec, "OPAQUE", group=group, whole=True)

    def rehearse(self) -> None:
        """Load every OPAQUE group again, on copies, and demand the live bits."""
        groups: dict[int, list[str]] = {}
        for name, placed in self.placed.items():
            if placed.kind == "OPAQUE":
                groups.setdefault(placed.group, []).append(name)
        for names in groups.values():
            held = {name: self.checkpoint.bits(name).copy() for name in names}
            specs = self.checkpoint.specs
            reason = f"{names[0]}: {self.reasons[names[0]]}"
            try:
                shadow = shadow_load(self.load, self.targets, {n: (specs[n], bits) for n, bits in held.items()})
            except Exception as error:
                raise PlacementError(
                    f"{reason}, and cannot be loaded again: {type(error).__name__}: {error}"
                ) from error
            for number, copy in shadow.copies.items():
                if not torch.equal(copy, self.storages[number].flat):
                    raise PlacementError(
                        f"{reason}, and loading it again does not give the live bits of {self.storages[number].names[0]}: "
                        "its kernel rearranges or derives them. Choose another backend, e.g. --moe-backend triton"
                    )
            if not shadow.places:
                raise PlacementError(f"{reason}, and loading it again writes nothing")
            self.opaque_places += shadow.places

    def cover(self) -> tuple[str, ...]:
        """Account for every element of every parameter; returns what nothing feeds."""
        unfed: list[str] = []
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        named: dict[int, list[tuple[str, Any]]] = {}
        for name, tensor in tensors_of(self.model):
            if tensor.numel():
                named.setdefault(self.targets[key_of(tensor)], []).append((name, tensor))
        rows = self._rows()
        for number in range(len(self.storages)):
            counts = self._count(number, rows.get(number, []))
            for target, box in self.opaque_places:
                if target == number:
                    box_bytes(counts, box).fill_(1)
            for name, tensor in named[number]:
                shape = Box(tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
                empty = box_bytes(counts, shape).reshape(-1, tensor.dtype.itemsize)[:, 0] == 0
                if not bool(empty.any()):
                    continue
                bits = box_bytes(self.storages[number].flat, shape).reshape(-1, tensor.dtype.itemsize)[empty]
                if name in parameters and not bool((bits == bits[0]).all()):
                    raise PlacementError(
                        f"{name}: {int(empty.sum())} of its {tensor.numel()} elements come from no checkpoint tensor "
                        "and are not constant padding"
                    )
                if bool(empty.all()):
                    unfed.append(name)
        return tuple(unfed)


def itemsize_of(spec: TensorSpec, row: Row) -> int:
    """Bytes of a unit in the row's storage."""
    return int(spec.unit.itemsize if row.dtype == spec.dtype else DTYPES[row.dtype].itemsize)


def box_bytes(flat: Any, box: Box) -> Any:
    """A box as bytes, in the shape (*sizes, bytes an element), seen on a storage's bytes."""
    each = box.dtype.itemsize
    return torch.as_strided(flat, (*box.sizes, each), (*(s * each for s in box.strides), 1), box.offset * each)


def shadow_load(load: Loader, targets: Mapping[int, int], tensors: Mapping[str, tuple[TensorSpec, Bits]]) -> Shadow:
    """Run the loader over whole tensors without touching the live model. Raises: whatever the loader raises."""
    shadow = Shadow(targets)
    with torch.no_grad(), shadow:
        load([(name, tensor_of(spec, bits)) for name, (spec, bits) in tensors.items()])
    return shadow


def _parts(spec: TensorSpec, rows: tuple[Row, ...]) -> tuple[tuple[int, ...] | None, bool]:
    """Rows with different canonical blocks, None when such blocks overlap; and whether they cover the tensor."""
    first: dict[tuple[Any, ...], int] = {}
    for number, row in enumerate(rows):
        first.setdefault(row.source_box, number)
    parts = tuple(first.values())
    if len(parts) == 1:
        return parts, rows[parts[0]].size == spec.size
    counts = torch.zeros(spec.size, dtype=torch.uint8)
    for part in parts:
        torch.as_strided(counts, rows[part].sizes, rows[part].source_strides, rows[part].source_offset).add_(1)
    most = int(counts.max())
    return (None, False) if most > 1 else (parts, int(counts.min()) == 1)


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


__all__ = ["Certificate", "box_bytes", "certify", "guard_of", "itemsize_of", "shadow_load", "signature_of"]

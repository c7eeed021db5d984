"""Which class each checkpoint tensor is of on this rank, from what its loader was seen to do and from the live bits."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from groundhop.training.hotload.bits import TensorSpec, Weights
from groundhop.training.hotload.receiver.layout import itemsize_of, row_bytes
from groundhop.training.hotload.receiver.placement import DTYPES, UNITS, Placed, Row, Storage, cast, make_row, units_of
from groundhop.training.hotload.receiver.recorder import Copy, Recording

WIDENED = {("BF16", "F32"), ("F16", "F32")}
"""Casts that lose nothing."""


@dataclass(slots=True)
class Classifier:
    """Puts every checkpoint tensor into its class, from what was recorded and from the live bits."""

    checkpoint: Weights
    storages: tuple[Storage, ...]
    recording: Recording
    placed: dict[str, Placed] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    """Why a tensor is OPAQUE."""

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
        for number, mine in rows_by_storage(self.placed).items():
            counts = count_writes(self.storages[number].flat, mine)
            if not bool((counts > 1).any()):
                continue
            for spec, row in mine:
                if int(row_bytes(counts, spec, row).max()) > 1:
                    self.reasons[spec.name] = "another tensor is written to the same elements"
        for name in self.reasons:
            self.placed[name] = Placed(self.placed[name].spec, "OPAQUE")

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


def rows_by_storage(placed: Mapping[str, Placed]) -> dict[int, list[tuple[TensorSpec, Row]]]:
    """All rows by the storage that they write to."""
    found: dict[int, list[tuple[TensorSpec, Row]]] = {}
    for tensor in placed.values():
        for row in tensor.rows:
            found.setdefault(row.target, []).append((tensor.spec, row))
    return found


def count_writes(flat: Any, rows: Iterable[tuple[TensorSpec, Row]]) -> Any:
    """How often each byte of a storage is written by its rows."""
    counts = torch.zeros_like(flat)
    for spec, row in rows:
        row_bytes(counts, spec, row).add_(1)
    return counts


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

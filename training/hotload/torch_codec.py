"""The codec for tensors on a device: compare, rank, place and sum there, so that only changed elements cross to the host.

The same coder then writes the same bytes as for tensors in host memory. Plain torch operations, so that any device does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from groundhop.errors import InputError
from groundhop.training.hotload.bits import Bits, TensorSpec
from groundhop.training.hotload.changes import Change, Encoding
from groundhop.training.hotload.classes import (
    SAMPLE_BLOCK,
    Bounds,
    Field,
    Placed,
    Ranked,
    class_table,
    sample_step,
    split_exponents,
)
from groundhop.training.hotload.codec import CHUNK_ELEMENTS, encode_chunk
from groundhop.training.hotload.fingerprint import (
    GOLDEN,
    MIX_1,
    MIX_2,
    MIX_3,
    MODULUS,
    WORD_BYTES,
    Fingerprint,
    fingerprint,
)
from groundhop.training.hotload.kernels import spans
from groundhop.training.hotload.locations import Ranks
from groundhop.training.hotload.stretch import Moved
from groundhop.training.hotload.tensor_delta import Coded, Delta, Entry, TensorDelta, chunks_of, print_change

WORDS = 1 << 20
"""32-bit words that are summed at a time."""

_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Types of a device's bits: torch has few operations for unsigned ones."""


def bits_on_device(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The row-major bits of a tensor, one axis, where it lies; no copy of a contiguous one. Raises: InputError for another size."""
    flat = tensor.detach().contiguous().reshape(-1).view(_SIGNED[spec.unit.itemsize])
    if flat.numel() != spec.size:
        raise InputError(f"{spec.name}: need {spec.size} elements of {spec.unit}, got {flat.numel()}")
    return flat


def to_host(bits: torch.Tensor) -> Bits:
    """Bits in host memory."""
    plain = bits.cpu().numpy()
    unsigned: Bits = plain.view(np.dtype(f"u{plain.itemsize}"))
    return unsigned


def to_device(values: Bits, device: torch.device) -> torch.Tensor:
    """The inverse of `to_host`."""
    signed = values.view(np.uint8 if values.itemsize == 1 else np.dtype(f"i{values.itemsize}"))
    return torch.from_numpy(np.ascontiguousarray(signed)).to(device)


@dataclass(frozen=True, slots=True)
class DeviceStretch:
    """A `Stretch` of bits on a device."""

    bits: torch.Tensor

    @property
    def size(self) -> int:
        """Elements."""
        return int(self.bits.numel())

    def all(self) -> Bits:
        """Every element."""
        return to_host(self.bits)

    def at(self, positions: Ranks) -> Bits:
        """Those elements."""
        return to_host(self.bits[self._index(positions)])

    def choose_bounds(self, before: Bits, field: Field) -> list[int]:
        """As `classes.choose_bounds`, of the same sample."""
        keys = self._keys(field) & ((1 << field.bits) - 1)
        inside = torch.arange(self.size, device=self.bits.device) % sample_step(self.size) < SAMPLE_BLOCK
        sampled = torch.bincount(keys[inside], minlength=1 << field.bits).cpu().numpy()
        return split_exponents(sampled, before, self.size, field)

    def rank(self, positions: Ranks, field: Field, bounds: Bounds) -> Ranked:
        """As `classes.rank_in_classes`."""
        index, classes = self._index(positions), self._classes(field, bounds)
        mine = classes[index]
        order = torch.argsort(mine, stable=True)
        ranks, counts, totals = [], [], []
        for kind in range(len(bounds) + 1):
            among = torch.cumsum(classes == kind, 0)
            chosen = index[mine == kind]
            ranks.append(among[chosen] - 1)
            counts.append(chosen.numel())
            totals.append(int(among[-1]))
        joined = torch.cat(ranks).cpu().numpy().astype(np.uint32)
        return Ranked(order.cpu().numpy(), joined, counts, totals)

    def place(self, ranks: Sequence[Ranks], totals: Sequence[int], field: Field, bounds: Bounds) -> Placed | None:
        """As `classes.place`."""
        classes = self._classes(field, bounds)
        found = []
        for kind, (wanted, total) in enumerate(zip(ranks, totals, strict=True)):
            members = torch.nonzero(classes == kind).reshape(-1)
            if members.numel() != total:
                return None
            found.append(members[self._index(wanted)])
        positions, sources = torch.sort(torch.cat(found))
        return Placed(positions.cpu().numpy().astype(np.uint32), sources.cpu().numpy(), to_host(self.bits[positions]))

    def _index(self, positions: Ranks) -> torch.Tensor:
        return torch.from_numpy(positions.astype(np.int64)).to(self.bits.device)

    def _keys(self, field: Field) -> torch.Tensor:
        width = 8 * self.bits.element_size()
        return (self.bits.to(torch.int64) & ((1 << width) - 1)) >> field.shift

    def _classes(self, field: Field, bounds: Bounds) -> torch.Tensor:
        table = torch.from_numpy(class_table(field, bounds)).to(self.bits.device)
        return table[self._keys(field)]


def encode_on_device(
    spec: TensorSpec,
    old: torch.Tensor,
    new: torch.Tensor,
    *,
    encoding: Encoding = "auto",
    prints: tuple[Fingerprint | None, Fingerprint | None] = (None, None),
) -> TensorDelta | None:
    """As `encode_tensor`, for tensors on one device; the same bytes."""
    before, after = bits_on_device(old, spec), bits_on_device(new, spec)
    coded: list[Coded] = []
    for start, stop in spans(spec.size, CHUNK_ELEMENTS):
        held, made = DeviceStretch(before[start:stop]), DeviceStretch(after[start:stop])
        local = torch.nonzero(held.bits != made.bits).reshape(-1).cpu().numpy().astype(np.uint32)
        moved = Moved(local, held.at(local), made.at(local))
        coded.append(Coded(encode_chunk(spec, held, made, moved, start, encoding), start, moved))
    positions = np.concatenate(
        [np.empty(0, np.int64), *(one.moved.positions.astype(np.int64) + one.start for one in coded)]
    )
    if not positions.size:
        return None
    base = prints[0] or fingerprint_on_device(before)
    return TensorDelta(spec, base, prints[1] or base + print_change(coded), chunks_of(coded), positions)


def changes_on_device(delta: Delta, entry: Entry, tensor: torch.Tensor) -> Iterator[Change]:
    """The changes of a tensor whose old bits lie on a device; in context encoding only the changed ones leave it."""
    bits = bits_on_device(tensor, entry.spec)
    return delta.changes(entry, lambda start, stop: DeviceStretch(bits[start:stop]))


def scatter_on_device(change: Change, bits: torch.Tensor) -> None:
    """Write a change to the bits (`bits_on_device`) of a whole tensor, in place."""
    values = to_device(change.values, bits.device)
    part = bits[change.start :]
    index: Any = slice(0, values.numel())
    if change.positions is not None:
        index = torch.from_numpy(change.positions.astype(np.int64)).to(bits.device)
    match change.operation:
        case "overwrite":
            part[index] = values
        case "xor":
            part[index] = part[index] ^ values
        case "add":
            part[index] = part[index] + values


def fingerprint_on_device(bits: torch.Tensor, start: int = 0) -> Fingerprint:
    """As `fingerprint`, of bits as `bits_on_device` gives them; only the sums leave the device."""
    each = WORD_BYTES // bits.element_size()
    head = min(-start % each, bits.numel())
    tail = head + (bits.numel() - head) // each * each
    total = fingerprint(to_host(bits[:head]), start) + fingerprint(to_host(bits[tail:]), start + tail)
    words = _words(bits[head:tail])
    for low, high in spans(words.numel(), WORDS):
        total += _sum_words(words[low:high], (start + head) // each + low)
    return total


def _words(bits: torch.Tensor) -> torch.Tensor:
    """32-bit words; a copy where the storage is not aligned to them."""
    if bits.storage_offset() * bits.element_size() % WORD_BYTES:
        bits = bits.clone()
    return bits.view(torch.int32)


def _sum_words(words: torch.Tensor, start: int) -> Fingerprint:
    # torch's 64-bit products and sums wrap; its right shift keeps the sign, which the mask takes away.
    key = (torch.arange(start + 1, start + 1 + words.numel(), device=words.device)) * _wrapped(GOLDEN)
    key = (key ^ _shifted(key, 30)) * _wrapped(MIX_1)
    key = (key ^ _shifted(key, 27)) * _wrapped(MIX_2)
    key ^= _shifted(key, 31)
    wide = words.to(torch.int64) & 0xFFFFFFFF
    first = int((key * wide).sum())
    key *= _wrapped(MIX_3)
    second = int(((key ^ _shifted(key, 32)) * wide).sum())
    return Fingerprint(first % MODULUS, second % MODULUS)


def _shifted(key: torch.Tensor, places: int) -> torch.Tensor:
    return (key >> places) & ((1 << (64 - places)) - 1)


def _wrapped(number: int) -> int:
    return number - MODULUS if number >= MODULUS // 2 else number

"""Fingerprints of canonical tensors from a rank's own elements, and their sum over the ranks that share a tensor."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from msgspec import Struct

from groundhop.errors import ChecksumError
from groundhop.training.hotload.bits import Bits, TensorSpec
from groundhop.training.hotload.fingerprint import Fingerprint, fingerprint, fingerprint_at
from groundhop.training.hotload.receiver.placement import Placed, Row, bits_from, cast

CHUNK_UNITS = 1 << 22
"""Most units that are brought to the host at a time."""


class Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank says of one block of a canonical tensor that it holds."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """The block, in units of the tensor's bits."""
    print: str = ""
    """Fingerprint of its elements at their canonical positions."""
    bits: bytes = b""
    """The elements themselves in canonical order, where other ranks need them."""


def row_print(spec: TensorSpec, row: Row, flat: Any) -> Fingerprint:
    """The print of a row's elements, read from its storage (`flat`, in units)."""
    total = Fingerprint.zero
    units = row.read(flat)
    for start in range(0, row.size, CHUNK_UNITS):
        stop = min(start + CHUNK_UNITS, row.size)
        chunk = units[start:stop]
        bits = bits_from(chunk if row.dtype == spec.dtype else cast(chunk.contiguous(), row.dtype, spec.dtype))
        if row.source_strides == (1,):
            total += fingerprint(bits, row.source_offset + start)
        else:
            total += fingerprint_at(row.positions(start, stop), bits)
    return total


def lend(placement: Any, placed: Placed) -> list[Part]:
    """The elements of a tensor of which this rank holds a part."""
    lent = []
    for row in (placed.rows[part] for part in placed.parts):
        units = row.read(placement.flat(row, placed)).contiguous()
        bits = bits_from(units if row.dtype == placed.spec.dtype else cast(units, row.dtype, placed.spec.dtype))
        lent.append(Part(offset=row.source_offset, sizes=row.sizes, strides=row.source_strides, bits=bits.tobytes()))
    return lent


def borrow(spec: TensorSpec, said: Iterable[Part]) -> Bits:
    """The whole tensor from what all ranks lend."""
    found = np.zeros(spec.size, dtype=spec.unit)
    for part in said:
        row = Row(0, part.offset, 0, part.sizes, part.strides, part.strides, spec.dtype)
        found[row.positions(0, row.size)] = np.frombuffer(part.bits, dtype=spec.unit)
    return found


def part_of(row: Row, found: Fingerprint) -> Part:
    """A row's print as it is told to other ranks."""
    return Part(offset=row.source_offset, sizes=row.sizes, strides=row.source_strides, print=found.hex())


def whole_part(spec: TensorSpec, found: Fingerprint) -> Part:
    """The print of a tensor that a rank holds entirely beside the model."""
    return Part(offset=0, sizes=(spec.size,), strides=(1,), print=found.hex())


def parts_of(placed: Placed, prints: Sequence[Fingerprint]) -> list[Part]:
    """What a rank says of one tensor; `prints` in the order of `placed.parts`, or one for a kept tensor."""
    if placed.kept:
        return [whole_part(placed.spec, prints[0])]
    return [part_of(placed.rows[part], found) for part, found in zip(placed.parts, prints, strict=True)]


def merge(spec: TensorSpec, said: Iterable[Part]) -> Fingerprint | None:
    """The print of a tensor from what all ranks say; None where nobody holds any of it.

    A block that several ranks hold counts once, and they must agree on it.
    Raises: ChecksumError where they do not, or where the blocks together are not the whole tensor.
    """
    blocks: dict[tuple[Any, ...], str] = {}
    for part in said:
        if blocks.setdefault((part.offset, part.sizes, part.strides), part.print) != part.print:
            raise ChecksumError(f"{spec.name}: two ranks hold different bits of the same elements")
    if not blocks:
        return None if spec.size else Fingerprint.zero
    whole = blocks.get((0, (spec.size,), (1,)))
    if whole is not None:
        return Fingerprint.from_hex(whole)
    held = sum(prod(sizes) for _, sizes, _ in blocks)
    if held != spec.size:
        raise ChecksumError(f"{spec.name}: the ranks hold {held} of its {spec.size} elements")
    return sum((Fingerprint.from_hex(found) for found in blocks.values()), Fingerprint.zero)


def merge_all(
    specs: Mapping[str, TensorSpec], ranks: Sequence[Mapping[str, list[Part]]], unheld: Mapping[str, Fingerprint]
) -> dict[str, Fingerprint]:
    """The prints of all tensors that any rank names; `unheld` says what those are that nobody holds."""
    names = dict.fromkeys(name for rank in ranks for name in rank)
    found: dict[str, Fingerprint] = {}
    for name in names:
        merged = merge(specs[name], (part for rank in ranks for part in rank.get(name, ())))
        found[name] = unheld[name] if merged is None else merged
    return found

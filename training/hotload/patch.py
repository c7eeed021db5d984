"""Apply a delta to weights in memory: all is decoded and every result proved before the first element is written."""

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass

from groundhop.errors import ChecksumError, InputError
from groundhop.training.hotload.bits import Bits, TensorSpec, Weights
from groundhop.training.hotload.changes import Change, check_bits
from groundhop.training.hotload.fingerprint import (
    Fingerprint,
    fingerprint,
    fingerprint_at,
    fingerprint_change,
    state_digest,
)
from groundhop.training.hotload.kernels import in_parallel
from groundhop.training.hotload.tensor_delta import Delta, Entry


@dataclass(frozen=True, slots=True)
class Step:
    """One change, ready to be written and to be taken back."""

    bits: Bits
    change: Change
    before: Bits
    after: Bits


def prints_of(weights: Weights) -> dict[str, Fingerprint]:
    """The fingerprints of all tensors: one read of the state."""
    return {name: fingerprint(weights.bits(name)) for name in weights.specs}


def print_of(change: Change, values: Bits) -> Fingerprint:
    """What the elements that `change` names add to the fingerprint of their tensor where they hold `values`."""
    if change.positions is None:
        return fingerprint(values, change.start)
    return fingerprint_at(change.positions, values, change.start)


def apply_delta(
    delta: Delta,
    weights: Weights,
    prints: MutableMapping[str, Fingerprint] | None = None,
    *,
    threads: int | None = None,
) -> None:
    """Move `weights` to the delta's state; tensors that are there already stay as they are.

    `prints`: the fingerprints of all tensors of `weights`, where the caller keeps them. Then no tensor is read whole
    (but by context encoding), the digest of the state is checked too, and the new prints are put in. Without them each
    tensor of the delta is read once.
    Raises: ChecksumError for another base or result, InputError for a delta that does not fit; `weights` are as before.
    """
    known = dict(prints or {})
    tensors = [(entry, _tensor(entry, weights)) for entry in delta.entries]
    planned = in_parallel(lambda one: list(_plan(delta, *one, known.get(one[0].name), threads)), tensors, threads)
    known.update({entry.name: entry.fingerprint for entry in delta.entries})
    if prints is not None and delta.digest:
        _check_state(delta, known, weights)
    _write([step for steps in planned for step in steps])
    if prints is not None:
        prints.update(known)


def _tensor(entry: Entry, weights: Weights) -> Bits:
    spec: TensorSpec | None = weights.specs.get(entry.name)
    if spec is None:
        raise InputError(f"the delta changes {entry.name}, which these weights do not have")
    if spec != entry.spec:
        raise InputError(
            f"{entry.name}: the delta is for {entry.dtype}{list(entry.shape)}, this is {spec.dtype}{list(spec.shape)}"
        )
    bits = weights.bits(entry.name)
    check_bits(entry.name, bits, spec.unit, spec.size)
    if entry.chunks and not bits.flags.writeable:
        raise InputError(f"{entry.name}: these weights cannot be written")
    return bits


def _plan(delta: Delta, entry: Entry, bits: Bits, present: Fingerprint | None, threads: int | None) -> Iterator[Step]:
    """The steps of one tensor, none where it is at its end already; the last one comes only if the end is right."""
    present = present or fingerprint(bits, threads=threads)
    if present == entry.fingerprint:
        return
    if entry.base_fingerprint not in (None, present):
        raise ChecksumError(
            f"{entry.name}: version {delta.version} builds on {entry.base_fingerprint.hex()}, this is {present.hex()}"  # type: ignore[union-attr]
        )
    for change in delta.changes(entry, lambda start, stop: bits[start:stop]):
        before = change.gather(bits) if change.before is None else change.before
        after = change.result(before)
        if change.positions is None:
            present += print_of(change, after) - print_of(change, before)
        else:
            present += fingerprint_change(change.positions, before, after, change.start)
        yield Step(bits, change, before, after)
    if present != entry.fingerprint:
        raise ChecksumError(
            f"{entry.name}: version {delta.version} would give {present.hex()}, it promises {entry.fingerprint.hex()}"
        )


def _check_state(delta: Delta, known: MutableMapping[str, Fingerprint], weights: Weights) -> None:
    digest = state_digest(weights.specs, known)
    if digest != delta.digest:
        raise ChecksumError(
            f"version {delta.version} leads from {delta.base_digest[:12]} to {delta.digest[:12]}, here to {digest[:12]}: "
            "another base"
        )


def _write(steps: list[Step]) -> None:
    begun = 0
    try:
        for step in steps:
            begun += 1
            step.change.scatter(step.bits, step.after)
    except BaseException:
        for step in reversed(steps[:begun]):
            step.change.scatter(step.bits, step.before)
        raise

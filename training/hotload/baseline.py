"""The publisher's copy of the last committed state: what the next version is compared with.

A mapped baseline is one file of bits and one small card that says which snapshot they are. It advances by writing the new
bits of an attempt whose commit record is in the log: absolute bits, so that a kill half way is mended by writing them again.
The card moves after the bits. A baseline in memory is built anew from the store after a restart.
"""

import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from groundhop.errors import ChecksumError, InputError
from groundhop.training.hotload import durable
from groundhop.training.hotload.bits import Bits, TensorSpec, Weights
from groundhop.training.hotload.durable import clear_disk_errors
from groundhop.training.hotload.fingerprint import Fingerprint, fingerprint, state_digest
from groundhop.training.hotload.touched import Touched

CARD = "baseline.json"
ALIGNMENT = 64
MOST_CARD_BYTES = 1 << 28


class Card(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of `baseline.json`."""

    file: str
    """Name of the file of bits beside it."""
    identity: str
    version: int
    digest: str
    specs: tuple[TensorSpec, ...]
    """In the order of the file, each aligned to 64 bytes."""
    prints: tuple[str, ...]


class Baseline:
    """A `Weights` that only `advance` changes."""

    def __init__(
        self,
        arrays: Mapping[str, Bits],
        specs: Mapping[str, TensorSpec],
        prints: Mapping[str, Fingerprint],
        identity: str,
        version: int,
        mapped: tuple[Path, NDArray[Any]] | None = None,
    ) -> None:
        self.specs = specs
        self.prints: Mapping[str, Fingerprint] = dict(prints)
        self.identity = identity
        self.version = version
        self.digest = state_digest(specs, self.prints)
        self.followers: list[Callable[[Touched], None]] = []
        """Told of every row that `advance` writes: copies of the bits elsewhere."""
        self._arrays = arrays
        self._mapped = mapped

    def bits(self, name: str) -> Bits:
        """The bits of a tensor, read-only."""
        view = self._arrays[name].view()
        view.flags.writeable = False
        return view

    def advance(self, rows: Iterable[Touched], identity: str, version: int, digest: str) -> None:
        """Become the snapshot whose changes `rows` are. May be repeated after a kill at any point of it.

        Raises: ChecksumError when the fingerprints in `rows` do not add up to `digest`.
        """
        prints = dict(self.prints)
        for row in rows:
            array = self._arrays[row.name]
            if row.size != array.size or row.values.dtype.itemsize != array.dtype.itemsize:
                raise InputError(f"{row.name}: the attempt is for {row.size} units, the baseline has {array.size}")
            array[slice(None) if row.positions is None else row.positions] = row.values
            for follow in self.followers:
                follow(row)
            prints[row.name] = row.fingerprint
        if (found := state_digest(self.specs, prints)) != digest:
            raise ChecksumError(f"{identity}: its attempt adds up to {found[:12]}, promised was {digest[:12]}")
        self.prints, self.identity, self.version, self.digest = prints, identity, version, digest
        if self._mapped is not None:
            path, whole = self._mapped
            with clear_disk_errors(path):
                if isinstance(whole, np.memmap):
                    whole.flush()
                _write_card(path, self)

    def verify(self) -> None:
        """Read every bit. Raises: ChecksumError that names the first tensor that is not what the card says."""
        for name, expected in self.prints.items():
            if fingerprint(self._arrays[name]) != expected:
                raise ChecksumError(f"the baseline's {name} is not that of {self.identity}")


def make_baseline(weights: Weights, identity: str, version: int, folder: Path | None) -> Baseline:
    """A copy of `weights`: in `folder`, in place of one that is there, or in memory where that is None. Raises: SpaceError."""
    specs = dict(weights.specs)
    if folder is None:
        arrays = {name: weights.bits(name).copy() for name in specs}
        prints = {name: fingerprint(array) for name, array in arrays.items()}
        return Baseline(arrays, specs, prints, identity, version)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"baseline-{uuid.uuid4().hex}.bits"
    prints = {}
    # Written, not mapped, so that a full disk is an error here and not a signal later.
    with clear_disk_errors(path):
        try:
            with path.open("wb") as file:
                for name, spec in specs.items():
                    bits = np.ascontiguousarray(weights.bits(name))
                    if bits.size != spec.size or bits.dtype != spec.unit:
                        raise InputError(f"{name}: need {spec.size} of {spec.unit}, got {bits.size} of {bits.dtype}")
                    prints[name] = fingerprint(bits)
                    file.write(bits.view(np.uint8).data)
                    file.write(b"\0" * (-spec.nbytes % ALIGNMENT or (0 if spec.nbytes else ALIGNMENT)))
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        baseline = _mapped(path, specs, prints, identity, version)
        _write_card(path, baseline)
    for old in folder.glob("baseline-*.bits"):
        if old != path:
            old.unlink()
    return baseline


def open_baseline(folder: Path) -> Baseline | None:
    """The baseline in `folder`, None where there is none that can be used. Its bits are not verified yet."""
    try:
        raw = (folder / CARD).read_bytes()
        if len(raw) > MOST_CARD_BYTES:
            return None
        card = msgspec.json.decode(raw, type=Card)
        path = folder / card.file
        specs = {spec.name: spec for spec in card.specs}
        prints = {spec.name: Fingerprint.from_hex(text) for spec, text in zip(card.specs, card.prints, strict=True)}
        if path.parent != folder or path.stat().st_size != _offsets(specs)[1]:
            return None
        return _mapped(path, specs, prints, card.identity, card.version)
    except (FileNotFoundError, msgspec.MsgspecError, InputError, ValueError):
        return None


def _offsets(specs: Mapping[str, TensorSpec]) -> tuple[dict[str, int], int]:
    """Where each tensor begins in the file, and the file's size."""
    offsets: dict[str, int] = {}
    end = 0
    for name, spec in specs.items():
        offsets[name] = end
        end += spec.nbytes + (-spec.nbytes % ALIGNMENT or (0 if spec.nbytes else ALIGNMENT))
    return offsets, end


def _mapped(
    path: Path, specs: Mapping[str, TensorSpec], prints: Mapping[str, Fingerprint], identity: str, version: int
) -> Baseline:
    offsets, end = _offsets(specs)
    whole: NDArray[Any] = np.memmap(path, np.uint8, "r+") if end else np.empty(0, np.uint8)
    arrays = {
        name: np.asarray(whole[offsets[name] : offsets[name] + spec.nbytes]).view(spec.unit)
        for name, spec in specs.items()
    }
    return Baseline(arrays, specs, prints, identity, version, (path, whole))


def _write_card(path: Path, baseline: Baseline) -> None:
    card = Card(
        file=path.name,
        identity=baseline.identity,
        version=baseline.version,
        digest=baseline.digest,
        specs=tuple(baseline.specs.values()),
        prints=tuple(baseline.prints[name].hex() for name in baseline.specs),
    )
    durable.write(path.with_name(CARD), msgspec.json.encode(card))

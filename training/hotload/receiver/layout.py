"""Where a model's parameters and buffers lie: storages, addresses, and whether any of it moved."""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import torch

from groundhop.errors import PlacementError
from groundhop.training.hotload.bits import TensorSpec
from groundhop.training.hotload.receiver.placement import DTYPES, Row, Storage
from groundhop.training.hotload.receiver.recorder import Box, flat_bytes, key_of


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
def rebound_again(model: Any) -> Iterator[None]:
    """Give every parameter its object and its storage back, whatever a loader put in its place."""
    held = [(m, name, p, p.data) for m in model.modules() for name, p in m._parameters.items() if p is not None]
    try:
        yield
    finally:
        for module, name, parameter, data in held:
            module._parameters[name] = parameter
            if parameter.data_ptr() != data.data_ptr() or parameter.shape != data.shape:
                parameter.data = data


def itemsize_of(spec: TensorSpec, row: Row) -> int:
    """Bytes of a unit in the row's storage."""
    return int(spec.unit.itemsize if row.dtype == spec.dtype else DTYPES[row.dtype].itemsize)


def box_bytes(flat: Any, box: Box) -> Any:
    """A box as bytes, in the shape (*sizes, bytes an element), seen on a storage's bytes."""
    each = box.dtype.itemsize
    return torch.as_strided(flat, (*box.sizes, each), (*(s * each for s in box.strides), 1), box.offset * each)


def row_bytes(flat: Any, spec: TensorSpec, row: Row) -> Any:
    """A row's places as bytes, seen on a storage's bytes."""
    each = itemsize_of(spec, row)
    strides = (*(stride * each for stride in row.place_strides), 1)
    return torch.as_strided(flat, (*row.sizes, each), strides, row.place_offset * each)

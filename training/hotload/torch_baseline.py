"""The baseline once more, where a trainer's tensors lie: what differs is found there, and only that crosses to the host.

A tensor's copy is sent to its device at the first comparison, and takes what is committed from then on. It costs as many bytes
there as the tensor has in the checkpoint. Coding, write-ahead set and commits stay on the host, with the baseline's own bits.
"""

import logging
from collections.abc import Container
from dataclasses import dataclass

import numpy as np
import torch

from groundhop.training.hotload.baseline import Baseline
from groundhop.training.hotload.bits import Bits, TensorSpec, bits_of
from groundhop.training.hotload.compare import Differences, New, compare
from groundhop.training.hotload.fingerprint import Fingerprint, fingerprint_change
from groundhop.training.hotload.kernels import spans
from groundhop.training.hotload.named import Whole, as_stored
from groundhop.training.hotload.torch_codec import bits_on_device, fingerprint_on_device, to_host
from groundhop.training.hotload.touched import Touched

logger = logging.getLogger(__name__)

CHUNK_ELEMENTS = 1 << 26
"""Elements that are compared at a time, which bounds what the comparison takes on the device."""


class DeviceBaseline:
    """Copies of a baseline's tensors on devices. They follow it when it advances."""

    def __init__(self, baseline: Baseline, devices: Container[str]) -> None:
        """`devices`: types of devices, as torch names them, whose tensors are compared where they lie."""
        self.baseline = baseline
        self._devices = devices
        self._copies: dict[str, torch.Tensor] = {}
        baseline.followers.append(self._follow)

    def take(self, tensor: object, spec: TensorSpec) -> New:
        """As `named.cast`; of a tensor on one of the devices, its bits there."""
        typed = as_stored(tensor, spec)
        if isinstance(typed, Whole):
            return typed.bits
        if isinstance(typed, torch.Tensor) and typed.device.type in self._devices:
            return OnDevice(self, spec, bits_on_device(typed, spec))
        bits: Bits = bits_of(typed).view(spec.unit)
        return bits

    def find(self, spec: TensorSpec, bits: torch.Tensor, old: Bits) -> Differences:
        """Where `bits` differ from the copy, which is made of `old` where there is none."""
        copy = self._copies.get(spec.name)
        if copy is None or copy.device != bits.device:
            copy = self._copies[spec.name] = _to_device(old, bits.device)
        found = [
            torch.nonzero(copy[start:stop] != bits[start:stop]).reshape(-1) + start
            for start, stop in spans(spec.size, CHUNK_ELEMENTS)
        ]
        index = torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=bits.device)
        return Differences(index.cpu().numpy(), to_host(bits[index]))

    def forget(self, name: str) -> None:
        """Give a copy up."""
        self._copies.pop(name, None)

    def _follow(self, row: Touched) -> None:
        copy = self._copies.get(row.name)
        if copy is None:
            return
        try:
            values = _to_device(row.values, copy.device)
            if row.positions is None:
                copy.copy_(values)
            else:
                copy[_to_device(row.positions, copy.device)] = values
        except RuntimeError as error:
            # The version is committed whatever becomes of a copy.
            logger.warning("%s: its copy on %s is given up: %s", row.name, copy.device, error)
            self.forget(row.name)


@dataclass(frozen=True, slots=True)
class OnDevice:
    """A tensor's new bits on a device."""

    home: DeviceBaseline
    spec: TensorSpec
    bits: torch.Tensor

    def all(self) -> Bits:
        """Every one of them, in host memory."""
        return to_host(self.bits)

    def compare(self, old: Bits, before: Fingerprint) -> Differences:
        """Where they differ from `old`, whose print is `before`.

        Compared on the host where the device lacks the memory, and where the differences do not add up to the print of all
        bits, read on the device: a copy that somebody wrote to must not decide what is published.
        """
        try:
            found = self.home.find(self.spec, self.bits, old)
            after = before + fingerprint_change(found.positions, old[found.positions], found.values)
            if fingerprint_on_device(self.bits) == after:
                return found
            logger.warning("%s: its copy on %s is not the baseline and is made anew", self.spec.name, self.bits.device)
        except torch.OutOfMemoryError as error:
            logger.warning("%s is compared on the host: %s", self.spec.name, error)
        self.home.forget(self.spec.name)
        return compare(old, self.all(), before)


def _to_device(array: Bits, device: torch.device) -> torch.Tensor:
    """A copy on a device, also where that is the CPU. Bits get torch's signed types, as `bits_on_device` gives them."""
    signed = array.view(np.dtype(f"i{array.itemsize}")) if array.dtype.kind == "u" and array.itemsize > 1 else array
    return torch.tensor(signed, device=device)

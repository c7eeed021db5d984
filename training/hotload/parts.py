"""Code tensors in the wanted layout, gather them into parts, and hand these to the store while the next ones are coded."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from groundhop.training.hotload.bits import Bits, TensorSpec
from groundhop.training.hotload.changes import Encoding
from groundhop.training.hotload.delta import TensorDelta, dump_delta, encode_moved
from groundhop.training.hotload.fingerprint import Fingerprint
from groundhop.training.hotload.store.index import Layout
from groundhop.training.hotload.store.shared_layout import SharedTensor, encode_shared, write_shared
from groundhop.training.hotload.store.writer import SnapshotWriter
from groundhop.training.hotload.touched import TouchedWriter

Prints = tuple[Fingerprint, Fingerprint]
"""Of a tensor's old and new bits."""


class Sent(NamedTuple):
    """What is sent of a tensor; there is at least one element."""

    positions: NDArray[np.int64]
    """Increasing."""
    values: Bits
    """The new bits there."""
    overwrite: bool = False
    """Whether values are sent as they are, some perhaps equal to the old ones; else all differ, and differences may be sent."""


class Coder(Protocol):
    """Codes tensors that have something to send, and joins them into a part."""

    def code(self, spec: TensorSpec, old: Bits, sent: Sent, prints: Prints) -> tuple[Any, int]:
        """One tensor, coded, and its bytes."""
        ...

    def join(self, tensors: list[Any]) -> bytes | None:
        """A part; None where the layout has none for no tensors."""
        ...


class OurCoder:
    """Our own codec."""

    def __init__(self, version: int, encoding: Encoding) -> None:
        self._version = version
        self._encoding: Encoding = encoding

    def code(self, spec: TensorSpec, old: Bits, sent: Sent, prints: Prints) -> tuple[TensorDelta, int]:
        """One tensor, coded, and its bytes."""
        delta = encode_moved(
            spec, old, sent.positions, sent.values, encoding=self._encoding, overwrite=sent.overwrite, prints=prints
        )
        return delta, delta.nbytes

    def join(self, tensors: list[TensorDelta]) -> bytes:
        """A part. The index tells the state's digests, which are not known while parts leave."""
        return dump_delta(tensors, version=self._version, base_digest="", digest="")


class SharedCoder:
    """The layout that other systems read."""

    def code(self, spec: TensorSpec, old: Bits, sent: Sent, prints: Prints) -> tuple[SharedTensor, int]:
        """One tensor, coded, and its bytes. The layout speaks of every byte of a tensor, so it is put together first."""
        new = old.copy()
        new[sent.positions] = sent.values
        if sent.overwrite:
            tensor = encode_shared(spec, old, new, operation="overwrite", also=sent.positions)
        else:
            tensor = encode_shared(spec, old, new)
        assert tensor is not None
        return tensor, len(tensor.payload)

    def join(self, tensors: list[SharedTensor]) -> bytes | None:
        """A part; an empty delta has none."""
        return write_shared(tensors) if tensors else None


def make_coder(layout: Layout, version: int, encoding: Encoding) -> Coder:
    """The coder of a layout."""
    match layout:
        case "groundhop":
            return OurCoder(version, encoding)
        case "shared":
            return SharedCoder()


class PartWriter:
    """Whole tensors, about `part_bytes` together. What a part holds is in the write-ahead set before the part leaves."""

    def __init__(
        self,
        coder: Coder,
        writer: SnapshotWriter,
        journal: TouchedWriter,
        part_bytes: int,
        leaving: Callable[[], None],
    ) -> None:
        self.bytes = 0
        """Of all parts so far."""
        self._coder, self._writer, self._journal = coder, writer, journal
        self._part_bytes, self._leaving = part_bytes, leaving
        self._waiting: list[Any] = []
        self._waiting_bytes = 0
        self._parts = 0

    def add(self, spec: TensorSpec, old: Bits, sent: Sent, prints: Prints) -> None:
        """Take one tensor that has something to send; its row is in the write-ahead set, though not yet on disk."""
        tensor, size = self._coder.code(spec, old, sent, prints)
        self._waiting.append(tensor)
        self._waiting_bytes += size
        if self._waiting_bytes >= self._part_bytes:
            self._send()

    def finish(self) -> None:
        """Send the rest. A step that changes nothing sends one part without tensors, so that it is a version as any other."""
        if self._waiting or not self._parts:
            self._send()

    def _send(self) -> None:
        self._journal.sync()
        self._leaving()
        data = self._coder.join(self._waiting)
        if data is not None:
            self._writer.add(data)
            self.bytes += len(data)
        self._parts += 1
        self._waiting, self._waiting_bytes = [], 0

"""Steps that the ranks of one replica take together: if one fails, all fail, and if one is dirty, all are."""

from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from groundhop.errors import ServerError
from groundhop.training.hotload.receiver.prints import Part

Exchange = Callable[[bytes], Sequence[bytes]]
"""Gives what every rank of the replica said, this one's included, in rank order; all ranks call it equally often."""
Parts = dict[str, list[Part]]
"""What a rank says of the tensors that it holds something of, by name."""


class _Ballot(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank tells the others after a step."""

    error: str = ""
    dirty: str = ""
    parts: Parts = {}


def alone(mine: bytes) -> Sequence[bytes]:
    """The exchange of a replica of one rank."""
    return [mine]


class Ranks:
    """One rank's end of the conversation."""

    def __init__(self, exchange: Exchange = alone) -> None:
        self._exchange = exchange
        self.count = 0
        """How many there are; known after the first step."""
        self.dirty = ""
        """Why nobody may say that the replica holds what it is called; empty when clean."""

    def together(self, action: Callable[[], Parts | None]) -> list[Parts]:
        """Do one step, and learn what each rank says. Raises: this rank's error, or else another's as ServerError."""
        mine: Exception | None = None
        parts: Parts = {}
        try:
            parts = action() or {}
        except Exception as error:
            mine = error
        ballot = _Ballot(error=f"{type(mine).__name__}: {mine}" if mine else "", dirty=self.dirty, parts=parts)
        said = [msgspec.msgpack.decode(one, type=_Ballot) for one in self._exchange(msgspec.msgpack.encode(ballot))]
        self.count = len(said)
        self.dirty = self.dirty or next((other.dirty for other in said if other.dirty), "")
        if mine is not None:
            raise mine
        for rank, other in enumerate(said):
            if other.error:
                raise ServerError(f"rank {rank}: {other.error}")
        return [other.parts for other in said]

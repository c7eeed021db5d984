"""What a replica may claim to hold: the receiving half of the commit protocol, over any weights that can be written."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from groundhop.training.hotload.bits import Weights

if TYPE_CHECKING:
    from groundhop.training.hotload.delta import Delta


class HotLoad(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One try to bring a replica to a snapshot."""

    txn: str
    """Names the try; parts of another try never mix with it."""
    identity: str
    version: int
    base: str
    """Identity that the parts build on."""
    base_digest: str
    digest: str
    """Of the whole state, before and after."""
    operation: Literal["differential", "overwrite"]
    epoch: int
    """Fencing number of the publisher."""


class Dirty(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of the journal: nobody knows which of the parts of `txn` have been written."""

    base: str
    target: str
    txn: str
    epoch: int


class ReceiverCore:
    """Applies parts to weights in place. From the first write to `commit` it is dirty and must not serve."""

    def __init__(self, weights: Weights, identity: str, journal: Path | None = None, *, verify: bool = True) -> None:
        """Hold `weights` as `identity`; an existing `journal` makes it dirty from the start."""
        raise NotImplementedError

    @property
    def identity(self) -> str:
        """The last identity that was committed here."""
        raise NotImplementedError

    @property
    def dirty(self) -> Dirty | None:
        """What an unfinished try may have written, None when clean."""
        raise NotImplementedError

    def begin(self, request: HotLoad) -> None:
        """Open a try; the journal is on disk before this returns. Raises: InputError when it does not fit, untouched."""
        raise NotImplementedError

    def apply(self, key: str, delta: "Delta") -> int:
        """Write the part with content `key`, unless this try wrote it before. Returns the number of written elements."""
        raise NotImplementedError

    def finish(self) -> str:
        """Check every bit against the promised digest and return it. Raises: ChecksumError; then it stays dirty."""
        raise NotImplementedError

    def commit(self, txn: str) -> None:
        """Claim the new identity: clean again."""
        raise NotImplementedError

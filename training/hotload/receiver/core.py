"""What a replica may claim to hold: the receiving half of the commit protocol, over any weights that can be written.

Between the first write and `commit` a replica is DIRTY: the journal on its disk says so before the write, and it serves
nobody (`control-plane.md` 5.3, J-I4). A differential snapshot is taken from exactly its base; an overwriting one also from
whatever unfinished attempts on that base have left. A part counts once in a try, however often it is delivered.
"""

from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from groundhop.errors import ChecksumError, FencedError, InputError
from groundhop.training.hotload import durable
from groundhop.training.hotload.bits import Bits, TensorSpec, Weights
from groundhop.training.hotload.changes import Change
from groundhop.training.hotload.delta import Delta, Entry, prints_of
from groundhop.training.hotload.fingerprint import Fingerprint, fingerprint, fingerprint_at, state_digest


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

    def __init__(self, weights: Weights, identity: str, journal: Path | None = None) -> None:
        """Hold `weights` as `identity`; a `journal` that exists makes it dirty from the start. Reads all weights once."""
        self._weights = weights
        self._prints = prints_of(weights)
        self._journal = journal
        self._dirty = _read(journal)
        self._identity = identity
        self._origin: str | None = None
        self._epoch = self._dirty.epoch if self._dirty else 0
        self._open: HotLoad | None = None
        self._seen: set[str] = set()

    @property
    def identity(self) -> str:
        """The last identity that was committed here."""
        return self._identity

    @property
    def dirty(self) -> Dirty | None:
        """What an unfinished try may have written, None when clean."""
        return self._dirty

    @property
    def digest(self) -> str:
        """Of what it holds, by the fingerprints that it keeps while it writes."""
        return state_digest(self._weights.specs, self._prints)

    def begin(self, request: HotLoad) -> bool:
        """Open a try; the journal is on disk when this returns. False where the replica holds the snapshot already.

        Raises: FencedError for an older publisher, InputError where the replica stands on another base; both untouched.
        """
        if request.epoch < self._epoch:
            raise FencedError(f"{request.identity} comes from epoch {request.epoch}, epoch {self._epoch} was here")
        self._epoch = request.epoch
        if self._dirty is None and (self._identity, self.digest) == (request.identity, request.digest):
            return False
        self._require_base(request)
        # While tries on one base follow each other, that base stays what can be overwritten.
        self._dirty = Dirty(base=request.base, target=request.identity, txn=request.txn, epoch=request.epoch)
        _write(self._journal, self._dirty)
        self._open, self._seen = request, set()
        return True

    def apply(self, key: str, delta: Delta) -> int:
        """Write the part with content `key`, unless this try wrote it before. Returns the number of written elements.

        Raises: ChecksumError for a tensor that is not the base's, InputError for one that does not fit; it stays dirty.
        """
        if self._open is None:
            raise InputError(f"part {key}: no try is open")
        if self._is_repeated(key):
            return 0
        return sum(self._change(delta, entry) for entry in delta.entries)

    def finish(self) -> str:
        """Check every bit against the promised digest and return it. Raises: ChecksumError; then it stays dirty."""
        if self._open is None:
            raise InputError("no try is open")
        self._prints = prints_of(self._weights)
        self._require_new(self._open)
        return self.digest

    def commit(self, txn: str) -> None:
        """Claim the new identity: clean again. Raises: InputError where `txn` is not the open try, ChecksumError where it is not finished."""
        if self._open is None or self._open.txn != txn:
            raise InputError(f"try {txn} is not open")
        self._require_new(self._open)
        self._origin, self._identity = self._open.base, self._open.identity
        self._clean()

    def abort(self) -> None:
        """Close the try; the replica stays dirty and a later one mends it."""
        self._open = None

    def replaced(self, identity: str, digest: str) -> None:
        """Say that the weights were loaded whole, whatever was there. Raises: ChecksumError where they are not `digest`."""
        self._prints = prints_of(self._weights)
        if self.digest != digest:
            raise ChecksumError(f"{identity} was loaded as {self.digest[:12]}, promised was {digest[:12]}")
        self._origin, self._identity = None, identity
        self._clean()

    def _clean(self) -> None:
        self._open, self._seen, self._dirty = None, set(), None
        _write(self._journal, None)

    def _require_base(self, request: HotLoad) -> None:
        """A try that was never committed leaves its base, and what it wrote, to an overwriting one."""
        match request.operation:
            case "differential":
                fits = self._dirty is None and (self._identity, self.digest) == (request.base, request.base_digest)
            case "overwrite":
                fits = request.base in ((self._dirty.base,) if self._dirty else (self._identity, self._origin))
        if not fits:
            state = f"{self._dirty.base}, half written to {self._dirty.target}" if self._dirty else self._identity
            raise InputError(f"{request.identity}: base {request.base} needed, have {state}")

    def _require_new(self, request: HotLoad) -> None:
        if self.digest != request.digest:
            raise ChecksumError(f"{request.identity} gives {self.digest[:12]}, promised was {request.digest[:12]}")

    def _is_repeated(self, key: str) -> bool:
        """Whether this try took the part before; noted before the first write, so that half a part is never repeated."""
        if key in self._seen:
            return True
        self._seen.add(key)
        return False

    def _change(self, delta: Delta, entry: Entry) -> int:
        bits = self._bits(entry)
        self._require_old(entry)
        for change in delta.changes(entry, lambda start, stop: bits[start:stop]):
            before = change.gather(bits)
            after = change.result(before)
            self._prints[entry.name] += _print(change, after) - _print(change, before)
            change.scatter(bits, after)
        return entry.changed

    def _bits(self, entry: Entry) -> Bits:
        spec: TensorSpec | None = self._weights.specs.get(entry.name)
        if spec != entry.spec:
            raise InputError(f"{entry.name}: the part is for {entry.dtype}{list(entry.shape)}, here is {spec}")
        return self._weights.bits(entry.name)

    def _require_old(self, entry: Entry) -> None:
        if entry.base_fingerprint is not None and self._prints[entry.name] != entry.base_fingerprint:
            raise ChecksumError(f"{entry.name}: the part builds on other bits than those here")


def _print(change: Change, values: Bits) -> Fingerprint:
    if change.positions is None:
        return fingerprint(values, change.start)
    return fingerprint_at(change.positions, values, change.start)


def _read(journal: Path | None) -> Dirty | None:
    """What the journal says. Raises: InputError for one that cannot be read."""
    if journal is None or not journal.exists():
        return None
    try:
        return msgspec.json.decode(journal.read_bytes(), type=Dirty)
    except msgspec.MsgspecError as error:
        raise InputError(f"{journal}: the journal cannot be read: {error}") from error


def _write(journal: Path | None, dirty: Dirty | None) -> None:
    """Make the journal say so, on disk when this returns."""
    if journal is None:
        return
    if dirty is None:
        journal.unlink(missing_ok=True)
        durable.sync(journal.parent)
    else:
        durable.write(journal, msgspec.json.encode(dirty))

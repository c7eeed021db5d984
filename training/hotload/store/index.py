"""A snapshot's index: the last object of a snapshot to be written, and all a reader needs to know of it.

It is the Hugging Face index of a sharded checkpoint (`model.safetensors.index.json`: `metadata` and `weight_map`), whose
metadata also holds what the layout that CoreWeave, slime, miles and ModelExpress share puts there (`version`,
`base_version`, `delta_encoding`, `compression_format`, `checksum_format`: `control-plane.md` 5.1), and under `groundhop`
the struct below. An index without `groundhop` comes from another writer of that layout and is read as far as it goes.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from groundhop.errors import ChecksumError, InputError
from groundhop.training.hotload.store.objects import Objects
from groundhop.training.hotload.store.sealed import SEAL, check_seal, seal, unsealed

INDEX_NAME = "model.safetensors.index.json"
MOST_INDEX_BYTES = 64 * 2**20
RESERVED = frozenset({"initial", "log", ".", ".."})
ANCHOR_SUFFIX = "-anchor"
PART_KEY = re.compile(r"[^/]+/(?:model|delta)-\d{5}-[0-9a-f]{16}\.(?:safetensors|ghd)")
"""Keys of parts as `writer.py` names them."""
_IDENTITY = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SHA256 = re.compile(r"[0-9a-f]{64}|")

Kind = Literal["full", "delta"]
Layout = Literal["shared", "groundhop"]
Operation = Literal["differential", "overwrite"]


class Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One object of a snapshot."""

    key: str
    """Its key in the store: `<identity>/<file>`."""
    size: int
    """Bytes."""
    sha256: str
    """Hex; "" in a snapshot of another writer, who does not say."""
    name: str = ""
    """Path in the checkpoint folder that the snapshot restores, `/` between its segments; "" for a part of a delta."""


class SnapshotIndex(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is said of a snapshot as a whole. Written once, never changed."""

    identity: str
    """Immutable name, one path segment; `weight_v%06d` by default."""
    version: int
    """Grows with every snapshot of a store and never starts again."""
    kind: Kind
    layout: Layout
    """Of a delta: safetensors of U8 tensors with zstd(XOR), or our codec. A full snapshot is plain safetensors in both."""
    base: str | None
    """Identity that a delta builds on; None for a full snapshot."""
    base_digest: str
    """State digest of the base; "" where the writer did not say."""
    digest: str
    """State digest of this snapshot; "" where the writer did not say."""
    operation: Operation = "differential"
    """Whether a delta fits exactly one base state, or overwrites whatever an unfinished attempt on that base left."""
    parts: tuple[Part, ...] = ()
    """The weights: shards, or parts of a delta, to be applied in any order."""
    files: tuple[Part, ...] = ()
    """The rest of a full checkpoint's folder: configuration, tokenizer, its own index."""
    changed: int = 0
    """Elements whose bits differ from the base's."""
    total: int = 0
    """Elements of the whole state."""
    created: float = 0.0
    """Unix time."""
    run_id: str = ""
    epoch: int = 0
    """Of the publisher that wrote it, see `log.py`."""

    @property
    def bytes(self) -> int:
        """Bytes of all parts and files."""
        return sum(part.size for part in (*self.parts, *self.files))

    @property
    def same_content(self) -> tuple[Any, ...]:
        """What two snapshots of one identity must agree on."""
        parts = sorted((part.name, part.sha256, part.size) for part in (*self.parts, *self.files))
        return self.version, self.kind, self.layout, self.base, self.base_digest, self.digest, self.operation, parts


def check_identity(identity: str) -> str:
    """Return `identity`. Raises: InputError unless it is 1 to 128 letters, digits, `.`, `_`, `-` and not reserved."""
    if not _IDENTITY.fullmatch(identity) or identity in RESERVED:
        raise InputError(
            f"{identity!r} is not an identity: need 1 to 128 letters, digits, '.', '_', '-', not {RESERVED}"
        )
    return identity


def identity_of(version: int) -> str:
    """The identity that a version has where nobody chose another (slime's folder name)."""
    return f"weight_v{version:06d}"


def anchor_of(identity: str) -> str:
    """The identity of the full snapshot of the same state, for those who cannot come by deltas."""
    return identity + ANCHOR_SUFFIX


def index_key(identity: str) -> str:
    """Where a snapshot's index lies."""
    return f"{check_identity(identity)}/{INDEX_NAME}"


def encode_index(index: SnapshotIndex, weight_map: Mapping[str, str], tensor_bytes: int = 0) -> bytes:
    """The bytes of the index object. `weight_map`: tensor name to file name; `tensor_bytes`: of all tensors, when full."""
    metadata: dict[str, Any] = {"total_size": tensor_bytes} if index.kind == "full" else {}
    if index.kind == "delta":
        metadata |= {"version": index.identity, "base_version": index.base}
        metadata |= _DELTA_WORDS[index.layout, index.operation]
    metadata |= {"groundhop": msgspec.to_builtins(index), SEAL: unsealed()}
    return seal({"metadata": metadata, "weight_map": dict(weight_map)})


_DELTA_WORDS: Mapping[tuple[Layout, Operation], Mapping[str, str]] = {
    ("shared", "differential"): {
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "adler32",
    },
    ("shared", "overwrite"): {
        "delta_encoding": "overwrite",
        "compression_format": "zstd",
        "checksum_format": "adler32",
    },
    ("groundhop", "differential"): {"delta_encoding": "groundhop"},
    ("groundhop", "overwrite"): {"delta_encoding": "groundhop"},
}


def read_index(objects: Objects, identity: str, sha256: str = "") -> SnapshotIndex:
    """Read and check a snapshot's index; `sha256`: that of its object, from the commit record, where it is known.

    Raises: MissingError where there is none (yet), InputError for one that cannot be read, ChecksumError for a damaged one.
    """
    key = index_key(identity)
    raw = objects.get_range(key, 0, MOST_INDEX_BYTES + 1)
    if len(raw) > MOST_INDEX_BYTES:
        raise InputError(f"{key}: need at most {MOST_INDEX_BYTES} bytes")
    if sha256 and index_sha256(raw) != sha256:
        raise ChecksumError(f"{key}: its bytes differ from the SHA-256 in the commit record")
    return decode_index(raw, identity, objects)


def index_sha256(raw: bytes) -> str:
    """SHA-256 (hex) of an index object, which the commit record binds."""
    return hashlib.sha256(raw).hexdigest()


class _Document(Struct, frozen=True):
    """An index as JSON. Other members are somebody else's and are passed over."""

    weight_map: dict[str, str] = {}
    metadata: dict[str, Any] | None = None


def decode_index(raw: bytes, identity: str, objects: Objects) -> SnapshotIndex:
    """Decode an index object; `objects` tells the sizes where another writer's index does not."""
    where = index_key(identity)
    if ours := b"groundhop" in raw:
        check_seal(raw, where)
    try:
        document = msgspec.json.decode(raw, type=_Document)
        metadata = document.metadata or {}
        if not ours:
            return _foreign(metadata, document.weight_map, identity, objects)
        index = msgspec.convert(metadata.get("groundhop"), SnapshotIndex, strict=True)
    except msgspec.MsgspecError as error:
        raise InputError(f"{where}: the index cannot be read: {error}") from error
    check_index(index, identity)
    return index


def check_index(index: SnapshotIndex, identity: str) -> None:
    """Raises: InputError unless `index` is that of `identity`, and its parts lie in that snapshot's own folder."""
    where = index_key(identity)
    if index.identity != identity:
        raise InputError(f"{where}: it is the index of {index.identity!r}")
    if (index.kind == "delta") != (index.base is not None):
        raise InputError(f"{where}: a {index.kind} snapshot cannot have the base {index.base!r}")
    if index.base is not None:
        check_identity(index.base)
    every = (*index.parts, *index.files)
    for part in every:
        folder, _, file = part.key.partition("/")
        inside = folder == identity and all(_is_plain(segment) for segment in (file, *(part.name or file).split("/")))
        if not inside or part.size < 0 or not _SHA256.fullmatch(part.sha256):
            raise InputError(f"{where}: cannot use the part {part}")
    for names in ([part.key for part in every], [part.name for part in every if part.name]):
        if len(set(names)) != len(names):
            raise InputError(f"{where}: a part is named twice")
    if (index.kind == "full") != all(part.name for part in index.parts) and index.parts:
        raise InputError(f"{where}: shards of a full snapshot have file names, parts of a delta have none")


def _is_plain(segment: str) -> bool:
    return _IDENTITY.fullmatch(segment) is not None and segment not in (".", "..")


def _foreign(
    metadata: Mapping[str, Any], weight_map: Mapping[str, str], identity: str, objects: Objects
) -> SnapshotIndex:
    """The index of another writer of the shared layout, who gives no digests."""
    where, delta = index_key(identity), "delta_encoding" in metadata
    encoding = str(metadata.get("delta_encoding", "xor")).lower()
    formats = str(metadata.get("compression_format", "zstd")).lower(), str(metadata.get("checksum_format", "adler32"))
    if delta and (encoding not in ("xor", "overwrite") or formats[0] != "zstd"):
        raise InputError(f"{where}: need xor or overwrite in zstd, got {encoding} in {formats[0]}")
    if delta and formats[1].lower().replace("-", "") != "adler32":
        raise InputError(f"{where}: need the checksum adler32, got {formats[1]}")
    files = sorted(set(weight_map.values()))
    index = SnapshotIndex(
        identity=identity,
        version=_number(str(metadata.get("version", identity))),
        kind="delta" if delta else "full",
        layout="shared",
        base=_named(str(metadata.get("base_version", ""))) if delta else None,
        base_digest="",
        digest="",
        operation="overwrite" if encoding == "overwrite" else "differential",
        parts=tuple(
            Part(
                key=f"{identity}/{file}", size=objects.size(f"{identity}/{file}"), sha256="", name="" if delta else file
            )
            for file in files
        ),
    )
    check_index(index, identity)
    return index


def _named(version: str) -> str:
    """The identity behind `000002` (as slime and miles count) or `weight_v000002` (as their uploaders name)."""
    return identity_of(int(version)) if version.isascii() and version.isdigit() else check_identity(version)


def _number(version: str) -> int:
    digits = re.search(r"(\d{1,18})$", version)
    return int(digits[1]) if digits else 0

"""Write a snapshot: parts as they come, each under a name that holds its content's hash, and the index last."""

import hashlib
import json
import struct
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from groundhop.errors import ConflictError, InputError, MissingError
from groundhop.training.hotload.safetensors_file import read_header
from groundhop.training.hotload.store.index import (
    INDEX_NAME,
    Kind,
    Layout,
    Operation,
    Part,
    SnapshotIndex,
    check_identity,
    check_index,
    encode_index,
    index_key,
    index_sha256,
    read_index,
)
from groundhop.training.hotload.store.objects import Objects

_HASH_BYTES = 4 * 2**20
SAFETENSORS = ".safetensors"


class SnapshotWriter:
    """One attempt to write one snapshot. Leave it by `finish`, or by an exception: what was uploaded then is of no effect.

    Several attempts at one identity, running or killed, never mix: a part's name holds its hash, and only the one index that
    is created first counts.
    """

    def __init__(
        self,
        objects: Objects,
        identity: str,
        *,
        version: int,
        kind: Kind,
        layout: Layout = "groundhop",
        base: str | None = None,
        base_digest: str = "",
        operation: Operation = "differential",
        run_id: str = "",
        epoch: int = 0,
        uploads: int = 4,
    ) -> None:
        if (kind == "delta") != (base is not None):
            raise InputError(f"{identity}: a {kind} snapshot cannot have the base {base!r}")
        self._objects = objects
        self._start = SnapshotIndex(
            identity=check_identity(identity),
            version=version,
            kind=kind,
            layout=layout,
            base=base,
            base_digest=base_digest,
            digest="",
            operation=operation,
            run_id=run_id,
            epoch=epoch,
        )
        self._pool = ThreadPoolExecutor(uploads, thread_name_prefix="upload")
        self._most_waiting = uploads
        self._waiting: list[Future[None]] = []
        self._parts: list[Part] = []
        self._files: list[Part] = []
        self._weight_map: dict[str, str] = {}
        self._tensor_bytes = 0
        self.index_sha256 = ""
        """Of the index object, for the commit record; known after `finish`."""

    def __enter__(self) -> "SnapshotWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop; uploads that have not begun are left out."""
        self._pool.shutdown(cancel_futures=True)

    def add(self, data: bytes | Path, name: str = "") -> Part:
        """Start the upload of one part and return at once, or wait when many wait already.

        A part is a shard of a full snapshot, then `name` is its file name in the checkpoint; or a safetensors or delta file
        of a delta. Raises: what an earlier upload raised, InputError for a shard that is no safetensors.
        """
        index, number = self._start, len(self._parts) + 1
        tensors = _tensors_of(data) if index.kind == "full" or index.layout == "shared" else {}
        digest, size = _measure(data)
        stem, suffix = (
            ("delta", ".ghd") if index.kind == "delta" and index.layout == "groundhop" else ("model", SAFETENSORS)
        )
        file = f"{stem}-{number:05d}-{digest[:16]}{suffix}"
        part = Part(
            key=f"{index.identity}/{file}", size=size, sha256=digest, name=name or _restored(index.kind, number)
        )
        if twice := tensors.keys() & self._weight_map.keys():
            raise InputError(f"{index.identity}: {sorted(twice)[0]!r} is in two parts")
        self._weight_map.update(dict.fromkeys(tensors, file))
        self._tensor_bytes += sum(tensors.values())
        self._upload(self._put, part, data)
        self._parts.append(part)
        return part

    def add_file(self, data: bytes | Path, name: str) -> Part:
        """As `add`, for the other files of a full checkpoint (configuration, tokenizer), kept under their own names.

        `name`: the path in the checkpoint folder, `/` between its segments.
        """
        digest, size = _measure(data)
        # Readers of the shared layout look for files beside the index only; the checkpoint's own index would replace ours.
        file = ("original-" if name == INDEX_NAME else "") + name.replace("/", "--")
        part = Part(key=f"{self._start.identity}/{file}", size=size, sha256=digest, name=name)
        self._upload(self._put_named, part, data)
        self._files.append(part)
        return part

    def finish(self, *, digest: str, changed: int = 0, total: int = 0) -> SnapshotIndex:
        """Wait for all uploads, then create the index.

        Where the identity is published already with the same content, that is a success, and its index is returned.
        Raises: ConflictError where it is published with other content, and what an upload raised.
        """
        self._collect(0)
        start = self._start
        index = SnapshotIndex(
            identity=start.identity,
            version=start.version,
            kind=start.kind,
            layout=start.layout,
            base=start.base,
            base_digest=start.base_digest,
            digest=digest,
            operation=start.operation,
            parts=tuple(self._parts),
            files=tuple(self._files),
            changed=changed,
            total=total,
            created=time.time(),
            run_id=start.run_id,
            epoch=start.epoch,
        )
        check_index(index, start.identity)
        key, raw = index_key(index.identity), encode_index(index, self._weight_map, self._tensor_bytes)
        if not self._objects.create(key, raw):
            index = require_same(self._objects, index)
            raw = self._objects.get(key)
        self.index_sha256 = index_sha256(raw)
        self.close()
        return index

    def _upload(self, put: Callable[[Part, bytes | Path], None], part: Part, data: bytes | Path) -> None:
        self._collect(self._most_waiting)
        self._waiting.append(self._pool.submit(put, part, data))

    def _put(self, part: Part, data: bytes | Path) -> None:
        match data:
            case Path():
                self._objects.put_file(part.key, data)
            case _:
                self._objects.put(part.key, data)

    def _put_named(self, part: Part, data: bytes | Path) -> None:
        """Write a file without a hash in its name, which must not be replaced once its identity counts."""
        try:
            published = read_index(self._objects, self._start.identity)
        except MissingError:
            self._put(part, data)
        else:
            if part not in published.files:
                raise ConflictError(f"{published.identity} is published with another {part.name}")

    def _collect(self, most: int) -> None:
        while len(self._waiting) > most:
            self._waiting.pop(0).result()


def require_same(objects: Objects, index: SnapshotIndex) -> SnapshotIndex:
    """The published index of the same identity. Raises: ConflictError where its content is another."""
    published = read_index(objects, index.identity)
    if published.same_content != index.same_content:
        raise ConflictError(
            f"{index.identity} is published with other content: "
            f"state {published.digest[:12]} on {published.base}, not {index.digest[:12]} on {index.base}"
        )
    return published


def _restored(kind: Kind, number: int) -> str:
    return f"model-{number:05d}.safetensors" if kind == "full" else ""


def _measure(data: bytes | Path) -> tuple[str, int]:
    """SHA-256 (hex) and length."""
    match data:
        case Path():
            with data.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest(), data.stat().st_size
        case _:
            return hashlib.sha256(data).hexdigest(), len(data)


def _tensors_of(data: bytes | Path) -> Mapping[str, int]:
    """Bytes of each tensor of a safetensors file."""
    match data:
        case Path():
            return {tensor.spec.name: tensor.spec.nbytes for tensor in read_header(data).tensors}
        case _:
            try:
                (length,) = struct.unpack_from("<Q", data)
                header = json.loads(memoryview(data)[8 : 8 + length].tobytes())
                return {
                    name: entry["data_offsets"][1] - entry["data_offsets"][0]
                    for name, entry in header.items()
                    if name != "__metadata__"
                }
            except (struct.error, ValueError, LookupError, TypeError, AttributeError) as error:
                raise InputError(f"need the bytes of a safetensors file, got {bytes(data[:16])!r}...") from error

"""Read pages out of WARC and ARC files one record at a time, and write them.

A gzip file is read member by member here, not by a library: so each record's offset and length are known, a member
that was cut off is reported, and a file packed as one single member is read to its end.
"""

import io
import logging
import os
import tempfile
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import zstandard
from warcio.archiveiterator import ArchiveIterator
from warcio.exceptions import ArchiveLoadFailed
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from groundhop.records import WarcPointer

# It warns of each address with a space, which it mends.
logging.getLogger("warcio").setLevel(logging.ERROR)

_PIECE = 1 << 16
_IN_MEMORY = 8 << 20
_GZIP_MAGIC = b"\x1f\x8b\x08"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_FRAMING = frozenset(("content-length", "content-encoding", "transfer-encoding", "connection"))
"""Headers that describe how a body travelled; bodies are stored decoded, so these would lie."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An HTTP response as a WARC file holds it, body decoded."""

    url: str
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    pointer: WarcPointer | None = None
    """None where the record cannot be read alone: inside a gzip member with others."""
    licence: str | None = None
    source: str | None = None

    def header(self, name: str) -> str | None:
        """The first header of that name, case aside."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)


@dataclass(frozen=True, slots=True)
class Damaged:
    """A record that gives no page: `truncated`, `damaged`, `too_large` or `revisit_unresolved`."""

    item: str
    reason: str
    detail: str


def read_warc(path: Path, max_bytes: int = 50_000_000) -> Iterator[Stored | Damaged]:
    """Yield the responses of a file in its order, and what is wrong with it where it stands.

    Revisit records come with the body that they refer to, if an earlier record of the file holds it. Bodies that
    decode to more than `max_bytes` are reported, not kept. Raises: FileNotFoundError.
    """
    originals: dict[str, WarcPointer] = {}
    for found in _records(path):
        if isinstance(found, Damaged):
            yield found
        elif found.record.rec_type == "response":
            answer = _response(found, max_bytes)
            if isinstance(answer, Stored) and answer.pointer is not None:
                for name in _names(found.record):
                    originals.setdefault(name, answer.pointer)
            if answer is not None:
                yield answer
        elif found.record.rec_type == "revisit":
            yield _revisited(found, originals, max_bytes)


def read_record(pointer: WarcPointer, max_bytes: int = 50_000_000) -> Stored | Damaged:
    """Read one record by its offset and length in the file as it lies on the disk. Raises: FileNotFoundError."""
    with Path(pointer.file).open("rb") as file:
        file.seek(pointer.offset)
        return record_from(file.read(pointer.length), pointer, max_bytes)


def record_from(raw: bytes, pointer: WarcPointer, max_bytes: int = 50_000_000) -> Stored | Damaged:
    """The response in the bytes that lie at `pointer`: one gzip member, or one record as it is."""
    where = f"{pointer.file}:{pointer.offset}"
    if raw.startswith(_GZIP_MAGIC):
        try:
            raw = zlib.decompressobj(31).decompress(raw, 2 * max_bytes + _PIECE)
        except zlib.error as error:
            return Damaged(where, "damaged", str(error))
    for found in _parse(io.BytesIO(raw), pointer.file, pointer.offset, True, lambda _: pointer):
        if isinstance(found, Damaged):
            return found
        answer = _response(found, max_bytes)
        if answer is not None:
            return answer
    return Damaged(where, "damaged", "no response record at this place")


@dataclass(frozen=True, slots=True)
class Block:
    """What a record holds that is no HTTP answer, such as the metadata records of WAT files."""

    url: str
    content_type: str
    block: bytes


def read_metadata(path: Path, max_bytes: int = 50_000_000) -> Iterator[Block | Damaged]:
    """Yield the metadata records of a file in its order, and what is wrong with it. Raises: FileNotFoundError."""
    for found in _records(path):
        if isinstance(found, Damaged):
            yield found
        elif found.record.rec_type == "metadata":
            block = _metadata(found, max_bytes)
            if block is not None:
                yield block


class WarcAppender:
    """Writes responses as gzip members of their own at the end of a WARC file, after cutting it to `size` bytes.

    `size` is where the last record that is known to be whole ends; a writer that was killed may have left more.
    """

    def __init__(self, path: Path, size: int, created: str, about: Mapping[str, str]) -> None:
        """Open `path`. A new file begins with a warcinfo record of `about`, made at `created` (ISO 8601, UTC)."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("r+b" if path.exists() else "w+b")
        self._file.truncate(size)
        self._file.seek(size)
        self._writer = WARCWriter(self._file, gzip=True)
        if size == 0:
            info = self._writer.create_warcinfo_record(path.name, {"format": "WARC File Format 1.0", **about})
            info.rec_headers.replace_header("WARC-Date", created)
            info.rec_headers.replace_header("WARC-Record-ID", _record_id(path.name, created))
            self._writer.write_record(info)

    def append(self, stored: Stored, date: str) -> WarcPointer:
        """Write one response with its decoded body, and return where it lies. `date` is in ISO 8601, UTC."""
        start = self._file.tell()
        named = {"X-Licence": stored.licence, "X-Source": stored.source}
        about = {"WARC-Date": date, "WARC-Record-ID": _record_id(stored.url, date)} | {
            name: value for name, value in named.items() if value is not None
        }
        kept = [(name, value) for name, value in stored.headers if name.lower() not in _FRAMING]
        http = StatusAndHeaders(
            f"{stored.status} OK", [*kept, ("Content-Length", str(len(stored.body)))], protocol="HTTP/1.1"
        )
        record = self._writer.create_warc_record(
            stored.url, "response", payload=io.BytesIO(stored.body), http_headers=http, warc_headers_dict=about
        )
        self._writer.write_record(record)
        self._file.flush()
        return WarcPointer(file=str(self.path), offset=start, length=self._file.tell() - start)

    @property
    def size(self) -> int:
        """Bytes written so far, whole records all."""
        return self._file.tell()

    def close(self) -> None:
        """Flush to the disk and close."""
        os.fsync(self._file.fileno())
        self._file.close()


def _record_id(name: str, date: str) -> str:
    """A record's name made from what it holds, so that the same records give the same bytes."""
    return f"<urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'{date} {name}')}>"


@dataclass(frozen=True, slots=True)
class _Found:
    record: Any
    pointer_of: Callable[[], WarcPointer | None]
    """To be called once the record's body was read."""
    whole: bool
    """False in a gzip member that was cut off, which is reported by itself."""
    where: str


def _records(path: Path) -> Iterator[_Found | Damaged]:
    with path.open("rb") as file:
        packed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        file.seek(0)
        if not packed:
            yield from _parse(
                file,
                str(path),
                0,
                True,
                lambda archive: WarcPointer(
                    file=str(path), offset=archive.get_record_offset(), length=archive.get_record_length()
                ),
            )
            return
        for start, end, unpacked, fault in _members(file):
            pointer = WarcPointer(file=str(path), offset=start, length=end - start)
            yield from _parse(unpacked, str(path), start, not fault, partial(_alone, pointer))
            if fault:
                yield Damaged(f"{path}:{start}", *fault)


def _alone(pointer: WarcPointer, archive: Any) -> WarcPointer | None:
    """The member's place, if the record just read fills it."""
    return pointer if archive.get_record_offset() == 0 and not archive.next_line else None


def _parse(
    stream: IO[bytes], path: str, start: int, whole: bool, pointer_of: Callable[[Any], WarcPointer | None]
) -> Iterator[_Found | Damaged]:
    archive, found = ArchiveIterator(stream, arc2warc=True), False
    try:
        for record in archive:
            found = True
            yield _Found(record, partial(pointer_of, archive), whole, f"{path}:{start}")
    except (ArchiveLoadFailed, EOFError, ValueError) as error:
        if whole:
            yield Damaged(f"{path}:{start}", "damaged", str(error).strip() or type(error).__name__)
        return
    if whole and not found and stream.seek(0, os.SEEK_END) > 0:
        yield Damaged(f"{path}:{start}", "damaged", "neither a WARC nor an ARC record")


def _members(file: IO[bytes]) -> Iterator[tuple[int, int, IO[bytes], tuple[str, str] | None]]:
    """Yield start, end, content and fault of each gzip member; after a fault the next member is looked for."""
    start, ahead = 0, b""
    while True:
        ahead = ahead or file.read(_PIECE)
        if not ahead:
            return
        if not ahead.startswith(_GZIP_MAGIC):
            start, ahead, skipped = _next_member(file, start, ahead)
            if skipped:
                yield start - skipped, start, io.BytesIO(), ("damaged", f"{skipped} bytes between gzip members")
            continue
        with tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY) as unpacked:
            end, ahead, fault = _unpack(file, start, ahead, unpacked)
            unpacked.seek(0)
            yield start, end, unpacked, fault  # type: ignore[misc]
        start = end


def _unpack(file: IO[bytes], start: int, ahead: bytes, out: Any) -> tuple[int, bytes, tuple[str, str] | None]:
    """Unpack one member into `out`. Returns its end, the bytes read beyond it, and what was wrong."""
    unpacker, end = zlib.decompressobj(31), start
    while ahead:
        try:
            while True:
                out.write(unpacker.decompress(ahead, 1 << 20))
                if unpacker.eof or not unpacker.unconsumed_tail:
                    break
                end += len(ahead) - len(unpacker.unconsumed_tail)
                ahead = unpacker.unconsumed_tail
        except zlib.error as error:
            # Step over this member's own magic, so that the search for the next one does not find it again.
            return end + 1, ahead[1:], ("damaged", str(error))
        if unpacker.eof:
            return end + len(ahead) - len(unpacker.unused_data), unpacker.unused_data, None
        end += len(ahead)
        ahead = file.read(_PIECE)
    return end, b"", ("truncated", "the file ends inside a gzip member")


def _next_member(file: IO[bytes], start: int, ahead: bytes) -> tuple[int, bytes, int]:
    """Skip to the next gzip magic. Returns its place, the bytes from there on, and how many were skipped."""
    skipped = 0
    while True:
        found = ahead.find(_GZIP_MAGIC)
        if found >= 0:
            return start + skipped + found, ahead[found:], skipped + found
        more = file.read(_PIECE)
        if not more:
            return start + skipped + len(ahead), b"", skipped + len(ahead)
        skipped += max(0, len(ahead) - 2)
        ahead = ahead[-2:] + more


def _response(found: _Found, max_bytes: int) -> Stored | Damaged | None:
    """The answer that a record holds; None for one that is no HTTP answer, or that a cut member left incomplete."""
    record = found.record
    if record.http_headers is None:
        # The library takes any line of five words for an ARC header.
        odd = not (record.rec_headers.get_header("Content-Length") or "0").isdigit()
        return Damaged(found.where, "damaged", "neither a WARC nor an ARC record") if odd else None
    url = (record.rec_headers.get_header("WARC-Target-URI") or "").strip().strip("<>")
    item = url or found.where
    try:
        body = _bounded(record, max_bytes)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        return Damaged(item, "damaged", f"{type(error).__name__}: {error}")
    while record.raw_stream.read(_PIECE):
        pass
    if getattr(record.raw_stream, "limit", 0) > 0:
        missing = f"{record.raw_stream.limit} bytes of the record are missing"
        return Damaged(item, "truncated", missing) if found.whole else None
    if body is None:
        return Damaged(item, "too_large", f"decodes to more than {max_bytes} bytes")
    status = record.http_headers.get_statuscode()
    header = record.rec_headers.get_header
    headers = tuple((str(name), str(value)) for name, value in record.http_headers.headers)
    return Stored(
        url,
        int(status) if status.isdigit() else 0,
        headers,
        body,
        found.pointer_of(),
        header("X-Licence"),
        header("X-Source"),
    )


def _bounded(record: Any, max_bytes: int) -> bytes | None:
    """The body without transfer and content encodings, or None when it is larger than `max_bytes`."""
    coding = (record.http_headers.get_header("Content-Encoding") or "").strip().lower()
    stream = record.content_stream()
    pieces: list[bytes] = []
    size = 0
    while piece := stream.read(_PIECE):
        size += len(piece)
        if size > max_bytes:
            return None
        pieces.append(piece)
    body = b"".join(pieces)
    if coding == "zstd" and body.startswith(_ZSTD_MAGIC):
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(body), read_across_frames=True) as reader:
            body = reader.read(max_bytes + 1)
        return body if len(body) <= max_bytes else None
    return body


def _metadata(found: _Found, max_bytes: int) -> Block | Damaged | None:
    header = found.record.rec_headers.get_header
    url = (header("WARC-Target-URI") or "").strip().strip("<>")
    length = header("Content-Length") or "0"
    if not length.isdigit():
        return Damaged(url or found.where, "damaged", f"Content-Length {length!r}")
    if int(length) > max_bytes:
        return Damaged(url or found.where, "too_large", f"{length} bytes")
    pieces = []
    while piece := found.record.raw_stream.read(_PIECE):
        pieces.append(piece)
    block = b"".join(pieces)
    if len(block) < int(length):
        return Damaged(url or found.where, "truncated", f"{len(block)} of {length} bytes") if found.whole else None
    return Block(url, header("Content-Type") or "", block)


def _names(record: Any) -> list[str]:
    """What a later revisit record may call this one: by its payload's digest, or by address and date."""
    header = record.rec_headers.get_header
    names = [header("WARC-Payload-Digest"), f"{header('WARC-Target-URI')} {header('WARC-Date')}"]
    return [name for name in names if name]


def _revisited(found: _Found, originals: Mapping[str, WarcPointer], max_bytes: int) -> Stored | Damaged:
    header = found.record.rec_headers.get_header
    url = (header("WARC-Target-URI") or "").strip().strip("<>")
    refers = f"{header('WARC-Refers-To-Target-URI')} {header('WARC-Refers-To-Date')}"
    pointer = originals.get(header("WARC-Payload-Digest") or "") or originals.get(refers)
    if pointer is None:
        return Damaged(url or found.where, "revisit_unresolved", "the file holds no earlier record with this payload")
    original = read_record(pointer, max_bytes)
    return replace(original, url=url) if isinstance(original, Stored) else original

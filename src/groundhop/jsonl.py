"""JSON lines on disk that survive kill -9: whole lines only, appended and flushed one record at a time."""

import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zstandard

from groundhop.errors import InputError, MissingError

T = TypeVar("T")


def read(path: Path, kind: type[T]) -> Iterator[T]:
    """Yield the records of `path` (`.zst` is unpacked). A last line without its line feed was torn and is left out.

    Raises: MissingError without the file; InputError that names file and line for a whole line that is not `kind`.
    """
    decoder = msgspec.json.Decoder(kind)
    for number, line in enumerate(_whole_lines(path), start=1):
        if not line.strip():
            continue
        try:
            yield decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise InputError(f"{path}, line {number}: {error}") from error


def read_if_there(path: Path, kind: type[T]) -> list[T]:
    """As `read`, but an absent file holds no records."""
    return list(read(path, kind)) if path.exists() else []


def write(path: Path, records: Iterable[Any]) -> int:
    """Replace `path` by the records at once (temporary file, then rename); `.zst` is packed. Returns their count."""
    count = 0
    temporary = path.with_name(path.name + ".tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary.open("wb") as raw:
        if path.suffix == ".zst":
            with zstandard.ZstdCompressor(level=6).stream_writer(raw, closefd=False) as packed:
                count = _write_all(packed, records)
        else:
            count = _write_all(raw, records)
        raw.flush()
        os.fsync(raw.fileno())
    temporary.replace(path)
    return count


def lines(path: Path) -> Iterator[bytes]:
    """Yield the lines as they stand, for files whose bad lines should not end the reading. Raises: MissingError."""
    return _whole_lines(path)


class Appender:
    """Appends records to a file, after cutting off what a killed writer left unfinished at its end."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_tail(path)
        self._file = path.open("ab", buffering=0)

    def append(self, record: Any) -> None:
        """Write one line in one system call."""
        self._file.write(msgspec.json.encode(record, enc_hook=str) + b"\n")

    def close(self) -> None:
        """Flush to the disk and close."""
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> "Appender":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _write_all(file: Any, records: Iterable[Any]) -> int:
    count = 0
    for record in records:
        file.write(msgspec.json.encode(record, enc_hook=str) + b"\n")
        count += 1
    return count


def _whole_lines(path: Path) -> Iterator[bytes]:
    try:
        raw = path.open("rb")
    except FileNotFoundError as error:
        raise MissingError(f"no file {path}") from error
    with raw:
        stream: Iterable[bytes] = raw
        if path.suffix == ".zst":
            reader = zstandard.ZstdDecompressor(max_window_size=2**31).stream_reader(raw, read_across_frames=True)
            stream = io.BufferedReader(reader)
        for line in stream:
            if line.endswith(b"\n") or path.suffix == ".zst":
                yield line


def _cut_torn_tail(path: Path) -> None:
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        position = size
        while position > 0:
            step = min(65536, position)
            file.seek(position - step)
            found = file.read(step).rfind(b"\n")
            if found >= 0:
                file.truncate(position - step + found + 1)
                return
            position -= step
        file.truncate(0)

"""Files that are on the disk when a call returns, and a disk's errors in our words."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from groundhop.errors import SpaceError, StoreError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What the system says when there is no space left, on the disk or for this user or file."""


def write(path: Path, content: bytes) -> None:
    """Make `content` the file's: all of it or, when the machine stops half way, what it held before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file's content durable, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def clear_disk_errors(path: Path) -> Iterator[None]:
    """Turn a disk's errors into SpaceError and StoreError that name the file."""
    try:
        yield
    except OSError as error:
        kind = SpaceError if error.errno in FULL else StoreError
        raise kind(f"{path}: {error.strerror or error}") from error

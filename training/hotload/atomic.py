"""Bring a file or a folder into being at once: written beside its place under another name, then renamed.

A process that is killed on the way leaves its half behind; the next one that writes to the same place clears it away, since
nobody holds the lock on it any more.
"""

import ctypes
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from groundhop.training.hotload import durable

SUFFIX = ".groundhop-tmp"
AT_CWD, EXCHANGE = -100, 2
"""AT_FDCWD and RENAME_EXCHANGE of Linux's renameat2(2)."""


@contextmanager
def replacing(final: Path) -> Iterator[Path]:
    """Give a path to write a file or a folder to; it becomes `final` when the block ends well, else it is removed.

    All of it is on disk before it gets its name. A link at `final` is followed. Raises: OSError of the file system.
    """
    final = Path(os.path.realpath(final))
    final.parent.mkdir(parents=True, exist_ok=True)
    _clear_left_behind(final)
    work, lock = _locked_folder(final)
    try:
        path = work / final.name
        yield path
        _sync(path)
        _move(path, final)
        durable.sync(final.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.close(lock)


def _locked_folder(final: Path) -> tuple[Path, int]:
    while True:
        work = Path(tempfile.mkdtemp(prefix=f".{final.name}-", suffix=SUFFIX, dir=final.parent))
        lock = os.open(work, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Another writer may have taken it for a dead one's before it was locked.
        if work.exists():
            return work, lock
        os.close(lock)


def _move(path: Path, final: Path) -> None:
    if path.is_dir() and final.is_dir() and any(final.iterdir()):
        _exchange(path, final)
    else:
        path.replace(final)


def _exchange(path: Path, final: Path) -> None:
    """Swap two folders; the old one then lies in the work folder, which is removed."""
    library = ctypes.CDLL(None, use_errno=True)
    swap = getattr(library, "renameat2", None)
    if swap is not None and swap(AT_CWD, os.fsencode(path), AT_CWD, os.fsencode(final), EXCHANGE) == 0:
        return
    # Some file systems cannot swap: then `final` is absent for the moment between two renames.
    old = path.with_name(path.name + ".old")
    final.rename(old)
    try:
        path.rename(final)
    except OSError:
        old.rename(final)
        raise


def _clear_left_behind(final: Path) -> None:
    for work in final.parent.glob(f".{_literal(final.name)}-*{SUFFIX}"):
        with suppress(OSError):
            lock = os.open(work, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(work, ignore_errors=True)
            finally:
                os.close(lock)


def _literal(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _sync(path: Path) -> None:
    if path.is_dir():
        for inner in path.iterdir():
            _sync(inner)
    durable.sync(path)

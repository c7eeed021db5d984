"""Bring a snapshot's parts to a local folder: space first, then bytes, and nothing is handed out that was not checked."""

import contextlib
import errno
import hashlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from groundhop.errors import ChecksumError, MissingError, SpaceError, StoreError
from groundhop.training.hotload.store.index import Part, SnapshotIndex
from groundhop.training.hotload.store.objects import Objects

CHUNK_BYTES = 8 * 2**20


def fetch(
    objects: Objects,
    index: SnapshotIndex,
    folder: Path,
    tries: int = 3,
    *,
    files: bool = False,
    readers: int = 4,
    wait_s: float = 0.2,
) -> list[Path]:
    """Fetch all parts (and `files`) into `folder`; the paths follow `index.parts`, then `index.files`.

    Whole files of an earlier call are kept. Returns only when size and SHA-256 of every one are right, so that nothing of a
    half-written or mixed snapshot is ever applied; each bad or absent part is asked for `tries` times.
    Raises: SpaceError before the first byte where they would not fit, MissingError or ChecksumError for a part that stays absent
    or wrong, StoreError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = [*index.parts, *(index.files if files else ())]
    paths = [folder / part.key.rpartition("/")[2] for part in parts]
    missing = [(part, path) for part, path in zip(parts, paths, strict=True) if not _holds(path, part)]
    _require_space(folder, sum(part.size for part, _ in missing))
    with ThreadPoolExecutor(readers, thread_name_prefix="fetch") as pool:
        waiting = [pool.submit(_fetch_part, objects, part, path, tries, wait_s) for part, path in missing]
        for future in waiting:
            future.result()
    return paths


def _require_space(folder: Path, size: int) -> None:
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if size > free:
        raise SpaceError(f"{folder}: need {size} bytes for the snapshot, {free} are free")


def _fetch_part(objects: Objects, part: Part, path: Path, tries: int, wait_s: float) -> None:
    for done in range(tries):
        try:
            _fetch_once(objects, part, path)
        except SpaceError:
            raise
        except (MissingError, ChecksumError, StoreError):
            if done == tries - 1:
                raise
            time.sleep(wait_s * 2**done)
        else:
            return


def _fetch_once(objects: Objects, part: Part, path: Path) -> None:
    temporary = path.with_name(path.name + ".part")
    digest, size = hashlib.sha256(), 0
    try:
        with _space_errors(path), temporary.open("wb") as file:
            if part.size:
                # Takes the blocks now, so that a full disk is noticed before the bytes have travelled.
                os.posix_fallocate(file.fileno(), 0, part.size)
            while size < part.size:
                piece = objects.get_range(part.key, size, min(part.size, size + CHUNK_BYTES))
                if not piece:
                    break
                digest.update(piece)
                size += file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        if size != part.size or objects.size(part.key) != part.size:
            raise ChecksumError(f"{part.key}: need {part.size} bytes, got {objects.size(part.key)}")
        if part.sha256 and digest.hexdigest() != part.sha256:
            raise ChecksumError(f"{part.key}: its bytes differ from the SHA-256 in the index")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _holds(path: Path, part: Part) -> bool:
    if not part.sha256 or not path.is_file() or path.stat().st_size != part.size:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == part.sha256


@contextlib.contextmanager
def _space_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SpaceError(f"{path}: no space left for a snapshot's part") from error
        raise

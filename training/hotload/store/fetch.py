"""Bring a snapshot's parts to a local folder: space first, then bytes, and nothing is handed out that was not checked."""

import contextlib
import errno
import hashlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from groundhop.errors import ChecksumError, MissingError, SpaceError, StoreError
from groundhop.training.hotload.store.index import Part, SnapshotIndex
from groundhop.training.hotload.store.objects import Objects

CHUNK_BYTES = 8 * 2**20
UNFINISHED = ".fetching"


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

    Whole parts of an earlier call are kept. Returns only when size and SHA-256 of every one are right on disk, so that nothing
    of a half-written or mixed snapshot is ever applied; each bad or absent part is asked for `tries` times.
    Raises: SpaceError before the first byte where they would not fit; MissingError or ChecksumError for a part that stays
    absent or wrong; StoreError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = [*index.parts, *(index.files if files else ())]
    paths = [folder / part.key.rpartition("/")[2] for part in parts]
    wanted = [(part, path) for part, path in zip(parts, paths, strict=True) if not _holds(path, part)]
    _require_space(folder, sum(part.size for part, _ in wanted))
    pool = ThreadPoolExecutor(readers, thread_name_prefix="fetch")
    try:
        started = [(part, path, _start(pool, objects, part, path)) for part, path in wanted]
        for part, path, chunks in started:
            _finish(pool, objects, part, path, chunks, tries, wait_s)
    finally:
        pool.shutdown(cancel_futures=True)
        for _, path in wanted:
            _unfinished(path).unlink(missing_ok=True)
    return paths


def _require_space(folder: Path, size: int) -> None:
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if size > free:
        raise SpaceError(f"{folder}: need {size} bytes for the snapshot, {free} are free")


def _start(pool: ThreadPoolExecutor, objects: Objects, part: Part, path: Path) -> list[Future[None]]:
    """Make room for a part and ask for its chunks."""
    temporary = _unfinished(path)
    with _space_errors(path), temporary.open("wb") as file:
        if part.size:
            # Takes the blocks now, so that a full disk is noticed before the bytes have travelled.
            os.posix_fallocate(file.fileno(), 0, part.size)
    starts = range(0, part.size, CHUNK_BYTES)
    return [pool.submit(_copy, objects, part, start, temporary) for start in starts]


def _copy(objects: Objects, part: Part, start: int, temporary: Path) -> None:
    stop = min(part.size, start + CHUNK_BYTES)
    piece = objects.get_range(part.key, start, stop)
    if len(piece) != stop - start:
        raise ChecksumError(f"{part.key}: need {part.size} bytes, it ends at byte {start + len(piece)}")
    with _space_errors(temporary), temporary.open("r+b") as file:
        file.seek(start)
        file.write(piece)


def _finish(
    pool: ThreadPoolExecutor,
    objects: Objects,
    part: Part,
    path: Path,
    chunks: list[Future[None]],
    tries: int,
    wait_s: float,
) -> None:
    for done in range(1, tries + 1):
        try:
            for chunk in chunks:
                chunk.result()
            _check(part, _unfinished(path))
        except SpaceError:
            raise
        except (MissingError, ChecksumError, StoreError):
            if done == tries:
                raise
            time.sleep(wait_s * 2 ** (done - 1))
            chunks = _start(pool, objects, part, path)
        else:
            _unfinished(path).replace(path)
            return


def _check(part: Part, path: Path) -> None:
    """Read what lies on the disk, and make it durable. Raises: ChecksumError."""
    with path.open("rb") as file:
        if part.sha256 and hashlib.file_digest(file, "sha256").hexdigest() != part.sha256:
            raise ChecksumError(f"{part.key}: its bytes differ from the SHA-256 in the index")
        os.fsync(file.fileno())


def _holds(path: Path, part: Part) -> bool:
    """Whether an earlier call left this part, whole."""
    if not part.sha256 or not path.is_file() or path.stat().st_size != part.size:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == part.sha256


def _unfinished(path: Path) -> Path:
    return path.with_name(path.name + UNFINISHED)


@contextlib.contextmanager
def _space_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SpaceError(f"{path}: no space left for a snapshot's part") from error
        raise

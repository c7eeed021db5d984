"""A store in a folder: a temporary file, flushed to disk, then linked (`create`) or renamed (`put`) to its name.

Written here rather than taken from obstore's local store because a commit record must survive a power cut: obstore
renames without `fsync`. `link` fails where the name is taken, on NFS too (open(2), O_EXCL), so one creator wins.
"""

import contextlib
import io
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from groundhop.errors import CredentialError, MissingError, SpaceError, StoreError
from groundhop.training.hotload import durable
from groundhop.training.hotload.store.objects import check_key

_UNFINISHED = ".unfinished"
"""Folder of temporary files inside the store: one file system, and no listing shows it."""
_COPY_BYTES = 4 * 2**20


class DiskObjects:
    """An `Objects` in `folder`, which is made at the first write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    def put(self, key: str, data: bytes) -> None:
        """Write an object, in place of one that is there."""
        with _clear_errors(key), self._written(key, io.BytesIO(data)) as (temporary, target):
            temporary.replace(target)

    def put_file(self, key: str, path: Path) -> None:
        """As `put`, with a file's content."""
        with path.open("rb") as content, _clear_errors(key), self._written(key, content) as (temporary, target):
            temporary.replace(target)

    def create(self, key: str, data: bytes) -> bool:
        """Write an object unless the key is taken."""
        with _clear_errors(key), self._written(key, io.BytesIO(data)) as (temporary, target):
            try:
                os.link(temporary, target)
            except FileExistsError:
                return False
            return True

    def get(self, key: str) -> bytes:
        """The whole object."""
        with _clear_errors(key):
            return self._path(key).read_bytes()

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` (exclusive), fewer where the object ends earlier."""
        with _clear_errors(key), self._path(key).open("rb") as file:
            file.seek(start)
            return file.read(max(0, stop - start))

    def size(self, key: str) -> int:
        """Its length in bytes."""
        with _clear_errors(key):
            return self._path(key).stat().st_size

    def list(self, prefix: str) -> list[str]:
        """All keys below the folder `prefix`, sorted."""
        found: list[str] = []
        with _clear_errors(prefix):
            for folder, folders, names in os.walk(self.folder / prefix if prefix else self.folder):
                folders[:] = [name for name in folders if name != _UNFINISHED]
                found += [(Path(folder) / name).relative_to(self.folder).as_posix() for name in names]
        return sorted(found)

    def delete(self, key: str) -> None:
        """Remove an object, and its folder when that was the last in it."""
        path = self._path(key)
        with _clear_errors(key):
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                path.parent.rmdir()

    def _path(self, key: str) -> Path:
        return self.folder / check_key(key)

    @contextlib.contextmanager
    def _written(self, key: str, content: IO[bytes]) -> Iterator[tuple[Path, Path]]:
        """A temporary file with `content`, durable, beside the path that it is meant for; the name is made durable after."""
        target = self._path(key)
        temporary = self.folder / _UNFINISHED / uuid.uuid4().hex
        temporary.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                shutil.copyfileobj(content, file, _COPY_BYTES)
                file.flush()
                os.fsync(file.fileno())
            target.parent.mkdir(parents=True, exist_ok=True)
            yield temporary, target
            durable.sync(target.parent)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _clear_errors(key: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise MissingError(f"no object {key}: {error.strerror} ({error.filename})") from error
    except PermissionError as error:
        raise CredentialError(f"no access to object {key}: {error.strerror} ({error.filename})") from error
    except OSError as error:
        kind = SpaceError if error.errno in durable.FULL else StoreError
        raise kind(f"object {key}: {error.strerror or error}") from error

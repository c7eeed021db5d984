"""A store in an S3 bucket, through obstore. `create` is a PUT with `If-None-Match: *`, which one writer wins."""

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store

from groundhop.errors import CredentialError, MissingError, SpaceError, StoreError
from groundhop.training.hotload.store.objects import check_key

_FULL = (
    "507",
    "InsufficientStorage",
    "QuotaExceeded",
    "StorageFull",
    "XMinioStorageFull",
    "No space left",
    "os error 28",
)
"""What S3 servers answer when they are full."""

_RETRY: Any = {"max_retries": 5, "retry_timeout": timedelta(seconds=30)}
"""Callers ask again themselves, and each waits longer than this for a server that is gone."""
_MULTIPART_BYTES = 8 * 2**20


class BucketObjects:
    """An `Objects` below `prefix` in `bucket`; everything else comes from the `AWS_...` variables."""

    def __init__(self, bucket: str, prefix: str) -> None:
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        options: Any = {"allow_http": True} if endpoint.startswith("http://") else {}
        options |= {"timeout": timedelta(seconds=120), "connect_timeout": timedelta(seconds=5)}
        self._store = S3Store(bucket, prefix=prefix or None, client_options=options, retry_config=_RETRY)

    def put(self, key: str, data: bytes) -> None:
        """Write an object, in place of one that is there."""
        with _clear_errors(key):
            obstore.put(self._store, check_key(key), data, chunk_size=_MULTIPART_BYTES)

    def put_file(self, key: str, path: Path) -> None:
        """As `put`, with a file's content, in parts that are sent side by side."""
        with _clear_errors(key):
            obstore.put(self._store, check_key(key), path, chunk_size=_MULTIPART_BYTES)

    def create(self, key: str, data: bytes) -> bool:
        """Write an object unless the key is taken."""
        with _clear_errors(key):
            try:
                obstore.put(self._store, check_key(key), data, mode="create")
            except AlreadyExistsError:
                return False
            return True

    def get(self, key: str) -> bytes:
        """The whole object."""
        with _clear_errors(key):
            return bytes(obstore.get(self._store, check_key(key)).bytes())

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` (exclusive), fewer where the object ends earlier."""
        if stop <= start:
            return b""
        with _clear_errors(key):
            try:
                return bytes(obstore.get_range(self._store, check_key(key), start=start, end=stop))
            except BaseError as error:
                if "InvalidRange" not in str(error) and "416" not in _first_line(error):
                    raise
                return b""

    def size(self, key: str) -> int:
        """Its length in bytes."""
        with _clear_errors(key):
            return int(obstore.head(self._store, check_key(key))["size"])

    def list(self, prefix: str) -> list[str]:
        """All keys below the folder `prefix`, sorted."""
        with _clear_errors(prefix):
            pages = obstore.list(self._store, prefix=prefix or None)
            return sorted(str(row["path"]) for page in pages for row in page)

    def delete(self, key: str) -> None:
        """Remove an object; one that is absent stays so."""
        with _clear_errors(key), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, check_key(key))


@contextlib.contextmanager
def _clear_errors(key: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise MissingError(f"no object {key}: {_first_line(error)}") from error
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise CredentialError(f"no access to object {key}: {_first_line(error)}") from error
    except (BaseError, OSError) as error:
        if "NoSuchBucket" in str(error):
            raise MissingError(f"no bucket for object {key}: {_first_line(error)}") from error
        kind = SpaceError if any(word in str(error) for word in _FULL) else StoreError
        raise kind(f"object {key}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    """What obstore says before it prints its own structures."""
    return next(iter(str(error).splitlines()), type(error).__name__)

"""Named byte objects on a folder or an S3 bucket: whole or absent, and `create` has exactly one winner.

Those two promises are all that snapshots and the commit log rest on. On disk they come from a temporary file and `link` or
`rename` (`disk.py`), on S3 from the PUT itself and its `If-None-Match: *` (`bucket.py`; Amazon S3 API, "Conditional writes").
"""

import re
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from groundhop.errors import InputError

KEY = re.compile(r"(?!.*(?:^|/)\.{1,2}(?:/|$))[A-Za-z0-9._-]+(?:/[A-Za-z0-9._-]+)*")
"""Segments of letters, digits, `.`, `_` and `-`, joined by `/`; none is `.` or `..`."""


class Objects(Protocol):
    """A store. Every method may be called from any thread, and raises:

    MissingError where the key is absent, SpaceError where nothing more fits, CredentialError where access is refused, and
    StoreError for every other failure, after which a write may or may not have happened.
    """

    def put(self, key: str, data: bytes) -> None:
        """Write an object, in place of one that is there. Readers see the old bytes or the new, never a part."""
        ...

    def put_file(self, key: str, path: Path) -> None:
        """As `put`, with a file's content, which need not fit into memory."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Write an object unless the key is taken; False when it is, even where an earlier, lost try of ours took it."""
        ...

    def get(self, key: str) -> bytes:
        """The whole object."""
        ...

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` (exclusive), fewer where the object ends earlier."""
        ...

    def size(self, key: str) -> int:
        """Its length in bytes."""
        ...

    def list(self, prefix: str) -> list[str]:
        """All keys below the folder `prefix` (everything for ""), sorted."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; one that is absent stays so."""
        ...


def check_key(key: str) -> str:
    """Return `key`. Raises: InputError unless it fits `KEY`, so that no key leaves its store."""
    if len(key) > 900 or not KEY.fullmatch(key):
        raise InputError(f"{key!r} is not a key: need letters, digits, '.', '_', '-' in segments joined by '/'")
    return key


def open_objects(url: str | Path) -> Objects:
    """The store at a path, `file://...` or `s3://bucket/prefix`.

    S3 takes its credentials, region and endpoint from `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_REGION`,
    `AWS_ENDPOINT_URL` and the other variables of that family. Raises: InputError for other schemes.
    """
    parts = urlsplit(str(url))
    match parts.scheme:
        case "s3":
            from groundhop.training.hotload.store.bucket import BucketObjects

            return BucketObjects(parts.netloc, unquote(parts.path).strip("/"))
        case "file" | "":
            from groundhop.training.hotload.store.disk import DiskObjects

            return DiskObjects(Path(unquote(parts.path)) if parts.scheme else Path(url))
        case other:
            raise InputError(f"{url}: need a path, file://... or s3://bucket/prefix, got the scheme {other!r}")

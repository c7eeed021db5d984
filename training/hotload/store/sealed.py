"""JSON documents that carry their own SHA-256, so that a flipped byte anywhere in them is noticed.

The seal is the member `"sha256": "<64 hex digits>"`, once in the document; it is the digest of the document's bytes with those
digits set to `0`. Nothing is re-encoded to check it, so every byte counts, spaces included.
"""

import hashlib
import re
from typing import Any

import msgspec

from groundhop.errors import ChecksumError, InputError

SEAL = "groundhop_sha256"
_OPEN = "0" * 64
_PATTERN = re.compile(rb'"' + SEAL.encode() + rb'":\s*"([0-9a-f]{64})"')


def seal(document: Any) -> bytes:
    """Encode `document`, in which one member named `SEAL` must be `unsealed()`, and set its digest."""
    raw = msgspec.json.format(msgspec.json.encode(document), indent=1)
    (match,) = _PATTERN.finditer(raw)
    return raw[: match.start(1)] + hashlib.sha256(raw).hexdigest().encode() + raw[match.end(1) :]


def unsealed() -> str:
    """What stands in the seal's place before it is set."""
    return _OPEN


def check_seal(raw: bytes, where: str) -> None:
    """Raises: InputError unless `raw` has one seal, ChecksumError where its bytes are not those that were sealed."""
    found = list(_PATTERN.finditer(raw))
    if len(found) != 1:
        raise InputError(f"{where}: need one member {SEAL!r} with 64 hex digits, got {len(found)}")
    (match,) = found
    digest = hashlib.sha256(raw[: match.start(1)] + _OPEN.encode() + raw[match.end(1) :]).hexdigest()
    if digest.encode() != match[1]:
        raise ChecksumError(f"{where}: its bytes differ from its SHA-256")

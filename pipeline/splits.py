"""Give each page to training or to held-out questions, once and for all."""

import hashlib

from groundhop.records import Split


def split_of(key: str, seed: int, heldout_share: float) -> Split:
    """The split that a page serves, as seed or as target: a hash of its key and `seed`, whatever other pages there are."""
    digest = hashlib.sha256(f"split\n{seed}\n{key}".encode()).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") < heldout_share * 2**64 else "train"

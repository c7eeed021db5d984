"""Give each page to training or to held-out questions, so that none serves both."""

import hashlib
from dataclasses import dataclass, field

from groundhop.records import Hop, Split


def split_of(key: str, seed: int, heldout_share: float) -> Split:
    """The split that a page opens: a hash of its key and `seed`, whatever other pages there are."""
    digest = hashlib.sha256(f"split\n{seed}\n{key}".encode()).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") < heldout_share * 2**64 else "train"


@dataclass(slots=True)
class Splits:
    """Splits of the pages that serve so far.

    A page joins the split of the first kept question that uses it, as seed or as target; a question on two new
    pages opens the split that its target's hash names. Hashing each page by itself would lose every hop
    between the two sides, two in five at a share of 0.3.
    """

    seed: int
    heldout_share: float
    _of: dict[str, Split] = field(default_factory=dict)

    def propose(self, hop: Hop) -> Split | None:
        """The split that a question on this hop would join; None when its two pages serve different ones."""
        first, second = self._of.get(hop.seed), self._of.get(hop.target)
        if first is not None and second is not None and first != second:
            return None
        return first or second or split_of(hop.target, self.seed, self.heldout_share)

    def take(self, hop: Hop, split: Split) -> None:
        """Bind both pages of a kept question."""
        self._of[hop.seed] = self._of[hop.target] = split

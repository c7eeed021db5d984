"""Give each page to training or to held-out questions, so that none serves both."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from groundhop.records import Hop, Split


@dataclass(slots=True)
class Splits:
    """Splits of the pages that serve so far, and how many questions each split has.

    A page joins the split of the first kept question that uses it, as seed or as target; a question on two new
    pages goes to the split that has too few. Giving each page a split by itself, say by a hash, would lose every
    hop between the two sides: two in five at a share of 0.3, and nine in ten of the held-out ones.
    """

    heldout_share: float
    kept: Counter[Split] = field(default_factory=Counter)
    _of: dict[str, Split] = field(default_factory=dict)

    def propose(self, hop: Hop, full: Collection[Split] = ()) -> Split | None:
        """The split that a question on this hop would join; None when its two pages serve different ones.

        A split in `full` is not opened for new pages while the other one has room.
        """
        first, second = self._of.get(hop.seed), self._of.get(hop.target)
        if first is not None and second is not None and first != second:
            return None
        return first or second or self._open(full)

    def take(self, hop: Hop, split: Split) -> None:
        """Count a kept question and bind its pages."""
        self.kept[split] += 1
        self._of[hop.seed] = self._of[hop.target] = split

    def _open(self, full: Collection[Split]) -> Split:
        few = self.kept["heldout"] < self.heldout_share * (self.kept.total() + 1)
        # At a share of 0 the held-out side is never short; at 1 it always is.
        wanted, other = ("heldout", "train") if few and self.heldout_share > 0 else ("train", "heldout")
        return other if wanted in full and other not in full else wanted  # type: ignore[return-value]

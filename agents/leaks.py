"""Keep pages that quote a benchmark question away from the agent: they are mirrors of the answer key."""

import re
import unicodedata
from collections.abc import Iterable

NGRAM_WORDS = 13
"""Thirteen shared words in a row count as a copy, as is usual for benchmark overlap (Brown et al. 2020, appendix C)."""

_WORD = re.compile(r"\w+")


def normalised(text: str) -> str:
    """Words of `text`, NFKC and case folded, joined by single spaces."""
    return " ".join(_WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def ngrams(question: str, words: int = NGRAM_WORDS) -> tuple[str, ...]:
    """Every run of `words` words of `question`, normalised; none when it is shorter."""
    found = normalised(question).split()
    return tuple(" ".join(found[i : i + words]) for i in range(len(found) - words + 1))


def leak_in(text: str, forbidden: Iterable[str]) -> str | None:
    """The first of `forbidden` that stands in `text` as whole words; None if none does."""
    wanted = [normalised(gram) for gram in forbidden]
    if not wanted:
        return None
    padded = f" {normalised(text)} "
    return next((gram for gram in wanted if gram and f" {gram} " in padded), None)

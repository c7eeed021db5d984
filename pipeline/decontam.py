"""Tell whether a text repeats a benchmark question, by runs of words; make the n-grams that guard our own questions."""

import re
import unicodedata
from dataclasses import dataclass
from difflib import SequenceMatcher

_WORD = re.compile(r"\w+")
_MARKS = re.compile(r"[\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]")
NGRAM = 13
"""Words in a run. 13 is the common choice (GPT-3, arXiv 2005.14165, appendix C)."""
LEAST_WORDS = 8
"""Shorter benchmark texts are stubs and common phrases: they are compared whole, never as a part."""
LEAST_DISTINCT = 6
"""A run with fewer different words (`the the the`, table rules) identifies nothing."""


@dataclass(frozen=True, slots=True)
class Match:
    """A flagged overlap, checkable by eye."""

    span: str
    """The candidate's own words that match."""
    start: int
    end: int
    """Where they stand in the candidate."""
    benchmark: str
    """Which benchmark item."""


def normalised_words(text: str) -> list[str]:
    """Words as they are compared: NFKC, case folded, punctuation and accents gone."""
    if not text.isascii():
        text = _MARKS.sub("", unicodedata.normalize("NFKD", text))
    return [word for word in _WORD.findall(text.casefold()) if word.strip("_")]


def ngrams(text: str, size: int = NGRAM) -> tuple[str, ...]:
    """All distinct runs of `size` words in order; a shorter text is one run by itself if it has `LEAST_WORDS`."""
    words = normalised_words(text)
    if len(words) < size:
        return (" ".join(words),) if len(words) >= LEAST_WORDS else ()
    runs = (words[start : start + size] for start in range(len(words) - size + 1))
    return tuple(dict.fromkeys(" ".join(run) for run in runs if len(set(run)) >= LEAST_DISTINCT))


def contaminated(
    candidate: str, question: str, answer: str = "", *, benchmark: str = "", size: int = NGRAM
) -> Match | None:
    """The overlap when `candidate` holds a run of `size` words of a benchmark question, or all of a shorter one.

    A shared answer or name is no overlap: `answer` only extends the question where a candidate copies both.
    """
    located = _located(candidate)
    words = [word for word, _, _ in located]
    wanted = set(ngrams(f"{question} {answer}", size)) | set(ngrams(question, size))
    lengths = sorted({len(run.split(" ")) for run in wanted})
    for length in lengths:
        for start in range(len(words) - length + 1):
            if " ".join(words[start : start + length]) in wanted:
                return _widened(candidate, located, normalised_words(question), benchmark)
    return None


def _widened(candidate: str, located: list[tuple[str, int, int]], other: list[str], benchmark: str) -> Match:
    # Report the longest common run, not only the n-gram that tripped the wire.
    words = [word for word, _, _ in located]
    found = SequenceMatcher(None, words, other, autojunk=False).find_longest_match()
    start, end = located[found.a][1], located[found.a + max(found.size, 1) - 1][2]
    return Match(candidate[start:end], start, end, benchmark)


def _located(text: str) -> list[tuple[str, int, int]]:
    return [
        (word, match.start(), match.end()) for match in _WORD.finditer(text) for word in normalised_words(match.group())
    ]

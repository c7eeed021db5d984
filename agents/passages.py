"""Cut a text into passages at sentence and line ends, and find the ones that fit a query. Offsets into the text throughout."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

# A sentence ends at . ! ? (and closing quotes) before white space, at CJK full stops, and at a line's end.
_END = re.compile(r"[.!?…][\"'”’)\]]*(?=\s)|[。！？]|\n")
_WORD = re.compile(r"\w+")
_CJK = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
# Okapi BM25's usual constants (Robertson and Zaragoza 2009, section 3.4).
_K1, _B = 1.2, 0.75
_STOP_WORDS = frozenset(
    {
        "a",
        "an",
        "and",
        "are",
        "as",
        "at",
        "be",
        "been",
        "by",
        "did",
        "do",
        "does",
        "for",
        "from",
        "had",
        "has",
        "have",
        "how",
    }
    | {
        "in",
        "is",
        "it",
        "its",
        "many",
        "much",
        "not",
        "of",
        "on",
        "or",
        "that",
        "the",
        "their",
        "this",
        "to",
        "was",
        "were",
    }
    | {"what", "when", "where", "which", "who", "whom", "whose", "why", "will", "with", "year"}
)


class Span(NamedTuple):
    """Half-open offsets [start, end) into a text."""

    start: int
    end: int


def sentences(text: str, start: int = 0, end: int | None = None) -> list[Span]:
    """The sentences and lines of a part of `text`, without white space around them."""
    end = len(text) if end is None else end
    spans: list[Span] = []
    position = start
    for match in _END.finditer(text, start, end):
        _add_stripped(spans, text, position, match.end())
        position = match.end()
    _add_stripped(spans, text, position, end)
    return spans


def passages(text: str, words: int) -> list[Span]:
    """Cover `text` by passages of about `words` words that end with a sentence, unless a sentence is longer.

    A short rest joins the passage before it.
    """
    found: list[Span] = []
    start, size, last = -1, 0, -1
    for unit in _bounded(text, words):
        length = count_words(text[unit.start : unit.end])
        if size and size + length > words:
            found.append(Span(start, last))
            size = 0
        if not size:
            start = unit.start
        size += length
        last = unit.end
    if size:
        if found and size < words // 4:
            start = found.pop().start
        found.append(Span(start, last))
    return found


def count_words(text: str) -> int:
    """Words of `text`; in scripts without spaces two characters count as a word. At least 1."""
    wide = len(_CJK.findall(text))
    return max(1, len(_WORD.findall(_CJK.sub(" ", text) if wide else text)) + wide // 2)


def terms(text: str) -> list[str]:
    """Case-folded words of `text`, the commonest English ones left out unless nothing else is there."""
    words = [word.casefold() for word in _WORD.findall(text)]
    return [word for word in words if word not in _STOP_WORDS] or words


class Cut(NamedTuple):
    """A text's passages and the words of each."""

    spans: list[Span]
    counts: list[Counter[str]]


@lru_cache(maxsize=128)
def cut(text: str, words: int) -> Cut:
    """`passages` with their words; remembered, since the rollouts of one question visit the same pages."""
    spans = passages(text, words)
    return Cut(spans, counts_of(text, spans))


def counts_of(text: str, spans: Sequence[Span]) -> list[Counter[str]]:
    """How often each word, plurals folded, stands in each span."""
    return [Counter(_stem(word) for word in terms(text[s.start : s.end])) for s in spans]


def scores(counts: Sequence[Counter[str]], query: str) -> list[float]:
    """BM25 of each span for `query`, as if the spans were the whole collection."""
    lengths = [sum(c.values()) for c in counts]
    mean = sum(lengths) / max(1, len(lengths)) or 1.0
    wanted = sorted({_stem(word) for word in terms(query)})
    held = {word: sum(word in c for c in counts) for word in wanted}
    weight = {word: math.log(1 + (len(counts) - n + 0.5) / (n + 0.5)) for word, n in held.items()}
    return [
        sum(weight[w] * c[w] * (_K1 + 1) / (c[w] + _K1 * (1 - _B + _B * length / mean)) for w in wanted if c[w])
        for c, length in zip(counts, lengths, strict=True)
    ]


def best_first(got: Sequence[float]) -> list[int]:
    """Indices by score, the best first; equal ones in the order of the text."""
    return sorted(range(len(got)), key=lambda i: (-round(got[i], 9), i))


def _stem(word: str) -> str:
    """Fold English plurals, so that `rivers` finds `river`."""
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def _bounded(text: str, words: int) -> list[Span]:
    """Sentences, the overlong ones cut at white space (or anywhere, where there is none)."""
    units: list[Span] = []
    for unit in sentences(text):
        if count_words(text[unit.start : unit.end]) <= words + words // 2:
            units.append(unit)
            continue
        start = unit.start
        for piece in re.finditer(r"\S{1,400}\s*", text[unit.start : unit.end]):
            end = unit.start + piece.end()
            if count_words(text[start:end]) >= words or end == unit.end:
                _add_stripped(units, text, start, end)
                start = end
    return units


def _add_stripped(spans: list[Span], text: str, start: int, end: int) -> None:
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    if end > start:
        spans.append(Span(start, end))

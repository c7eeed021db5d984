"""Find the sentences of a page's main text, by offset, and tell real sentences from fragments."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from syntok import segmenter

_WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
_SOFT_BREAK = re.compile(r"(?<![.!?:;|])[ \t]*\n[ \t]*(?=[a-z(])")
_STARTS_WELL = re.compile(r"[\"'“‘(\[]?[A-Z0-9]")
_ENDS_WELL = re.compile(r"[.!?][\"'”’)\]]*$")


_BULLET = re.compile(r"[-*•–]\s+")


class Span(NamedTuple):
    """Half-open range of a text, in code points."""

    start: int
    end: int


def sentences(text: str) -> list[Span]:
    """Spans of all sentences in order, white space at their ends left out.

    A line feed ends a sentence unless the next line goes on in lower case (hard-wrapped source).
    """
    joined = _join_lines(text)
    spans: list[Span] = []
    offset = 0
    for line in joined.split("\n"):
        spans += (Span(offset + start, offset + end) for start, end in _of_line(line))
        offset += len(line) + 1
    return spans


def sentences_around(text: str, offsets: Iterable[int]) -> list[Span]:
    """As `sentences`, but only of the lines that hold these offsets: much cheaper where few lines matter."""
    joined = _join_lines(text)
    starts = sorted({joined.rfind("\n", 0, offset) + 1 for offset in offsets})
    spans: list[Span] = []
    for begin in starts:
        line = joined[begin : end if (end := joined.find("\n", begin)) >= 0 else None]
        spans += (Span(begin + start, begin + end) for start, end in _of_line(line))
    return spans


def sentence_at(spans: list[Span], start: int, end: int) -> Span | None:
    """The sentence that holds [start, end) whole; None when none does."""
    index = bisect_right(spans, start, key=lambda span: span.start) - 1
    if index < 0 or spans[index].end < end:
        return None
    return spans[index]


def is_prose(sentence: str, least: int = 6, most: int = 60) -> bool:
    """Whether this reads like a written sentence: `least` to `most` words, begun and ended as one, mostly letters."""
    words = _WORD.findall(sentence)
    if not least <= len(words) <= most:
        return False
    if not _STARTS_WELL.match(sentence) or not _ENDS_WELL.search(sentence):
        return False
    # Code, tables and lists of names have few lower-case words or much punctuation.
    lower = sum(word[0].islower() for word in words)
    letters = sum(character.isalpha() or character.isspace() for character in sentence)
    return lower >= 0.3 * len(words) and letters >= 0.8 * len(sentence) and "|" not in sentence


def fold(word: str) -> str:
    """A word as it is compared."""
    return word.casefold().replace("’", "'")


def words_of(text: str) -> list[str]:
    """Words (letters, inner apostrophes and hyphens), folded, in order."""
    return [fold(word) for word in _WORD.findall(text)]


def written_words(text: str) -> list[str]:
    """As `words_of`, but as they are written."""
    return _WORD.findall(text)


def _join_lines(text: str) -> str:
    # Same length, so that offsets keep: a soft break becomes as many spaces.
    return _SOFT_BREAK.sub(lambda found: " " * len(found.group()), text)


def _of_line(line: str) -> Iterator[Span]:
    if not line.strip():
        return
    starts: list[int] = []
    for paragraph in segmenter.process(line):
        for sentence in paragraph:
            first = next((token for token in sentence if token.value.strip()), None)
            if first is not None:
                starts.append(first.offset)
    # Token lengths cannot be trusted (contractions are rewritten), so a sentence ends where the next begins.
    for start, after in zip(starts, [*starts[1:], len(line)], strict=True):
        end = start + len(line[start:after].rstrip())
        bullet = _BULLET.match(line, start, end)
        start = bullet.end() if bullet else start
        if end > start:
            yield Span(start, end)

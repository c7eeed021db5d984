"""Describe a link's target by the seed page's own words: the linking sentence with the anchor blanked."""

import re
from dataclasses import dataclass

from groundhop.pipeline.cues import STOP_WORDS
from groundhop.pipeline.sentences import words_of
from groundhop.records import Hop

BLANK = "____"
_ENDS_CLAUSE = re.compile(r"[,;:—–)]$")
_TITLE_TAIL = re.compile(r"\s+[-–|·•:]\s+[^-–|·•]+$")
_TELLS = re.compile(r"^(?![’'‘]s\b)\W*\w")
_EDGE = " \t\"'“”‘’.,;:!?()[]…—–-*"


@dataclass(frozen=True, slots=True)
class Phrase:
    """A linking sentence, blanked and trimmed."""

    text: str
    """One line with exactly one blank where the link stood, `…` where words were cut."""
    queries: tuple[str, ...]
    """What to search for: its first `QUERY_WORDS` words, blank left out; then all its words, where those are more."""
    pieces: tuple[str, ...]
    """The word runs around the blank, as they stand on the seed page (white space folded)."""


QUERY_WORDS = 16
LEAST_TELLING = 5
"""A quotation with fewer different content words describes nothing."""


def link_phrase(text: str, hop: Hop, title: str, most: int = 30) -> Phrase | None:
    """Blank the anchor in the linking sentence and trim it to a clause of `most` words around the blank.

    None when too little is left to find the seed page by, or when the target is named a second time, so
    that a reader could not tell which blank is the link.
    """
    before = text[hop.sentence_start : hop.anchor_start]
    after = text[hop.anchor_end : hop.sentence_end]
    if _names_target(before, hop.anchor, title) or _names_target(after, hop.anchor, title):
        return None
    # An anchor inside a word ("Ellery" of "Ellerytown") takes the rest of the word along.
    glued = re.match(r"[\w-]*", after)
    after = after[glued.end() :] if glued else after
    before = re.sub(r"[\w’'-]+$", "", before)
    left, right, cut_left, cut_right = _window(before.split(), after.split(), most)
    pieces = tuple(piece for piece in (" ".join(left), " ".join(right)) if piece.strip(_EDGE))
    # What the blank leaves over (`,` or `'s`) is no word to search for.
    words = [*left, *(word for word in right[:1] if _TELLS.search(word)), *right[1:]]
    queries = tuple(dict.fromkeys(" ".join(run).strip(_EDGE) for run in (words[:QUERY_WORDS], words)))
    if len(set(words_of(queries[0])) - STOP_WORDS) < LEAST_TELLING:
        return None
    return Phrase(_render(before, after, left, right, cut_left, cut_right), queries, pieces)


def short_title(title: str) -> str:
    """A page's title without the site's name behind a dash or bar."""
    return _TITLE_TAIL.sub("", " ".join(title.split())) or title


def _names_target(words: str, anchor: str, title: str) -> bool:
    folded = f" {' '.join(words_of(words))} "
    names = (" ".join(words_of(name)) for name in (anchor, short_title(title)))
    return any(name and f" {name} " in folded for name in names)


def _window(before: list[str], after: list[str], most: int) -> tuple[list[str], list[str], bool, bool]:
    if len(before) + len(after) <= most:
        return before, after, False, False
    keep_after = min(len(after), max(most // 3, most - len(before)))
    keep_before = min(len(before), most - keep_after)
    left, right = before[len(before) - keep_before :], after[:keep_after]
    cut_left, cut_right = keep_before < len(before), keep_after < len(after)
    if cut_left:
        ends = [n for n, word in enumerate(left[: len(left) // 2]) if _ENDS_CLAUSE.search(word)]
        left = left[ends[0] + 1 :] if ends else left
    if cut_right:
        ends = [n for n, word in enumerate(right) if _ENDS_CLAUSE.search(word) and n >= len(right) // 2]
        right = right[: ends[-1] + 1] if ends else right
    return left, right, cut_left, cut_right


def _render(before: str, after: str, left: list[str], right: list[str], cut_left: bool, cut_right: bool) -> str:
    head = ("… " if cut_left else "") + " ".join(left)
    tail = " ".join(right) + (" …" if cut_right else "")
    glue_left = " " if left and (before[-1:].isspace() or not before) else ""
    glue_right = " " if right and after[:1].isspace() else ""
    line = f"{head}{glue_left}{BLANK}{glue_right}{tail}"
    return re.sub(r"[\"“”„«»]", "'", line).strip()

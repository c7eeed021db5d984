"""Find a quotation on a page: typography is folded, content is not."""

import unicodedata
from typing import NamedTuple

LEAST_WORDS = 3
LEAST_LETTERS = 10
"""Shorter quotations stand on any page and prove nothing."""

_FOLDED = {
    **dict.fromkeys("‘’‚‛′ʼʹ`´", "'"),
    **dict.fromkeys("“”„‟″«»", '"'),
    **dict.fromkeys("‐‑‒–—―−﹘﹣－", "-"),
    "…": "...",
}
_DROPPED = frozenset("\u00ad\u200b\u200c\u200d\u2060\ufeff\u200e\u200f")


class Place(NamedTuple):
    """Where the quotation stands in the page's text, half-open, in code points of that text."""

    start: int
    end: int


def ground(page_text: str, quote: str) -> Place | None:
    """The quotation's first place on the page, or None.

    Quotes, dashes, spaces, ligatures, soft hyphens and Unicode forms are folded; case, digits, currency signs and
    every other character must agree. A match that begins or ends inside a word or number (`190` of `1902`) is none.
    """
    wanted = fold(quote)
    words = wanted.split(" ")
    if len(words) < LEAST_WORDS or sum(character.isalnum() for character in wanted) < LEAST_LETTERS:
        return None
    text, origin = _folded_with_origin(page_text)
    start = text.find(wanted)
    while start >= 0:
        end = start + len(wanted)
        if _is_whole(text, start, end):
            return Place(origin[start].start, origin[end - 1].end)
        start = text.find(wanted, start + 1)
    return None


def fold(text: str) -> str:
    """Text as quotations are compared."""
    return _folded_with_origin(text)[0].strip()


def _is_whole(text: str, start: int, end: int) -> bool:
    opens = start == 0 or not (_joins(text[start - 1]) and _joins(text[start]))
    closes = end == len(text) or not (_joins(text[end - 1]) and _joins(text[end]))
    # 1,250 and 3.5 go on past their comma or point.
    number_before = start >= 2 and text[start].isdigit() and text[start - 1] in ".," and text[start - 2].isdigit()
    number_after = end + 1 < len(text) and text[end - 1].isdigit() and text[end] in ".," and text[end + 1].isdigit()
    return opens and closes and not number_before and not number_after


def _joins(character: str) -> bool:
    return character.isalnum() or unicodedata.combining(character) != 0


def _folded_with_origin(text: str) -> tuple[str, list[Place]]:
    """Folded text and, for each of its characters, the range it came from."""
    out: list[str] = []
    origin: list[Place] = []
    for cluster in _clusters(text):
        # A base and its marks are composed together, so that NFC and NFD spellings agree.
        for character in unicodedata.normalize("NFC", text[cluster.start : cluster.end]):
            for folded in _spelled(character):
                if folded in _DROPPED:
                    continue
                if folded.isspace():
                    if out and out[-1] == " ":
                        continue
                    folded = " "
                out.append(folded)
                origin.append(cluster)
    return "".join(out), origin


def _spelled(character: str) -> str:
    if character in _FOLDED:
        return _FOLDED[character]
    # Ligatures and full-width letters are typography; a superscript two or a half is content.
    tag = unicodedata.decomposition(character).partition(" ")[0]
    return (
        unicodedata.normalize("NFKC", character)
        if tag in {"<compat>", "<wide>", "<narrow>", "<noBreak>"}
        else character
    )


def _clusters(text: str) -> list[Place]:
    clusters: list[Place] = []
    for index, character in enumerate(text):
        if unicodedata.combining(character) and clusters:
            clusters[-1] = Place(clusters[-1].start, index + 1)
        else:
            clusters.append(Place(index, index + 1))
    return clusters

"""Fold what does not matter in a short answer: code point forms, case, quotes, dashes, articles, end marks.

What does matter is kept: letters, digits, signs such as `+`, `#`, `%`, currency marks, accents, order of words.
"""

import re
import unicodedata
from typing import Final

_KEPT_FORMS: Final = ("<super>", "<sub>", "<fraction>")
"""Compatibility forms that carry meaning: 10² is not 102, ½ is not 1/2 of something else."""
_SAME_MARKS: Final = str.maketrans(
    dict.fromkeys("‘’‚‛ʼ`´′", "'")
    | dict.fromkeys("“”„‟«»‹›″", '"')
    | dict.fromkeys("‐‑‒–—―−﹣", "-")
    | dict.fromkeys("\xad\u200b\u200c\u200d\u2060\ufeff")
)
_NO_ANSWERS: Final = frozenset(
    (
        "", "none", "n/a",
        "n.a", "n a", "null", "nil", "unknown", "not available", "not applicable", "not found",
        "no answer", "no answer found", "i don't know", "i do not know", "don't know", "not sure", "i am not sure",
        "cannot be determined", "cannot determine", "undetermined", "unanswerable", "?",
    )
)  # fmt: skip


def fold(text: str) -> str:
    """One spelling for one text: NFC, compatibility letters, one kind of quote, dash and space, case folded."""
    composed = unicodedata.normalize("NFC", "".join(_plain(character) for character in text))
    marks = composed.translate(_SAME_MARKS).casefold()
    return " ".join(unicodedata.normalize("NFC", marks).split())


def normalise(text: str) -> str:
    """The form in which two spellings of one short answer are equal; empty when only marks were there."""
    folded = fold(text).replace("&", " and ")
    folded = re.sub(r"(?<=\d)[,](?=\d{3}(?!\d))", "", folded)
    folded = re.sub(r"(?<!\d)\.|\.(?!\d)", "", folded)
    folded = re.sub(r"(?<![\W\d_])-(?=[^\W\d_])", " ", folded)
    folded = re.sub(r"""["()\[\]{}*_;!?]|,(?!\d)|(?<!\d),|:(?!\d)|(?<!\d):|(?<!\w)'|'(?!\w)""", " ", folded)
    words = folded.split()
    if len(words) > 1 and words[0] in {"the", "a", "an"}:
        words = words[1:]
    return " ".join(words)


def is_no_answer(text: str | None) -> bool:
    """Whether a text says that there is no answer: empty, `None`, `N/A`, `I don't know`, ..."""
    if text is None:
        return True
    folded = fold(text)
    words = folded.strip(" .!*_\"'()[]-")
    return words in _NO_ANSWERS if words else not folded.strip(" .*_-")


def _plain(character: str) -> str:
    form = unicodedata.decomposition(character)
    return character if not form or form.startswith(_KEPT_FORMS) else unicodedata.normalize("NFKC", character)

"""Refuse questions that lean on something the solver has not seen: a text, a pronoun without a name, the present day.

The check sees the question alone. It refuses when in doubt: another draft costs less than a question nobody can read.
"""

import re

_SEEN_TEXT = re.compile(
    r"\b(?:according to|in|from|based on|per|by|of|on|using)\s+(?:the|this|that|these|those)\s+(?:above\s+|given\s+|following\s+|provided\s+)?"
    r"(?:text|passage|article|document|excerpt|paragraph|context|source|content|snippet|extract|section|table|figure|story|author|information)\b"
    r"|\b(?:this|the (?:given|provided|following|above))\s+(?:text|passage|article|document|excerpt|paragraph|page|website|site|post|sentence|section|report|study|paper)\b"
    r"|\b(?:as|is|was|are|were)\s+(?:mentioned|described|stated|noted|discussed|shown|listed|explained|given|seen)\s+(?:above|below|earlier|previously|before|here|in the (?:text|passage|article|document))\b"
    r"|\b(?:mentioned|described|stated|listed|discussed|named|quoted|shown)\s+(?:above|below|earlier|previously|here)\b"
    r"|\b(?:the )?(?:above|aforementioned|preceding|foregoing)\b(?!\s+(?:sea|average|ground|all))"
    r"|\bthe (?:text|passage|article|author|document|excerpt)(?:'s|’s)?\s+(?:says?|states?|mentions?|describes?|claims?|notes?|give|gives|argues?|tells?)\b"
    r"|\b(?:did|does|do|has|have|had) the (?:author|writer|narrator|speaker|interviewee|researcher)s?\b"
    r"|\bdoes the (?:text|passage|article|author|document|excerpt)\b",
    re.IGNORECASE,
)
_NOW = re.compile(
    r"\b(?:current(?:ly)?|today|nowadays|now|at present|presently|these days|this (?:year|month|week|decade)|"
    r"(?:last|next) (?:year|month|week)|so far|to date|recent(?:ly)?|latest|newest|most recent|as of (?:now|today)|yesterday|tomorrow|ongoing)\b",
    re.IGNORECASE,
)
# "the current of the river", "the latest of the three": nouns and bounded sets are not the present day.
_NOT_NOW = re.compile(
    r"\b(?:electric(?:al)?|ocean|river|alternating|direct|water|air)\s+currents?\b|\bcurrents? of\b|\b(?:latest|newest) (?:of|among) the\b|\buntil now\b",
    re.IGNORECASE,
)
_DATED = re.compile(
    r"\b(?i:as of|in|by|since|on|during|until|before|after|at the end of)\s+(?:the\s+)?(?:[A-Z][a-z]+\s+)?(?:\d{1,2},?\s+)?(?:1\d{3}|20\d{2})\b"
)
_PRONOUN = re.compile(
    r"\b(?:he|she|they|him|her|them|his|hers|their|theirs|himself|herself|themselves|it|its|itself)\b", re.IGNORECASE
)
_POINTER = re.compile(
    r"\b(?:this|that|these|those|such)\s+(?!(?:is|was|are|were|would|can|could|has|had|have|will|may|might|the|it|he|she|they|a|an)\b)[a-z]{3,}",
    re.IGNORECASE,
)
_QUESTION_WORDS = frozenset(
    [
        "which",
        "what",
        "when",
        "where",
        "who",
        "whom",
        "whose",
        "why",
        "how",
        "in",
        "on",
        "at",
        "by",
        "of",
        "for",
        "from",
        "to",
        "during",
        "under",
        "after",
        "before",
        "is",
        "was",
        "are",
        "were",
        "did",
        "does",
        "do",
        "has",
        "had",
        "have",
        "can",
        "could",
        "name",
        "the",
        "a",
        "an",
        "and",
        "according",
        "into",
        "as",
        "if",
        "within",
        "since",
        "until",
        "with",
        "between",
        "among",
    ]
)
_NAME = re.compile(r"[A-Z0-9][\w’'&.-]*")


_CHANGES = re.compile(
    r"\bhow (?:old|rich|tall) (?:is|are)\b|^who (?:is|are) the\b|\bwho (?:owns|runs|leads|heads|chairs)\b"
    r"|\b(?:is|are|does|do)\b[^?]*\b(?:population|price|salary|net worth|share price|membership|budget|headcount)\b",
    re.IGNORECASE,
)
"""What is asked in the present tense and differs from year to year."""


def refusal(question: str) -> str | None:
    """Why a question cannot stand alone, in a few words; None when it can."""
    words = " ".join(question.split())
    if len(words) < 12 or "?" not in words:
        return "no question"
    quoted = re.sub(r"[\"“][^\"”]*[\"”]", ' "quotation" ', words)
    if found := _SEEN_TEXT.search(quoted):
        return f"leans on a text: {found.group()}"
    bare = _NOT_NOW.sub(" ", quoted)
    if (found := _NOW.search(bare)) and not _DATED.search(quoted):
        return f"not dated: {found.group()}"
    if (found := _CHANGES.search(bare)) and not _DATED.search(quoted):
        return f"not dated: {found.group()}"
    if dangling := _dangling(quoted):
        return f"nothing before it that it could mean: {dangling}"
    if not _names(quoted) and '"quotation"' not in quoted:
        return "names nothing"
    return None


def is_selfcontained(question: str) -> bool:
    """Whether a question can be understood without any text beside it."""
    return refusal(question) is None


def _dangling(words: str) -> str | None:
    """A pronoun or `this thing` with no name and no noun phrase before it in the question."""
    for found in sorted([*_PRONOUN.finditer(words), *_POINTER.finditer(words)], key=lambda match: match.start()):
        before = words[: found.start()]
        if _names(before) or _NOUN_PHRASE.search(before) or _introduced(before) or '"quotation"' in before:
            continue
        return found.group()
    return None


_NOUN_PHRASE = re.compile(r"\bthe\s+(?:[a-z-]+\s+)*[a-z-]{3,}\s+(?=[a-z])", re.IGNORECASE)


def _introduced(before: str) -> bool:
    # "Which board sold its pier": the question's own noun is what the pronoun means.
    return re.search(
        r"\b(?:which|what|a|an)\s+(?:[a-z-]+\s+){0,3}?[a-z]{3,}\b", before, re.IGNORECASE
    ) is not None and bool(
        re.search(
            r"\b(?:which|a|an|what)\s+(?!did\b|was\b|is\b|does\b|do\b|were\b|are\b|has\b|year\b|date\b|time\b|number\b)",
            before,
            re.IGNORECASE,
        )
    )


def _names(words: str) -> list[str]:
    """Capitalised words and numbers that are no mere sentence beginning."""
    return [
        found.group()
        for found in _NAME.finditer(words)
        if found.group().casefold().strip(".'’") not in _QUESTION_WORDS
        and not (found.start() == 0 and found.group().isalpha())
    ]

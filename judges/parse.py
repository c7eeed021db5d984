"""Read a judge's reply strictly: its last verdict outside reasoning, or no verdict at all.

The reply's fields (`extracted_final_answer`, `reasoning`, `correct`, `confidence`) are those of the BrowseComp grader
(Wei et al. 2025, arXiv 2504.12516). A verdict is a field `correct` at the start of a line, or of a JSON object, whose
value is yes or no and nothing else. What offers both words is the template read back, and is skipped.
"""

import json
import re
import unicodedata
from typing import Any, Final, Literal

from groundhop.errors import NoVerdictError

Reading = Literal["yes", "no", "unparsed"]

_QUOTES: Final = str.maketrans("‘’“”", "''\"\"")
_REASONING: Final = re.compile(r"<(think|thinking|reasoning|thought)>.*?(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE)
_LATE_END: Final = re.compile(r"\A.*</(?:think|thinking|reasoning|thought)>", re.DOTALL | re.IGNORECASE)
_FIELD: Final = re.compile(
    r"^[ \t*_#`\-+\[({\d.)]*(?:correct|\"correct\")[ \t*_`\])}?]*[:=][ \t]*(?P<value>[^\n]*)",
    re.IGNORECASE | re.MULTILINE,
)
_STATED: Final = re.compile(
    r"""[\s*_`'"(\[]*(?P<word>yes|no)(?=[\s*_`'"\])]*(?:\Z|[.,;(}]|\s[-–—]\s|\bconfidence\b))""", re.IGNORECASE
)
_CLOSING: Final = re.compile(
    r"[.;|!][ \t]+[*_`]*correct[*_`]*[ \t]*:[*_` \t]*(?P<value>yes|no)[*_`.\s]*(?:[*_`]*confidence[*_`]*\s*:[^\n]*)?\s*\Z",
    re.IGNORECASE,
)
_CONFIDENCE: Final = re.compile(
    r"^[\s*_#`\-\"]*confidence[\s*_`\"]*[:=](?P<value>[^\n]*)", re.IGNORECASE | re.MULTILINE
)
_AMOUNT: Final = re.compile(
    r"\A[\s*_`\"|]*(?P<number>\d+(?:\.\d+)?)\s*(?P<mark>%|percent\b|/\s*100\b)?[\s*_`.,;|\"}\\]*%?[\s|*]*(?:\(.*\))?\s*\Z",
    re.I,
)


def read_verdict(reply: str) -> bool:
    """Whether the judge said yes. Raises: NoVerdictError when it said neither yes nor no."""
    reading = verdict_in(reply)
    if reading == "unparsed":
        raise NoVerdictError(
            f"no verdict in the judge's reply, wanted a line `correct: yes` or `correct: no`: {reply[:200]!r}"
        )
    return reading == "yes"


def verdict_in(reply: str) -> Reading:
    """The last verdict of a reply; `unparsed` for anything that is not plainly yes or no."""
    text = without_reasoning(unicodedata.normalize("NFKC", reply).translate(_QUOTES))
    structured = _from_json(text)
    if structured is not None:
        return structured
    fields = [(match, text[match.end() :]) for match in _FIELD.finditer(text)]
    fields += [(match, "") for match in _CLOSING.finditer(text)]
    fields.sort(key=lambda field: field[0].start())
    for match, after in reversed(fields):
        reading = _value(match["value"], after)
        if reading is not None:
            return reading
    return "unparsed"


def without_reasoning(text: str) -> str:
    """The text outside `<think>` blocks; a block that never ends swallows the rest."""
    return _LATE_END.sub("", _REASONING.sub("", text))


def confidence_of(text: str | None) -> float | None:
    """The last stated confidence in percent; None when missing, in words or outside 0 to 100.

    A number with a decimal point that is at most 1 and carries no percent sign is a share (`0.9` is 90); all else
    is percent (`90`, `90%`, `1` is one percent).
    """
    stated = _CONFIDENCE.findall(without_reasoning(unicodedata.normalize("NFKC", text or "")))
    match = _AMOUNT.match(stated[-1]) if stated else None
    if match is None:
        return None
    number = float(match["number"])
    if "." in match["number"] and number <= 1 and "%" not in stated[-1] and not match["mark"]:
        number *= 100
    return number if number <= 100 else None


def _value(value: str, after: str) -> Reading | None:
    """Yes, no or unparsed as stated; None for a template that offers both."""
    words = re.findall(r"[a-z]+|[/|]", value.lower().replace("’", "'"))
    if not words:  # the value may stand on the next line
        following = after.strip().split("\n", 1)[0] if after.strip() else ""
        return _value(following, "") if following and len(following) < 12 else "unparsed"
    if {"yes", "no"} <= set(words) or re.search(r"['\"]?(?:yes|no)['\"]?\s+(?:if|when)\b", value, re.IGNORECASE):
        return None
    match = _STATED.match(value)
    if match is None:
        return "unparsed"
    return "yes" if match["word"].lower() == "yes" else "no"


def _from_json(text: str) -> Reading | None:
    """The verdict of a reply that is one JSON object; None for any other reply."""
    stripped = re.sub(r"\A\s*```(?:json)?\s*|\s*```\s*\Z", "", text.strip())
    if not stripped.startswith("{"):
        return None
    try:
        loaded: Any = json.loads(stripped)
    except ValueError:
        return None
    value = loaded.get("correct") if isinstance(loaded, dict) else None
    if isinstance(value, bool):
        return "yes" if value else "no"
    stated = _value(value, "") if isinstance(value, str) else None
    return stated or "unparsed"

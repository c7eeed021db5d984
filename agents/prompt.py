"""What the agent is told, and how its answer is read. One prompt for traces, rollouts, training and evaluation."""

import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from groundhop.agents.untrusted import defang
from groundhop.errors import MissingError

Message = dict[str, Any]

_LABEL = r"(?:explanation|exact answer|confidence)"
_ANSWER = re.compile(r"^[^\w\n]*exact answer[*_`\s]*[:：][*_`]*[^\S\n]*(?P<value>[^\n]*)", re.IGNORECASE | re.MULTILINE)
_NEXT_LINE = re.compile(rf"\s*^(?!\W*{_LABEL}\b)(?P<value>[^\n]*\S[^\n]*)", re.IGNORECASE | re.MULTILINE)
_CONFIDENCE = re.compile(r"^[^\w\n]*confidence[*_`\s]*[:：][*_`\s]*(?P<value>[^\n]*)", re.IGNORECASE | re.MULTILINE)
_NUMBER = re.compile(r"(?P<number>[-+]?\d+(?:[.,]\d+)?)\s*(?P<percent>%|percent)?", re.IGNORECASE)
_PLACEHOLDER = re.compile(
    r"^(?:\.{2,}|…|[<{\[(][^>}\])]*\banswer\b[^>}\])]*[>}\])]|the answer alone.*|your answer)$", re.IGNORECASE
)


@cache
def system_prompt(path: Path | None = None) -> str:
    """The system text: `prompts/system.txt`, or the file that a run names. Raises: MissingError without it."""
    if path is None:
        return _own("system.txt")
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError as error:
        raise MissingError(f"no prompt file {path}") from error


def first_messages(question: str, prompt: Path | None = None) -> list[Message]:
    """The system and user messages that every conversation begins with."""
    return [
        {"role": "system", "content": system_prompt(prompt)},
        {"role": "user", "content": defang(question).strip()},
    ]


def final_request() -> str:
    """What the user says when a budget ran out, or a turn held neither call nor answer."""
    return _own("final.txt")


def answer_of(text: str) -> str | None:
    """The answer on the last line `Exact Answer: ...`; None where there is none, or only the prompt's own words.

    Bold is tolerated; an answer on the line after its label counts.
    """
    for match in reversed(list(_ANSWER.finditer(text))):
        value = match["value"]
        if not _bare(value) and (following := _NEXT_LINE.match(text, match.end())):
            value = following["value"]
        value = _bare(value)
        if value and not _PLACEHOLDER.match(value):
            return value
    return None


def confidence_of(text: str) -> float | None:
    """The last stated confidence as a share in [0, 1]; None when absent, in words, or outside 0 to 100 %.

    A number without a percent sign is a share if it is written with a decimal point and is at most 1 (`0.9`),
    and percent otherwise (`90`, `1`).
    """
    stated = list(_CONFIDENCE.finditer(text))
    number = _NUMBER.search(stated[-1]["value"]) if stated else None
    if number is None:
        return None
    value = float(number["number"].replace(",", "."))
    is_share = not number["percent"] and value <= 1 and re.search(r"[.,]", number["number"]) is not None
    share = value if is_share else value / 100
    return share if 0 <= share <= 1 else None


def chat_template() -> str:
    """The ChatML template with tools that built-in models get."""
    return files("groundhop.agents").joinpath("chat_template.jinja").read_text(encoding="utf-8")


def _bare(value: str) -> str:
    return re.sub(r"^[\s*_`]+|[\s*_`]+$", "", value)


@cache
def _own(name: str) -> str:
    return files("groundhop.agents").joinpath("prompts", name).read_text(encoding="utf-8").strip()

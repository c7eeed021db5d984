"""Read Hermes-style tool calls out of what a model wrote.

    <tool_call>
    {"name": "search", "arguments": {"queries": ["..."]}}
    </tool_call>

or, as Qwen3-Coder and Nemotron 3 write them:

    <tool_call>
    <function=search>
    <parameter=queries>
    ["..."]
    </parameter>
    </function>
    </tool_call>

A call ends where its JSON ends, not at the next `</tool_call>`: a query may quote that tag. What stands in closed
reasoning (`<think>...</think>`) is never executed. Reasoning that is never closed is no answer, but a call in it is
a call: reasoning models that go straight to a tool often leave out the end tag.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from groundhop.agents.untrusted import clean_values
from groundhop.errors import MalformedCallError

_CLOSE = "</tool_call>"
_TAG = re.compile(r"<tool_call>|<(?P<slash>/?)(?:think|thinking|thought|reasoning)>", re.IGNORECASE)
_FUNCTION = re.compile(
    r"\s*<function=(?P<name>[^>\n]*)>(?P<body>.*?)</function>(?=\s*(?:</tool_call>|<tool_call>|$))", re.DOTALL
)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|$))", re.DOTALL)
_FENCE = re.compile(r"\s*```(?:json)?\s*", re.IGNORECASE)
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One call as the model wrote it; the tool layer decides whether its arguments make sense."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """What one model turn says."""

    content: str
    """Prose outside calls and reasoning, stripped; unreadable calls stay in it as they were written."""
    calls: tuple[ParsedCall, ...]
    errors: tuple[str, ...]
    """One sentence for each call that could not be read."""


@dataclass(slots=True)
class _Found:
    """What was read so far; `mark` remembers the sizes at an opening reasoning tag."""

    prose: list[str]
    calls: list[ParsedCall]
    errors: list[str]
    mark: tuple[int, int, int] | None = None

    def sizes(self) -> tuple[int, int, int]:
        return len(self.prose), len(self.calls), len(self.errors)

    def forget_since(self, mark: tuple[int, int, int]) -> None:
        del self.prose[mark[0] :], self.calls[mark[1] :], self.errors[mark[2] :]


def read_turn(text: str, finish_reason: str = "stop") -> ParsedTurn:
    """Split a turn into prose and calls. `finish_reason` "length" marks text that was cut; never raises."""
    found = _Found(prose=[], calls=[], errors=[])
    position = 0
    while tag := _TAG.search(text, position):
        found.prose.append(text[position : tag.start()])
        position = tag.end()
        if tag["slash"] == "/":
            # Without an opening tag the template opened the reasoning: all text before was part of it.
            found.forget_since(found.mark or (0, 0, 0))
            found.mark = None
        elif tag["slash"] == "":
            found.mark = found.mark or found.sizes()
        else:
            position = _take_call(text, tag.start(), position, finish_reason, found)
    found.prose.append(text[position:])
    if found.mark is not None:
        _leave_open_reasoning(found, found.mark)
    content = "\n".join(piece for piece in (p.strip() for p in found.prose) if piece)
    return ParsedTurn(content, tuple(found.calls), tuple(found.errors))


def parse_calls(text: str, finish_reason: str = "stop") -> list[ParsedCall]:
    """The calls of a turn. Raises: MalformedCallError when one cannot be read or was cut off."""
    turn = read_turn(text, finish_reason)
    if turn.errors:
        raise MalformedCallError(turn.errors[0])
    return list(turn.calls)


def read_arguments(value: object) -> dict[str, Any]:
    """Arguments as an object: a JSON string is decoded once; absent, null and empty become `{}`.

    Raises: MalformedCallError for anything else.
    """
    if isinstance(value, str):
        value = _decode(value) if value.strip() else {}
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise MalformedCallError(f"arguments must be a JSON object, got {type(value).__name__}")
    cleaned = clean_values(value)
    assert isinstance(cleaned, dict)
    return cleaned


def _leave_open_reasoning(found: _Found, mark: tuple[int, int, int]) -> None:
    del found.prose[mark[0] :]
    if len(found.calls) > mark[1]:
        # Reasoning may mention the tag in passing; with a real call behind it that is no fault.
        del found.errors[mark[2] :]


def _take_call(text: str, tag_start: int, start: int, finish_reason: str, found: _Found) -> int:
    try:
        calls, end = _calls_at(text, start, finish_reason)
    except MalformedCallError as error:
        found.errors.append(str(error))
        end = _end_of_unreadable(text, start)
        found.prose.append(text[tag_start:end])
        return end
    found.calls.extend(calls)
    return end


def _end_of_unreadable(text: str, start: int) -> int:
    """The earliest sign that an unreadable call is over: its end tag or the next tag of any kind."""
    close = text.find(_CLOSE, start)
    following = _TAG.search(text, start)
    ends = [close + len(_CLOSE)] if close >= 0 else []
    ends += [following.start()] if following else []
    return min(ends, default=len(text))


def _calls_at(text: str, start: int, finish_reason: str) -> tuple[list[ParsedCall], int]:
    if text.startswith("<function", _skip_space(text, start)):
        return _function_at(text, start, finish_reason)
    fence = _FENCE.match(text, start)
    body = fence.end() if fence else _skip_space(text, start)
    value, end = _raw_decode(text, body, finish_reason)
    if fence and (closing := re.compile(r"\s*```").match(text, end)):
        end = closing.end()
    after = _skip_space(text, end)
    if text.startswith(_CLOSE, after):
        end = after + len(_CLOSE)
    elif finish_reason == "length" and _CLOSE.startswith(text[after:]):
        raise MalformedCallError("the call was cut off before its </tool_call>")
    elif after < len(text) and not _TAG.match(text, after):
        raise MalformedCallError(f"need </tool_call> after the call's JSON, got {text[after : after + 20]!r}")
    items = value if isinstance(value, list) and value else [value]
    return [_call_of(item) for item in items], end


def _function_at(text: str, start: int, finish_reason: str) -> tuple[list[ParsedCall], int]:
    match = _FUNCTION.match(text, start)
    if match is None:
        raise MalformedCallError(
            "the call was cut off" if finish_reason == "length" else "the call has no </function> at its end"
        )
    after = _skip_space(text, match.end())
    if not text.startswith(_CLOSE, after) and finish_reason == "length":
        raise MalformedCallError("the call was cut off before its </tool_call>")
    arguments = {name.strip(): _parameter(value) for name, value in _PARAMETER.findall(match["body"].strip())}
    end = after + len(_CLOSE) if text.startswith(_CLOSE, after) else match.end()
    return [_call_of({"name": match["name"], "arguments": arguments})], end


def _parameter(text: str) -> object:
    """Lists and objects are JSON in this form; all else is the text itself, which needs no quotes."""
    if text.lstrip().startswith(("[", "{")):
        try:
            return _decode(text)
        except MalformedCallError:
            return text
    return text


def _call_of(value: object) -> ParsedCall:
    if not isinstance(value, dict):
        raise MalformedCallError(f"a call is a JSON object with name and arguments, got {type(value).__name__}")
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        raise MalformedCallError('a call needs "name": the name of a tool')
    return ParsedCall(str(clean_values(name.strip())), read_arguments(value.get("arguments")))


def _skip_space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    return match.end() if match else start


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# Control characters inside strings are let through: models write line feeds there.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)


def _raw_decode(text: str, start: int, finish_reason: str) -> tuple[object, int]:
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        cut = finish_reason == "length"
        raise MalformedCallError("the call was cut off" if cut else f"the call is not valid JSON: {error}") from error
    return value, end


def _decode(text: str) -> object:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise MalformedCallError(f"arguments are not valid JSON: {error}") from error

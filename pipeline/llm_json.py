"""Read the one JSON object out of a model's reply, or say that there is none: never half of one, never a draft."""

import json
import re
from typing import Any, TypeVar

import msgspec

from groundhop.errors import InputError

T = TypeVar("T")

_OPENS_REASONING = re.compile(r"<(think|thinking|reasoning|thought|scratchpad)\b[^>]*>", re.IGNORECASE)
_CLOSES_REASONING = re.compile(r"</(?:think|thinking|reasoning|thought|scratchpad)\s*>", re.IGNORECASE)
_INTEREST = re.compile(r"[{\[<]")


def _refuse_constant(name: str) -> Any:
    raise InputError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def parse(raw: str, finish_reason: str | None = "stop") -> dict[str, Any]:
    """The reply's last whole top-level JSON object outside its reasoning; fences and prose around it do not matter.

    Raises: InputError when the reply was cut (`finish_reason` length or content_filter), is empty, refuses, holds
    another shape, or ends in a broken object.
    """
    if finish_reason in {"length", "content_filter", "max_tokens"}:
        raise InputError(f"the reply was cut: finish_reason {finish_reason}")
    found = _last_object(raw)
    if found is None:
        raise InputError(f"no JSON object in the reply {raw[:80]!r}")
    return found


def parse_fields(raw: str, finish_reason: str | None, required: tuple[str, ...]) -> dict[str, Any]:
    """As `parse`, and each of `required` must be there, not null and not blank. Raises: InputError."""
    found = parse(raw, finish_reason)
    for name in required:
        value = found.get(name)
        if (
            value is None
            or (isinstance(value, str | list | dict) and not value)
            or (isinstance(value, str) and not value.strip())
        ):
            raise InputError(f"the reply's {name!r} is missing or empty: {str(found)[:120]}")
    return found


def parse_as(raw: str, finish_reason: str | None, kind: type[T]) -> T:
    """As `parse`, checked against a Struct. Raises: InputError that names the field."""
    try:
        return msgspec.convert(parse(raw, finish_reason), kind, strict=True)
    except msgspec.ValidationError as error:
        raise InputError(f"the reply has another shape: {error}") from error


def _last_object(raw: str) -> dict[str, Any] | None:
    found: dict[str, Any] | None = None
    position = 0
    while (start := _INTEREST.search(raw, position)) is not None:
        at = start.start()
        if raw[at] == "<":
            if _OPENS_REASONING.match(raw, at):
                closing = _CLOSES_REASONING.search(raw, at)
                if closing is None:
                    return None
                position = closing.end()
            elif closing := _CLOSES_REASONING.match(raw, at):
                # Some servers strip the opening tag: all before the closing one was reasoning.
                found, position = None, closing.end()
            else:
                position = at + 1
            continue
        value, position = _decode(raw, at)
        if isinstance(value, dict):
            found = value
        elif value is _BROKEN:
            found = None
    return found


_BROKEN = object()
_SKIPPED = object()
_LOOKS_LIKE_OBJECT = re.compile(r"[{\[]\s*[\"{]")


def _decode(raw: str, at: int) -> tuple[object, int]:
    """The value that begins at `at` and where to go on. A broken object is skipped whole: its insides are no answer."""
    try:
        value, end = _DECODER.raw_decode(raw, at)
    except RecursionError:
        # Nobody asked for a thousand brackets, and trying each of them in turn would take for ever.
        return _BROKEN, len(raw)
    except (json.JSONDecodeError, InputError):
        if not _LOOKS_LIKE_OBJECT.match(raw, at):
            return _SKIPPED, at + 1
        return _BROKEN, _matching_end(raw, at)
    return value, end


def _matching_end(raw: str, at: int) -> int:
    depth = 0
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"|[{\[]|[}\]]', raw[at:], re.DOTALL):
        if token.group() in "{[":
            depth += 1
        elif token.group() in "}]":
            depth -= 1
            if depth == 0:
                return at + token.end()
    return len(raw)

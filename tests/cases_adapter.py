"""The project's functions under the names that row fixtures of failure cases are checked through."""

from typing import Any

from groundhop.agents.toolcalls import parse_calls
from groundhop.judges.parse import verdict_in


def parse_tool_calls(raw_text: str, finish_reason: str) -> list[dict[str, Any]]:
    """The calls of one assistant text. Raises: MalformedCallError, a ValueError."""
    return [{"name": call.name, "arguments": call.arguments} for call in parse_calls(raw_text, finish_reason)]


def judge_verdict(judge_text: str) -> str:
    """`yes`, `no` or `unparsed`."""
    return verdict_in(judge_text)

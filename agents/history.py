"""Shorten a conversation so that it fits, without ever parting a tool call from its result."""

from collections.abc import Callable, Sequence

from groundhop.agents.prompt import Message


def rounds(messages: Sequence[Message]) -> tuple[list[Message], list[list[Message]]]:
    """Split into the head (all before the first assistant turn) and rounds: an assistant turn and what answers it."""
    first = next((n for n, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    found: list[list[Message]] = []
    for message in messages[first:]:
        if message["role"] == "assistant" or not found:
            found.append([])
        found[-1].append(message)
    return list(messages[:first]), found


def trim(messages: Sequence[Message], limit: int, size: Callable[[Message], int]) -> list[Message]:
    """Drop the oldest rounds until the rest has at most `limit` by `size`.

    The head (system and first user message) and the newest round always stay, even where they alone are too large.
    Order is kept; each tool message stays with the call that it answers.
    """
    head, body = rounds(messages)
    sizes = [sum(size(m) for m in each) for each in body]
    left = limit - sum(size(m) for m in head) - sum(sizes)
    dropped = 0
    while left < 0 and dropped < len(body) - 1:
        left += sizes[dropped]
        dropped += 1
    return head + [message for each in body[dropped:] for message in each]

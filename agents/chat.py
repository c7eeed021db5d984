"""What the loop asks of a language model, whichever way it is reached."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from groundhop.agents.prompt import Message
from groundhop.agents.toolcalls import ParsedTurn
from groundhop.records import TokenSpan


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call with the id that its result answers to."""

    id: str
    name: str
    arguments: dict[str, Any] | None
    """None when the model's arguments could not be read; `error` says why."""
    error: str = ""

    def as_message(self) -> dict[str, Any]:
        """The OpenAI form. Unreadable arguments become `{}`: servers refuse a history with broken JSON in it."""
        arguments = json.dumps(self.arguments or {}, ensure_ascii=False)
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn of the model."""

    content: str = ""
    """Prose: neither calls nor reasoning."""
    calls: tuple[Call, ...] = ()
    errors: tuple[str, ...] = ()
    """Calls that could not be read at all and have no id to answer to."""
    cut: bool = False
    """Whether the token limit ended it."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    dollars: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """Token ids of a conversation with what training needs of them; all empty where the server gives no ids."""

    ids: tuple[int, ...] = ()
    prompt_length: int = 0
    mask: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    spans: tuple[TokenSpan, ...] = ()


class Session(Protocol):
    """One conversation."""

    def size(self, new: Sequence[Message]) -> int:
        """Tokens of the conversation with `new` messages and the opening of the next turn; an estimate where ids are unknown."""
        ...

    async def reply(self, new: Sequence[Message], *, limit: int, tools: bool) -> Reply:
        """Take in the messages since the last reply and sample a turn of at most `limit` >= 1 tokens.

        Without `tools` the model is to answer. Raises: ServerError when the server fails after retries, ContextError
        when the conversation does not fit the model, CredentialError.
        """
        ...

    def record(self) -> TokenRecord:
        """What was said so far, in tokens."""
        ...


class ChatModel(Protocol):
    """A policy that can hold many conversations at once."""

    @property
    def context(self) -> int:
        """Tokens that a conversation may have at most."""
        ...

    def open(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, seed: int) -> Session:
        """Begin a conversation; nothing is sent yet."""
        ...


def reply_of(turn: ParsedTurn, prefix: str, **facts: Any) -> Reply:
    """Make a reply of a parsed text; ids are `prefix` and a number, the same whenever the turn is read."""
    calls = tuple(Call(f"{prefix}_{n}", c.name, c.arguments) for n, c in enumerate(turn.calls))
    return Reply(content=turn.content, calls=calls, errors=turn.errors, **facts)


def turn_seed(seed: int, turn: int) -> int:
    """A seed in [0, 2^31) for one turn of a rollout."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{turn}".encode()).digest()[:4]) >> 1

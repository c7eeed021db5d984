"""A model and tools that follow a script: for tests of the loop and of what is built on it, without a server."""

from collections.abc import Sequence
from typing import Any

from groundhop.agents.chat import Reply, TokenRecord, reply_of
from groundhop.agents.toolcalls import read_turn
from groundhop.agents.tools import ToolResult


class ScriptedModel:
    """Says the given texts in turn; an exception is raised, a text that begins with `CUT:` was cut by its limit.

    Sizes are counted in words. Holds one conversation at a time.
    """

    def __init__(self, *texts: str | Exception, context: int = 10_000, turn_size: int = 10) -> None:
        self.context = context
        self.texts = list(texts)
        self.turn_size = turn_size
        self.seen: list[tuple[list[dict[str, Any]], int, bool]] = []
        """For each reply: the new messages, the limit, whether tools were offered."""
        self.used = 0

    def open(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], *, seed: int
    ) -> "ScriptedModel":
        """Begin a conversation."""
        self.used = sum(words(m) for m in messages)
        return self

    def size(self, new: Sequence[dict[str, Any]]) -> int:
        """Words so far, with those of `new`."""
        return self.used + sum(words(m) for m in new)

    async def reply(self, new: Sequence[dict[str, Any]], *, limit: int, tools: bool) -> Reply:
        """Say the next text."""
        assert limit >= 1
        assert self.size(new) + limit <= self.context
        self.seen.append((list(new), limit, tools))
        text = self.texts.pop(0)
        if isinstance(text, Exception):
            raise text
        self.used = self.size(new) + self.turn_size
        cut = text.startswith("CUT:")
        turn = read_turn(text.removeprefix("CUT:"), "length" if cut else "stop")
        return reply_of(turn, f"call_{len(self.seen)}", cut=cut, completion_tokens=self.turn_size)

    def record(self) -> TokenRecord:
        """No token ids."""
        return TokenRecord()


def words(message: dict[str, Any]) -> int:
    """Words of a message."""
    return len(str(message["content"]).split())


class ScriptedTools:
    """Answers `text`, or what is given for a tool's name, and remembers what was asked."""

    def __init__(self, text: str = "a result", **results: ToolResult) -> None:
        self.text = text
        self.results = results
        self.asked: list[tuple[str, dict[str, Any]]] = []

    async def call(self, name: str, arguments: dict[str, Any], forbidden: Sequence[str] = ()) -> ToolResult:
        """Answer from the table."""
        self.asked.append((name, arguments))
        return self.results.get(name, ToolResult(self.text, "ok"))

    def fit(self, text: str, tokens: int) -> str:
        """Cut to words."""
        return " ".join([*text.split()[: max(0, tokens - 1)], "[cut]"])

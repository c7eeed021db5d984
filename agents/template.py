"""Turn messages into token ids through a tokenizer's chat template, once at the start and then by suffixes only.

Text is never tokenised twice: what the model sampled keeps its ids, and each further turn adds the ids of the
template's text between that turn and the next (TRL issues 5144 and 5224 show what happens otherwise).
"""

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from groundhop.agents.prompt import Message
from groundhop.agents.untrusted import defang
from groundhop.errors import ConfigError, MissingError

logger = logging.getLogger(__name__)

_MARK = "groundhopturn"
_CALL_TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


class TemplateCodec:
    """A tokenizer with its chat template."""

    def __init__(self, model_folder: Path) -> None:
        """Load the tokenizer. Raises: MissingError without it; ConfigError when its template cannot hold tool results."""
        from transformers import AutoTokenizer

        if not model_folder.is_dir():
            raise MissingError(f"no model folder {model_folder}")
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(model_folder))
        if not self._tokenizer.chat_template:
            raise ConfigError(f"the tokenizer in {model_folder} has no chat template: set model.chat_template")
        added: dict[str, int] = self._tokenizer.get_added_vocab()
        self.control_tokens = tuple(sorted((t for t in added if t.strip() and len(t) > 1), key=lambda t: (-len(t), t)))
        """The tokenizer's added tokens, longest first: text of others must never hold one."""
        specials = set(self._tokenizer.all_special_tokens) - set(_CALL_TAGS)
        self._dropped = frozenset(added[t] for t in specials if t in added)
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        # The wrapper around the Rust tokenizer costs more than the tokenizer.
        self._encode: Callable[[str], list[int]] = (
            (lambda text: self._tokenizer.encode(text, add_special_tokens=False))
            if backend is None
            else (lambda text: list(backend.encode(text, add_special_tokens=False).ids))
        )
        self._count = lru_cache(maxsize=20_000)(lambda text: len(self._encode(text)))
        self._closing = self._encode(self._after_mark([], generation=False))
        opening = self._after_mark([{"role": "user", "content": "?"}], generation=True)
        self.opens_reasoning = opening.rstrip().endswith("<think>")
        """Whether the template begins the assistant's turn inside reasoning, which the sampled text then only closes."""
        if not self._closing:
            raise ConfigError(f"the chat template in {model_folder} does not end an assistant turn")

    @property
    def end_of_turn(self) -> int:
        """The token by which the model ends its turn."""
        return self._closing[0]

    def count(self, text: str) -> int:
        """Tokens of a plain text. Remembered: rollouts of one question see the same results."""
        return self._count(text)

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """Ids of the first messages and of the opening of the assistant's turn."""
        return self._encode(self._render(messages, tools=list(tools), generation=True))

    def suffix(self, new: Sequence[Message], *, ended: bool) -> list[int]:
        """Ids from the end of a sampled turn to the opening of the next one.

        `ended`: the model sampled the end of its turn itself, so it is left out.
        """
        ids = self._encode(self._after_mark(new, generation=True))
        return ids[1:] if ended and ids[0] == self.end_of_turn else ids

    def text(self, ids: Sequence[int]) -> str:
        """The text of sampled ids without control tokens."""
        kept = [i for i in ids if i not in self._dropped and i != self.end_of_turn]
        text: str = self._tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _after_mark(self, new: Sequence[Message], *, generation: bool) -> str:
        base: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        text = self._render([*base, *new], tools=None, generation=generation)
        return text[text.index(_MARK) + len(_MARK) :]

    def _render(self, messages: Sequence[Message], *, tools: list[dict[str, Any]] | None, generation: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(
            [self._harmless(m) for m in messages], tools=tools, tokenize=False, add_generation_prompt=generation
        )
        return text

    def _harmless(self, message: Message) -> Message:
        """The last guard: a tool's or user's text that holds a control token is broken up here, whoever wrote it."""
        content = message.get("content")
        if message["role"] not in {"tool", "user"} or not isinstance(content, str):
            return message
        if any(token in content for token in self.control_tokens):
            logger.warning("a %s message held a control token", message["role"])
            return {**message, "content": defang(content, self.control_tokens)}
        return message

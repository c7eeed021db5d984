"""Which tokens of a conversation are trained: those inside the chat template's {% generation %} markers, no others."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from groundhop.errors import ConfigError
from groundhop.records import Trace

IGNORED = -100
"""The label of a token that is not trained (the ignore_index of torch's cross entropy)."""

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")

DropReason = Literal["no_trained_token", "too_long", "template_failed"]


class ChatTokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    name_or_path: str

    def get_chat_template(self, chat_template: str | None = None, tools: list[Any] | None = None) -> str:
        """The template's text. Raises: ValueError without one."""
        ...

    def apply_chat_template(self, conversation: list[Any], **settings: Any) -> Any:
        """Render and encode."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One row for SFT. Both lists are equally long; a label is its token or `IGNORED`."""

    id: str
    input_ids: list[int]
    labels: list[int]

    @property
    def trained(self) -> int:
        """How many tokens carry a label."""
        return sum(label != IGNORED for label in self.labels)


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row that is left out, and why."""

    id: str
    reason: DropReason
    detail: str


def check_template(tokenizer: ChatTokenizer, tools: Sequence[Any] = ()) -> None:
    """Refuse a chat template that does not say what the assistant wrote.

    Without markers the mask is all zero and a run would train on nothing with a plausible curve.
    Raises: ConfigError that names the model folder.
    """
    try:
        text = tokenizer.get_chat_template(tools=list(tools) or None)
    except ValueError as error:
        raise ConfigError(f"the tokenizer in {tokenizer.name_or_path} has no chat template: {error}") from error
    if not _MARKER.search(text):
        raise ConfigError(
            f"the chat template of {tokenizer.name_or_path} has no {{% generation %}} markers, so the assistant's "
            "tokens cannot be told from the rest: name a template that has them in model.chat_template"
        )


def plain_messages(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copy messages with tool arguments as objects, so that both OpenAI forms render alike in every template.

    Arguments that are no JSON object stay the string they are: that is what the model wrote.
    """
    return [_plain_message(message) for message in messages]


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    copied = dict(message)
    if calls := copied.get("tool_calls"):
        copied["tool_calls"] = [_plain_call(call) for call in calls]
    if copied.get("content") is None:
        copied["content"] = ""
    return copied


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function", call))
    if isinstance(arguments := function.get("arguments"), str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            parsed = None
        function["arguments"] = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": function} if "function" in call else function


def encode(tokenizer: ChatTokenizer, trace: Trace) -> Encoded:
    """Render a trace with its tools and label exactly what the assistant produced, its turn ends included.

    Raises: whatever the template raises on messages that it cannot render.
    """
    rendered = tokenizer.apply_chat_template(
        plain_messages(trace.messages),
        tools=list(trace.tools) or None,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    ids, mask = list(rendered["input_ids"]), list(rendered["assistant_masks"])
    labels = [token if flag else IGNORED for token, flag in zip(ids, mask, strict=True)]
    if labels:
        labels[0] = IGNORED  # nothing comes before it, so nothing predicts it
    return Encoded(trace.id, ids, labels)


def encode_all(tokenizer: ChatTokenizer, traces: Iterable[Trace], *, max_length: int) -> Iterator[Encoded | Dropped]:
    """Encode traces; rows that are too long or hold nothing to train are dropped whole, never cut."""
    for trace in traces:
        try:
            row = encode(tokenizer, trace)
        except Exception as error:  # a template can raise anything on a row it was not written for
            yield Dropped(trace.id, "template_failed", f"{type(error).__name__}: {error}")
            continue
        if row.trained == 0:
            yield Dropped(trace.id, "no_trained_token", f"{len(row.input_ids)} tokens, none of the assistant's")
        elif len(row.input_ids) > max_length:
            yield Dropped(trace.id, "too_long", f"{len(row.input_ids)} tokens, max_length is {max_length}")
        else:
            yield row

"""A policy behind any OpenAI-compatible chat endpoint: no token ids, so for evaluation and traces, not for training.

Answers are not streamed: a failure in the middle of one cannot leave half a text behind, it is a failed request and
is asked again as a whole.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from groundhop.agents.chat import Call, Reply, Session, TokenRecord, reply_of, turn_seed
from groundhop.agents.history import trim
from groundhop.agents.http_client import ReplicaClient, RequestError
from groundhop.agents.prompt import Message
from groundhop.agents.toolcalls import read_arguments, read_turn
from groundhop.agents.untrusted import clean_values
from groundhop.errors import ContextError, MalformedCallError, ServerError

CHAT_PATH = "/chat/completions"
_EMPTY_RETRIES = 3
_CHARS_A_TOKEN = 3.0
"""Low on purpose: sizes are estimates here, and a conversation that is thought longer than it is still fits."""
_TOO_LONG = re.compile(r"context length|context window|context_length_exceeded|too many tokens", re.IGNORECASE)
_LIMIT = re.compile(r"(?:maximum context length is|context length of|at most) (\d+)", re.IGNORECASE)
_REQUESTED = re.compile(r"requested (?:about |a total of )?(\d+) tokens", re.IGNORECASE)
_PROMPT = re.compile(
    r"(?:prompt contains at least|prompt contains|has) (\d+)|(\d+) (?:input tokens|in the messages)", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """How an endpoint is asked; dollars are per million tokens."""

    model: str
    temperature: float
    top_p: float
    context: int
    trim: bool = False
    """Drop the oldest rounds of a conversation that grows past the context, instead of ending it."""
    dollars_in: float = 0.0
    dollars_out: float = 0.0


class ApiModel:
    """A model behind `POST {base}/chat/completions` with tools."""

    def __init__(self, client: ReplicaClient, settings: ApiSettings) -> None:
        self._client = client
        self.settings = settings
        self._opened = 0

    @property
    def context(self) -> int:
        """Tokens that a conversation may have at most."""
        return self.settings.context

    def count(self, text: str) -> int:
        """Tokens of a plain text, estimated: the endpoint's tokenizer is unknown."""
        return estimate(text)

    def open(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, seed: int) -> Session:
        """Begin a conversation."""
        self._opened += 1
        return ApiSession(self, messages, tools, seed=seed, replica=self._opened)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def complete(self, body: dict[str, Any], *, replica: int) -> dict[str, Any]:
        """One request; an answer without choices is asked again.

        Raises: ServerError, ContextError when the conversation itself is too long, CredentialError.
        """
        raw = b""
        for _ in range(_EMPTY_RETRIES):
            raw = await self._post(body, replica)
            try:
                answer = msgspec.json.decode(raw)
            except msgspec.MsgspecError as error:
                raise ServerError(f"{CHAT_PATH} answered no JSON: {raw[:200]!r}") from error
            if isinstance(answer, dict) and answer.get("choices"):
                return answer
        raise ServerError(f"{CHAT_PATH} answered {_EMPTY_RETRIES} times without choices: {raw[:200]!r}")

    async def _post(self, body: dict[str, Any], replica: int) -> bytes:
        try:
            return await self._client.post(CHAT_PATH, body, replica=replica)
        except RequestError as error:
            if error.status not in {400, 413} or not _TOO_LONG.search(error.body):
                raise
            fitted = fitted_limit(error.body, body["max_tokens"])
            if fitted is None:
                raise ContextError(str(error)) from error
        try:
            return await self._client.post(CHAT_PATH, {**body, "max_tokens": fitted}, replica=replica)
        except RequestError as error:
            raise ContextError(str(error)) from error


class ApiSession:
    """One conversation as messages; its size is what the endpoint last counted plus an estimate of what came since."""

    def __init__(
        self, model: ApiModel, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, seed: int, replica: int
    ) -> None:
        self._model = model
        self._messages = list(messages)
        self._tools = list(tools)
        self._seed = seed
        self._replica = replica
        self._turns = 0
        self._counted = estimate(json.dumps(self._tools)) + sum(_size(m) for m in messages)

    def size(self, new: Sequence[Message]) -> int:
        """Estimated tokens; with trimming never more than half the context."""
        size = self._counted + sum(_size(m) for m in new)
        return min(size, self._model.context // 2) if self._model.settings.trim else size

    async def reply(self, new: Sequence[Message], *, limit: int, tools: bool) -> Reply:
        """Send the conversation and read one turn of it."""
        self._messages += new
        settings = self._model.settings
        if settings.trim:
            budget = settings.context - limit - estimate(json.dumps(self._tools))
            self._messages = trim(self._messages, min(budget, settings.context // 2), _size)
        body: dict[str, Any] = {
            "model": settings.model,
            "messages": self._messages,
            "max_tokens": limit,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "seed": turn_seed(self._seed, self._turns),
        }
        if tools and self._tools:
            body["tools"] = self._tools
        answer = await self._model.complete(body, replica=self._replica)
        self._turns += 1
        reply = self._read(answer)
        message: Message = {"role": "assistant", "content": reply.content}
        if reply.calls and tools:
            message["tool_calls"] = [call.as_message() for call in reply.calls]
        self._messages.append(message)
        known = reply.prompt_tokens + reply.completion_tokens
        self._counted = known or sum(_size(m) for m in self._messages)
        return reply

    def record(self) -> TokenRecord:
        """Empty: the endpoint returns no ids."""
        return TokenRecord()

    def _read(self, answer: dict[str, Any]) -> Reply:
        choice = answer["choices"][0]
        usage = answer.get("usage") or {}
        sent, sampled = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
        settings = self._model.settings
        reply = read_message(
            choice.get("message") or {}, str(choice.get("finish_reason") or "stop"), f"call_{self._turns}"
        )
        dollars = (sent * settings.dollars_in + sampled * settings.dollars_out) / 1e6
        return Reply(reply.content, reply.calls, reply.errors, reply.cut, sent, sampled, dollars)


def read_message(message: dict[str, Any], finish_reason: str, prefix: str) -> Reply:
    """Read an assistant message. The list of calls decides, whatever `finish_reason` says.

    Reasoning is never the answer; a call in it counts when the message holds nothing else (a server's reasoning
    parser takes the whole turn when the model did not close its reasoning).
    """
    content = _text(message.get("content"))
    cut = finish_reason == "length"
    listed = [c for c in message.get("tool_calls") or [] if isinstance(c, dict)]
    if listed:
        calls = tuple(_call(c, f"{prefix}_{n}") for n, c in enumerate(listed))
        return Reply(read_turn(content).content, _with_own_ids(calls, prefix), cut=cut)
    reasoning = _text(message.get("reasoning_content") or message.get("reasoning"))
    if not content.strip() and reasoning:
        content = "<think>" + reasoning
    return reply_of(read_turn(content, finish_reason), prefix, cut=cut)


def estimate(text: str) -> int:
    """Tokens of a text in an unknown tokenizer: one for three bytes, which few languages exceed."""
    return int(len(text.encode("utf-8", "replace")) / _CHARS_A_TOKEN) + 1


def fitted_limit(complaint: str, limit: int) -> int | None:
    """`max_tokens` that fits, out of a server's complaint that prompt and `limit` together do not; None: nothing fits."""
    allowed = _LIMIT.search(complaint)
    requested = _REQUESTED.search(complaint)
    prompt = _PROMPT.search(complaint)
    if allowed and prompt:
        room = int(allowed[1]) - int(prompt[1] or prompt[2])
    elif allowed and requested:
        room = limit - (int(requested[1]) - int(allowed[1]))
    else:
        return None
    return room if 1 <= room < limit else None


def _call(listed: dict[str, Any], fallback: str) -> Call:
    function = listed.get("function") or {}
    name = str(clean_values(function.get("name") or ""))
    given = listed.get("id")
    call_id = given if isinstance(given, str) and given.strip() else fallback
    try:
        return Call(call_id, name, read_arguments(function.get("arguments")))
    except MalformedCallError as error:
        return Call(call_id, name, None, str(error))


def _with_own_ids(calls: tuple[Call, ...], prefix: str) -> tuple[Call, ...]:
    """Calls whose ids are all different: with two equal ones the next request would be refused."""
    if len({call.id for call in calls}) == len(calls):
        return calls
    return tuple(Call(f"{prefix}_{n}", c.name, c.arguments, c.error) for n, c in enumerate(calls))


def _text(content: object) -> str:
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return str(clean_values(content)) if isinstance(content, str) else ""


def _size(message: Message) -> int:
    return estimate(json.dumps(message, ensure_ascii=False)) + 4

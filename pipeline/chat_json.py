"""Ask an OpenAI-compatible endpoint for JSON of a given shape, in a conversation, and count what it costs."""

from dataclasses import dataclass, field
from importlib import resources
from string import Template
from typing import Any, TypeVar

import msgspec

from groundhop.agents.http_client import ReplicaClient, RequestError
from groundhop.errors import InputError, ServerError
from groundhop.pipeline.llm_json import parse_as

T = TypeVar("T")
PATH = "/chat/completions"
ATTEMPTS = 3
"""Replies that are read for one turn before it counts as failed."""


@dataclass(slots=True)
class JsonModel:
    """A model that answers in JSON. Shared by all conversations."""

    client: ReplicaClient
    model: str
    temperature: float
    max_tokens: int
    structured: bool = True
    """Whether `response_format` is sent; unset at the first server that refuses it."""


@dataclass(slots=True)
class Conversation:
    """Messages so far, and the tokens that the server counted for them."""

    model: JsonModel
    seed: int
    messages: list[dict[str, str]] = field(default_factory=list)
    tokens: int = 0

    async def ask(self, words: str, kind: type[T]) -> T:
        """Say `words` and read the reply as `kind`; an unreadable reply is told so and asked again.

        Raises: InputError when `ATTEMPTS` replies could not be read; ServerError, CredentialError from the endpoint.
        """
        self.messages.append({"role": "user", "content": words})
        problem = ""
        for attempt in range(ATTEMPTS):
            text, finish = await self._complete(kind, attempt)
            try:
                parsed = parse_as(text, finish, kind)
            except InputError as error:
                problem = str(error)
                if text.strip() and finish != "length":
                    again = prompt("writer_again.txt").substitute(problem=problem)
                    self.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": again}]
                continue
            self.messages.append({"role": "assistant", "content": text})
            return parsed
        raise InputError(problem)

    async def _complete(self, kind: type[Any], attempt: int) -> tuple[str, str]:
        body: dict[str, Any] = {
            "model": self.model.model,
            "messages": self.messages,
            "temperature": self.model.temperature,
            "max_tokens": self.model.max_tokens,
            # Another seed a try, or a server that honours it would repeat the unreadable reply.
            "seed": (self.seed + attempt + len(self.messages)) % 2**31,
        }
        answer = await self._post(body, kind)
        usage = answer.get("usage") or {}
        self.tokens += int(usage.get("prompt_tokens") or 0) + int(usage.get("completion_tokens") or 0)
        choices = answer.get("choices") or [{}]
        content = (choices[0].get("message") or {}).get("content")
        return content if isinstance(content, str) else "", str(choices[0].get("finish_reason") or "stop")

    async def _post(self, body: dict[str, Any], kind: type[Any]) -> dict[str, Any]:
        if self.model.structured:
            try:
                return _decoded(await self.model.client.post(PATH, body | response_format(kind), replica=self.seed))
            except RequestError as error:
                if error.status not in {400, 422} or "response_format" not in error.body:
                    raise
                self.model.structured = False
        return _decoded(await self.model.client.post(PATH, body, replica=self.seed))


def response_format(kind: type[Any]) -> dict[str, Any]:
    """The OpenAI `response_format` (structured outputs, json_schema) of a Struct whose fields are all required."""
    (reference,), components = msgspec.json.schema_components([kind])
    schema = components[reference["$ref"].rsplit("/", 1)[-1]]
    wanted = {name: schema[name] for name in ("type", "properties", "required", "additionalProperties")}
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": kind.__name__.lower(), "strict": True, "schema": wanted},
        }
    }


def prompt(name: str) -> Template:
    """A prompt file, its slots written `$name`."""
    text = resources.files("groundhop.pipeline").joinpath("prompts", name).read_text(encoding="utf-8")
    return Template(text.strip())


def _decoded(raw: bytes) -> dict[str, Any]:
    try:
        answer = msgspec.json.decode(raw)
    except msgspec.MsgspecError as error:
        raise ServerError(f"{PATH} answered no JSON: {raw[:200]!r}") from error
    if not isinstance(answer, dict):
        raise ServerError(f"{PATH} answered {type(answer).__name__}, not an object")
    return answer

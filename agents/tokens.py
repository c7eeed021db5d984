"""The policy as training needs it: token ids in, token ids out, with log-probabilities and weight versions (vLLM)."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from groundhop.agents.chat import Reply, Session, TokenRecord, reply_of, turn_seed
from groundhop.agents.http_client import ReplicaClient, RequestError
from groundhop.agents.prompt import Message
from groundhop.agents.template import TemplateCodec
from groundhop.agents.toolcalls import read_turn
from groundhop.errors import ContextError, ServerError
from groundhop.records import TokenSpan

GENERATE_PATH = "/inference/v1/generate"
_ABORT_RETRIES = 3


class _Version(Struct, frozen=True):
    version: str
    start: int
    end: int


class _LogProb(Struct, frozen=True):
    token_id: int
    logprob: float


class _LogProbs(Struct, frozen=True):
    content: tuple[_LogProb, ...] | None = None


class _Choice(Struct, frozen=True):
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    logprobs: _LogProbs | None = None
    weight_versions: tuple[_Version, ...] | None = None


class _Answer(Struct, frozen=True):
    """vLLM 0.32, entrypoints/scale_out/token_in_token_out/protocol.py, GenerateTokensResponse."""

    choices: tuple[_Choice, ...] = ()


class TokenModel:
    """A policy behind vLLM replicas with `/inference/v1/generate`.

    Log-probabilities are those of the distribution that was sampled from, provided that the servers run with
    `--logprobs-mode processed_logprobs`. A conversation stays with one replica for its prefix cache's sake.
    """

    def __init__(
        self, client: ReplicaClient, codec: TemplateCodec, *, temperature: float, top_p: float, context: int
    ) -> None:
        self._client = client
        self.codec = codec
        self._sampling = {"temperature": temperature, "top_p": top_p}
        self._context = context
        self._opened = itertools.count()

    @property
    def context(self) -> int:
        """Tokens that a conversation may have at most."""
        return self._context

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """For `make_toolbox`: strings that no tool text may hold."""
        return self.codec.control_tokens

    def count(self, text: str) -> int:
        """Tokens of a plain text; what tool output is measured with."""
        return self.codec.count(text)

    def open(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, seed: int) -> Session:
        """Begin a conversation on the next replica."""
        return TokenSession(self, self.codec.prompt(messages, tools), seed=seed, replica=next(self._opened))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def generate(self, ids: Sequence[int], *, limit: int, seed: int, replica: int) -> _Choice:
        """Sample once. Raises: ServerError, ContextError, CredentialError."""
        sampling = {
            **self._sampling,
            "max_tokens": limit,
            "seed": seed,
            "logprobs": 0,
            "stop_token_ids": [self.codec.end_of_turn],
            "detokenize": False,
        }
        choices: Sequence[_Choice] = ()
        for _ in range(_ABORT_RETRIES):
            raw = await self._post({"token_ids": ids, "sampling_params": sampling}, replica)
            try:
                choices = msgspec.json.decode(raw, type=_Answer).choices
            except msgspec.MsgspecError as error:
                raise ServerError(f"{GENERATE_PATH} answered something else: {error}: {raw[:200]!r}") from error
            # A server that takes new weights may abort what runs; the turn is then sampled afresh.
            if choices and choices[0].finish_reason in {"stop", "length"}:
                return choices[0]
        found = choices[0].finish_reason if choices else "no choice"
        raise ServerError(f"{GENERATE_PATH} ended {_ABORT_RETRIES} times with {found!r}, wanted stop or length")

    async def _post(self, body: dict[str, Any], replica: int) -> bytes:
        try:
            return await self._client.post(GENERATE_PATH, body, replica=replica)
        except RequestError as error:
            if error.status == 404:
                raise ServerError(f"the server lacks {GENERATE_PATH}: start vLLM with --enable-scale-out") from error
            if error.status == 400 and "context length" in error.body:
                raise ContextError(str(error)) from error
            raise


class TokenSession:
    """One conversation as a list of ids that only grows; mask, log-probabilities and versions grow with it."""

    def __init__(self, model: TokenModel, prompt: Sequence[int], *, seed: int, replica: int) -> None:
        self._model = model
        self._seed = seed
        self._replica = replica
        self._ids = list(prompt)
        self._mask = [0] * len(prompt)
        self._log_probs = [0.0] * len(prompt)
        self._spans = [TokenSpan(start=0, end=len(prompt), version=None)]
        self._prompt_length = len(prompt)
        self._turns = 0
        self._ended = True
        self._suffix: tuple[list[Message], list[int]] = ([], [])

    def size(self, new: Sequence[Message]) -> int:
        """Tokens of the conversation with `new` messages and the opening of the next turn."""
        return len(self._ids) + len(self._suffix_of(new))

    async def reply(self, new: Sequence[Message], *, limit: int, tools: bool) -> Reply:
        """Sample a turn. `tools` changes nothing: the tools stand in the prompt; the loop runs no calls then."""
        self._append(self._suffix_of(new), mask=0)
        sent = len(self._ids)
        seed = turn_seed(self._seed, self._turns)
        choice = await self._model.generate(self._ids, limit=limit, seed=seed, replica=self._replica)
        sampled = choice.token_ids or ()
        self._take(choice)
        self._ended = bool(sampled) and sampled[-1] == self._model.codec.end_of_turn
        self._turns += 1
        finish = choice.finish_reason or "stop"
        text = self._model.codec.text(sampled)
        turn = read_turn(f"<think>{text}" if self._model.codec.opens_reasoning else text, finish)
        return reply_of(
            turn, f"call_{self._turns}", cut=finish == "length", prompt_tokens=sent, completion_tokens=len(sampled)
        )

    def record(self) -> TokenRecord:
        """What was said so far."""
        return TokenRecord(
            tuple(self._ids), self._prompt_length, tuple(self._mask), tuple(self._log_probs), tuple(self._spans)
        )

    def _suffix_of(self, new: Sequence[Message]) -> list[int]:
        if not new:
            return []
        if self._suffix[0] != list(new):
            self._suffix = (list(new), self._model.codec.suffix(new, ended=self._ended))
        return self._suffix[1]

    def _append(self, ids: Sequence[int], *, mask: int) -> None:
        if ids:
            self._spans.append(TokenSpan(start=len(self._ids), end=len(self._ids) + len(ids), version=None))
            self._ids += ids
            self._mask += [mask] * len(ids)
            self._log_probs += [0.0] * len(ids)
        self._suffix = ([], [])

    def _take(self, choice: _Choice) -> None:
        sampled = choice.token_ids or ()
        content = (choice.logprobs.content if choice.logprobs else None) or ()
        if tuple(entry.token_id for entry in content) != sampled:
            raise ServerError(f"need a log-probability for each of {len(sampled)} sampled tokens, got {len(content)}")
        if not all(math.isfinite(entry.logprob) for entry in content):
            raise ServerError("a sampled token has no finite log-probability")
        start = len(self._ids)
        self._spans += _spans(choice, start)
        self._ids += sampled
        self._mask += [1] * len(sampled)
        self._log_probs += [min(0.0, entry.logprob) for entry in content]
        assert len(self._ids) == len(self._mask) == len(self._log_probs)
        assert self._spans[-1].end == len(self._ids)


def _spans(choice: _Choice, offset: int) -> list[TokenSpan]:
    """Versions of the sampled tokens; None where the server names none.

    Raises: ServerError when the named spans leave a gap.
    """
    count = len(choice.token_ids or ())
    if not choice.weight_versions:
        return [TokenSpan(start=offset, end=offset + count, version=None)] if count else []
    spans = sorted((v for v in choice.weight_versions if v.end > v.start), key=lambda v: v.start)
    ends = [0, *(v.end for v in spans)]
    if [v.start for v in spans] != ends[:-1] or ends[-1] != count:
        raise ServerError(f"weight versions cover {[(v.start, v.end) for v in spans]}, wanted 0 to {count}")
    return [TokenSpan(start=offset + v.start, end=offset + v.end, version=v.version) for v in spans]

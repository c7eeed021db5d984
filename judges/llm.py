"""Ask a language model whether an answer is right, over any OpenAI-compatible endpoint.

The questions put to the model are those of the BrowseComp grader (Wei et al. 2025, arXiv 2504.12516), in our words
(`prompts/grader.txt`). A reply that cannot be read is asked for again; an endpoint that fails is asked again with
back-off; what still gives no verdict is a third state, never `no`. Reasoning text is never read.
"""

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from importlib import resources
from string import Template
from typing import Any

import httpx

from groundhop.errors import CredentialError, NoVerdictError, ServerError
from groundhop.http_retry import retry_after_s
from groundhop.judges.parse import read_verdict
from groundhop.judges.protocol import Asked, final_text, verdict_of, with_costs, without_judging
from groundhop.records import Rollout, Verdict

logger = logging.getLogger(__name__)

RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
LONGER = 8
"""A judge that was cut off is asked once more with so many times the token limit."""
LONGEST_WAIT_S = 60.0
RESPONSE_CHARS = 6000
"""The end of the response is shown: answers stand last."""

Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the judge's model is served, and what it costs in US dollars per million tokens."""

    url: str
    """Base URL up to and with `/v1`."""
    model: str
    key: str
    max_tokens: int
    attempts: int
    dollars_in: float = 0.0
    dollars_out: float = 0.0
    timeout_s: float = 120.0


@dataclass(slots=True)
class _Costs:
    attempts: int = 0
    tokens: int = 0
    dollars: float = 0.0
    finish: list[str] = field(default_factory=list)
    longer: bool = False


class LlmJudge:
    """Grades with a language model, at most `concurrency` at a time."""

    name = "llm"

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        concurrency: int,
        sleep: Sleep = asyncio.sleep,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._concurrency = concurrency
        self._sleep = sleep
        self._transport = transport
        self._prompt = _prompt("grader.txt")
        self._again = _prompt("again.txt").strip()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.prompt_digest = hashlib.sha256((self._prompt + self._again).encode()).hexdigest()

    async def __call__(self, rollout: Rollout, question: Asked) -> Verdict:
        """Grade. Raises: CredentialError when the endpoint refuses the key."""
        early = without_judging(rollout, self.name)
        if early is not None:
            return early
        self._enter_loop()
        costs = _Costs()
        async with self._limit:
            verdict = await self._judge(rollout, question, costs)
        return with_costs(
            verdict,
            model=self._endpoint.model,
            prompt_digest=self.prompt_digest,
            attempts=costs.attempts,
            tokens=costs.tokens,
            dollars=costs.dollars,
        )

    async def _judge(self, rollout: Rollout, question: Asked, costs: _Costs) -> Verdict:
        messages = [{"role": "user", "content": self._ask(rollout, question)}]
        reply = finish = ""
        while costs.attempts < self._endpoint.attempts:
            try:
                reply, finish = await self._reply(messages, costs)
                correct = read_verdict(reply)
            except ServerError as error:
                return verdict_of(rollout, self.name, None, str(error), "judge_error")
            except NoVerdictError:
                if finish == "length":
                    if costs.longer:
                        break
                    costs.longer = True
                    continue
                messages = [
                    messages[0],
                    {"role": "assistant", "content": reply},
                    {"role": "user", "content": self._again},
                ]
                continue
            return verdict_of(rollout, self.name, correct, reply)
        words = f"finish_reason {', '.join(costs.finish)}: {reply}"
        return verdict_of(rollout, self.name, None, words, "unparsed")

    def _ask(self, rollout: Rollout, question: Asked) -> str:
        answer = "\n".join(dict.fromkeys((question.answer, *question.aliases)))
        text = final_text(rollout)
        if rollout.answer and rollout.answer not in text:
            text = f"{text}\n{rollout.answer}".strip()
        return Template(self._prompt).substitute(
            question=question.question, response=text[-RESPONSE_CHARS:], answer=answer
        )

    async def _reply(self, messages: list[dict[str, str]], costs: _Costs) -> tuple[str, str]:
        """Text and finish reason of one reply. Raises: ServerError when no attempt got one."""
        limit = self._endpoint.max_tokens * (LONGER if costs.longer else 1)
        body = {"model": self._endpoint.model, "messages": messages, "temperature": 0, "max_tokens": limit}
        trouble = "no attempt left"
        while costs.attempts < self._endpoint.attempts:
            costs.attempts += 1
            asked: str | None = None
            try:
                response = await self._client.post("chat/completions", json=body)
                if response.status_code in (401, 403):
                    raise CredentialError(
                        f"the judge at {self._endpoint.url} refused the key: HTTP {response.status_code}"
                    )
                if response.is_success:
                    return self._take(response, costs)
                trouble = f"HTTP {response.status_code} from the judge at {self._endpoint.url}: {response.text[:200]}"
                if response.status_code not in RETRIED:
                    break
                asked = response.headers.get("retry-after")
            except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
                trouble = f"the judge at {self._endpoint.url} failed: {type(error).__name__}: {error}"
            if costs.attempts < self._endpoint.attempts:
                await self._sleep(_wait_s(asked, costs.attempts))
        raise ServerError(trouble)

    def _take(self, response: httpx.Response, costs: _Costs) -> tuple[str, str]:
        loaded: dict[str, Any] = response.json()
        choice = loaded["choices"][0]
        usage = loaded.get("usage") or {}
        read, written = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
        costs.tokens += read + written
        costs.dollars += (read * self._endpoint.dollars_in + written * self._endpoint.dollars_out) / 1e6
        finish = str(choice.get("finish_reason") or "unknown")
        costs.finish.append(finish)
        content = choice["message"].get("content")
        return (content if isinstance(content, str) else ""), finish

    def _enter_loop(self) -> None:
        """One client and one limit an event loop: stages run in loops of their own."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        headers = {"Authorization": f"Bearer {self._endpoint.key}"} if self._endpoint.key else {}
        url = self._endpoint.url.rstrip("/") + "/"
        self._client = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=self._endpoint.timeout_s, transport=self._transport
        )
        self._limit = asyncio.Semaphore(self._concurrency)
        self._loop = loop


def _wait_s(asked: str | None, attempt: int) -> float:
    """What the server asked for, else a doubling wait from 1 s with half of it by chance; never over a minute."""
    wait = retry_after_s(asked, time.time()) if asked else None
    if wait is None:
        wait = 2.0 ** (attempt - 1) * random.uniform(0.5, 1.0)
    return min(wait, LONGEST_WAIT_S)


def _prompt(name: str) -> str:
    return resources.files("groundhop.judges").joinpath("prompts", name).read_text(encoding="utf-8")

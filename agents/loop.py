"""The agent: ask the model, run its calls, answer them, until it answers or a budget runs out.

Bucketing, traces, training and evaluation all run this loop, so that their numbers differ in the weights alone.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from groundhop.agents.chat import Call, ChatModel, Reply, Session
from groundhop.agents.prompt import Message, answer_of, final_request, first_messages
from groundhop.agents.schemas import TOOL_SCHEMAS
from groundhop.agents.tools import ToolResult
from groundhop.agents.view import CUT
from groundhop.errors import ContextError, ServerError
from groundhop.records import Rollout, StopReason, ToolCall, Usage

logger = logging.getLogger(__name__)

_LEAST_TURN = 16
"""A turn with less room than this is not begun: no call and hardly an answer fits."""
_MAX_CALLS = 8
"""Calls of one turn that are run; the others are told to wait."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What one rollout may use. The forced final answer comes on top of turns and tokens, never of the model's context."""

    max_turns: int
    max_tokens: int
    """Of the whole conversation: prompt, sampled and tool text."""
    turn_tokens: int
    """Sampled in one turn."""
    max_time_s: float


class Tools(Protocol):
    """What the loop asks of a toolbox."""

    async def call(self, name: str, arguments: dict[str, Any], forbidden: Sequence[str] = ()) -> ToolResult:
        """Run one call."""
        ...

    def fit(self, text: str, tokens: int) -> str:
        """Cut a text to so many tokens, with a visible mark."""
        ...


async def solve(
    question: str,
    *,
    model: ChatModel,
    toolbox: Tools,
    budget: Budget,
    seed: int,
    question_id: str,
    repeat: int,
    policy: str,
    forbidden: tuple[str, ...] = (),
    prompt: Path | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Rollout:
    """Try one question once.

    Never raises for infrastructure: such a rollout has `stop` error and says what failed. Nothing is cached: the
    samples of one question must differ. Raises: CredentialError, which stops a run.
    """
    messages = first_messages(question, prompt)
    session = model.open(messages, TOOL_SCHEMAS, seed=seed)
    work = _Work(session, model.context, toolbox, budget, forbidden, messages, clock, clock())
    try:
        await work.run()
    except ContextError as error:
        logger.info("%s/%d ends: %s", question_id, repeat, error)
        work.stop = "context"
    except ServerError as error:
        work.stop, work.error = "error", str(error)
    record = session.record()
    return Rollout(
        question_id=question_id,
        repeat=repeat,
        policy=policy,
        seed=seed,
        messages=tuple(work.messages),
        tools=TOOL_SCHEMAS,
        token_ids=record.ids,
        prompt_length=record.prompt_length,
        mask=record.mask,
        log_probs=record.log_probs,
        spans=record.spans,
        answer=work.answer,
        stop=work.stop,
        error=work.error,
        calls=tuple(work.calls),
        usage=work.usage(),
    )


@dataclass(slots=True)
class _Work:
    """One rollout while it runs."""

    session: Session
    context: int
    toolbox: Tools
    budget: Budget
    forbidden: tuple[str, ...]
    messages: list[Message]
    clock: Callable[[], float]
    started: float
    new: list[Message] = field(default_factory=list)
    """Messages that the model has not seen yet."""
    calls: list[ToolCall] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    tool_tokens: int = 0
    asked_again: bool = False
    answer: str | None = None
    stop: StopReason = "no_answer"
    error: str | None = None

    async def run(self) -> None:
        """Turn after turn; returns with `stop` set."""
        while True:
            if reason := self._exhausted():
                self.stop = reason
                await self._force_answer()
                return
            limit = min(self.budget.turn_tokens, self._room())
            reply = await self._ask(limit, tools=True)
            if reply.calls or reply.errors:
                if not await self._run_calls(reply):
                    return
            elif not self._settle(reply, limit):
                return

    def usage(self) -> Usage:
        """What was used so far."""
        return Usage(
            prompt_tokens=sum(r.prompt_tokens for r in self.replies),
            completion_tokens=sum(r.completion_tokens for r in self.replies),
            tool_tokens=self.tool_tokens,
            turns=len(self.replies),
            seconds=round(self.clock() - self.started, 3),
            dollars=sum(r.dollars for r in self.replies),
        )

    def _exhausted(self) -> StopReason | None:
        if len(self.replies) >= self.budget.max_turns:
            return "turns"
        if self.clock() - self.started >= self.budget.max_time_s:
            return "time"
        if self._room() < _LEAST_TURN:
            return "tokens" if self.budget.max_tokens <= self.context - self._reserve() else "context"
        return None

    def _room(self) -> int:
        """Tokens left for the next turn, with what a forced final answer needs kept back."""
        return self._ceiling() - self.session.size(self.new)

    def _ceiling(self) -> int:
        return min(self.budget.max_tokens, self.context - self._reserve())

    def _reserve(self) -> int:
        return self._final_size() + min(self.budget.turn_tokens, 4 * _LEAST_TURN)

    def _final_size(self) -> int:
        return len(final_request()) // 2

    async def _ask(self, limit: int, *, tools: bool) -> Reply:
        reply = await self.session.reply(self.new, limit=limit, tools=tools)
        self.new = []
        self.replies.append(reply)
        message: Message = {"role": "assistant", "content": reply.content}
        if reply.calls and tools:
            message["tool_calls"] = [call.as_message() for call in reply.calls]
        self.messages.append(message)
        return reply

    def _tell(self, message: Message) -> None:
        self.messages.append(message)
        self.new.append(message)

    def _settle(self, reply: Reply, limit: int) -> bool:
        """Deal with a turn without calls. Returns whether the conversation goes on."""
        self.answer = _whole_answer(reply)
        if self.answer is not None:
            self.stop = "answered"
        elif reply.cut and limit < self.budget.turn_tokens:
            # The conversation's budget cut it, not the turn's: the final answer is asked for.
            return True
        elif reply.cut:
            self.stop = "truncated"
        elif not self.asked_again:
            self.asked_again = True
            self._tell({"role": "user", "content": final_request()})
            return True
        else:
            self.stop = "no_answer"
        return False

    async def _force_answer(self) -> None:
        """Ask once more, without tools; the reason why stays in `stop` whatever comes."""
        if not self.new or self.new[-1].get("content") != final_request():
            self._tell({"role": "user", "content": final_request()})
        limit = min(self.budget.turn_tokens, self.context - self.session.size(self.new))
        if limit < 1:
            return
        reply = await self._ask(limit, tools=False)
        self.answer = _whole_answer(reply)
        for call in reply.calls:
            self._note(call, ToolResult("", "refused", "no calls are left"), 0.0)

    async def _run_calls(self, reply: Reply) -> bool:
        """Run a turn's calls together, answer them in order. Returns whether the conversation goes on."""
        for sentence in reply.errors:
            self.calls.append(
                ToolCall(turn=len(self.replies), name="", arguments=None, outcome="malformed", detail=sentence)
            )
        timed = await asyncio.gather(*(self._run_call(n, call) for n, call in enumerate(reply.calls)))
        results = [result for result, _ in timed]
        for call, (result, seconds) in zip(reply.calls, timed, strict=True):
            self._note(call, result, seconds)
        texts = self._fitted(reply, [result.text for result in results])
        before = self.session.size(self.new)
        for call, text in zip(reply.calls, texts, strict=True):
            self._tell(_tool_message(call, text))
        if reply.errors:
            self._tell({"role": "user", "content": _about(reply.errors)})
        self.tool_tokens += self.session.size(self.new) - before
        failed = next((r for r in results if r.outcome == "provider_error"), None)
        if failed:
            self.stop, self.error = "error", failed.detail or failed.text
        return failed is None

    async def _run_call(self, number: int, call: Call) -> tuple[ToolResult, float]:
        if call.arguments is None:
            return ToolResult(f"Error: {call.error}.", "malformed", call.error), 0.0
        if number >= _MAX_CALLS:
            return ToolResult(
                f"Error: at most {_MAX_CALLS} calls a turn.", "refused", "too many calls in one turn"
            ), 0.0
        start = time.perf_counter()
        result = await self.toolbox.call(call.name, call.arguments, self.forbidden)
        return result, time.perf_counter() - start

    def _note(self, call: Call, result: ToolResult, seconds: float) -> None:
        self.calls.append(
            ToolCall(
                turn=len(self.replies),
                name=call.name,
                arguments=call.arguments,
                outcome=result.outcome,
                detail=result.detail,
                latency_s=round(seconds, 4),
            )
        )

    def _fitted(self, reply: Reply, texts: list[str]) -> list[str]:
        """Cut results to what the conversation has room for, so that a turn can follow."""
        room = self._ceiling() - _LEAST_TURN
        if (
            not texts
            or self.session.size([_tool_message(c, t) for c, t in zip(reply.calls, texts, strict=True)]) <= room
        ):
            return texts
        bare = self.session.size([_tool_message(call, "") for call in reply.calls])
        share = max(0, room - bare) // len(texts)
        return [self.toolbox.fit(text, share) or CUT for text in texts]


def _tool_message(call: Call, text: str) -> Message:
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}


def _about(errors: Sequence[str]) -> str:
    return f"Error: {errors[0]}. Write a call as one JSON object with name and arguments, inside its tags."


def _whole_answer(reply: Reply) -> str | None:
    """The answer of a turn; of one that was cut, only from lines that are complete."""
    return answer_of(reply.content.rpartition("\n")[0] if reply.cut else reply.content)

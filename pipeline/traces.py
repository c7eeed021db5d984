"""Conversations for SFT: a question's construction path played through the real tools, and rollouts that were right.

A path is played by the agent loop itself, with a model that says what the path says: what SFT learns has the very form
that rollouts, GRPO and evaluation have. Held-out questions never become traces.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groundhop.agents.chat import Call, Reply, TokenRecord
from groundhop.agents.loop import Budget, Tools, solve
from groundhop.agents.prompt import Message
from groundhop.judges.normalise import normalise
from groundhop.pipeline.journal import Pair
from groundhop.records import Bucketed, BucketName, Question, Rollout, Task, Trace, Verdict

AT_ONCE = 8
UNBOUNDED = Budget(max_turns=10**6, max_tokens=10**9, turn_tokens=10**6, max_time_s=1e9)


@dataclass(frozen=True, slots=True)
class PathFailure:
    """A construction path that no trace can be made of."""

    question_id: str
    reason: str
    """path_fails: a call brought nothing, or the answer was never seen. no_path. provider_error: try again."""
    detail: str


class PathModel:
    """Says the calls of a question's construction path one by one, then its answer. It counts no tokens."""

    context = 10**9

    def __init__(self, question: Question) -> None:
        self._question = question
        self._said = 0

    def open(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, seed: int) -> "PathModel":
        """Begin from the first step."""
        return self

    def size(self, new: Sequence[Message]) -> int:
        """Nothing is cut to a budget but by the tools themselves."""
        return 0

    async def reply(self, new: Sequence[Message], *, limit: int, tools: bool) -> Reply:
        """The next step."""
        number, path = self._said, self._question.path
        self._said += 1
        if number < len(path):
            return Reply(calls=(Call(f"call_{number + 1}_0", path[number].tool, dict(path[number].arguments)),))
        return Reply(content=f"Exact Answer: {self._question.answer}")

    def record(self) -> TokenRecord:
        """No token was sampled."""
        return TokenRecord()


async def construction_traces(
    questions: Iterable[Question], tools: Tools, prompt: Path | None = None
) -> tuple[list[Trace], list[PathFailure]]:
    """Traces of all training questions whose path leads to the answer, and the others with reasons, by question id."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(question: Question) -> Trace | PathFailure:
        async with limit:
            return await construction_trace(question, tools, prompt)

    train = sorted((q for q in questions if q.split == "train"), key=lambda q: q.id)
    made = await asyncio.gather(*(one(question) for question in train))
    return [m for m in made if isinstance(m, Trace)], [m for m in made if isinstance(m, PathFailure)]


async def construction_trace(question: Question, tools: Tools, prompt: Path | None = None) -> Trace | PathFailure:
    """Play a question's path and end with its answer."""
    assert question.split == "train", f"{question.id} is held out"
    if not question.path:
        return PathFailure(question.id, "no_path", "the question has no construction path")
    played = await solve(
        question.question,
        model=PathModel(question),
        toolbox=tools,
        budget=UNBOUNDED,
        seed=0,
        question_id=question.id,
        repeat=0,
        policy="path",
        forbidden=question.forbidden,
        prompt=prompt,
    )
    for call in played.calls:
        if call.outcome != "ok":
            reason = "provider_error" if call.outcome == "provider_error" else "path_fails"
            return PathFailure(
                question.id, reason, f"{call.name} {call.arguments}: {call.outcome} {call.detail}".strip()
            )
    if played.stop != "answered":
        return PathFailure(question.id, "path_fails", f"ended by {played.stop} {played.error or ''}".strip())
    seen = [str(message["content"]) for message in played.messages if message["role"] == "tool"]
    if not shows(seen, (question.answer, *question.aliases)):
        return PathFailure(question.id, "path_fails", "no tool result of the path shows the answer")
    return Trace(
        id=f"{question.id}/path",
        question_id=question.id,
        origin="construction",
        messages=played.messages,
        tools=played.tools,
    )


def rollout_traces(
    rollouts: Iterable[Rollout],
    verdicts: Iterable[Verdict],
    questions: Iterable[Question],
    buckets: Iterable[Bucketed],
    *,
    trainable: Sequence[BucketName],
    per_question: int,
) -> list[Trace]:
    """Right rollouts of training questions in trainable buckets: those with the fewest calls, then the lowest repeat.

    Only rollouts that ended by themselves and wrote no malformed call: the rest is not worth imitating.
    """
    train = {question.id for question in questions if question.split == "train"}
    wanted = {row.question_id for row in buckets if row.bucket in trainable} & train
    right = {Pair(v.question_id, v.repeat) for v in verdicts if v.correct}
    found: defaultdict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        pair = Pair(rollout.question_id, rollout.repeat)
        clean = all(call.outcome != "malformed" for call in rollout.calls)
        if pair in right and rollout.question_id in wanted and rollout.stop == "answered" and clean:
            found[rollout.question_id].append(rollout)
    return [
        _rollout_trace(rollout)
        for name in sorted(found)
        for rollout in sorted(found[name], key=lambda r: (len(r.calls), r.repeat))[:per_question]
    ]


def tasks(questions: Iterable[Question], buckets: Iterable[Bucketed], trainable: Sequence[BucketName]) -> list[Task]:
    """Training questions in trainable buckets, by id."""
    rows = {row.question_id: row for row in buckets}
    return [
        Task(
            id=question.id,
            question=question.question,
            answer=question.answer,
            kind=question.kind,
            aliases=question.aliases,
            bucket=row.bucket,
            passed=row.passed,
            judged=row.judged,
            forbidden=question.forbidden,
        )
        for question in sorted(questions, key=lambda q: q.id)
        if (row := rows.get(question.id)) and row.bucket and row.bucket in trainable and question.split == "train"
    ]


def shows(texts: Iterable[str], accepted: Iterable[str]) -> bool:
    """Whether an accepted form stands, as whole words, in one of the texts."""
    padded = [f" {normalise(text)} " for text in texts]
    forms = [form for form in map(normalise, accepted) if form]
    return any(f" {form} " in text for form in forms for text in padded)


def _rollout_trace(rollout: Rollout) -> Trace:
    return Trace(
        id=f"{rollout.question_id}/{rollout.policy}/{rollout.repeat}",
        question_id=rollout.question_id,
        origin="rollout",
        messages=rollout.messages,
        tools=rollout.tools,
    )

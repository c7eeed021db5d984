"""Let a policy try each question several times, and have each answer judged.

Resumable by (question, repeat): what is finished is never paid for again, what failed for reasons that are not the
model's is tried again. A rollout's seed depends on run, policy, question and repeat alone, never on order.
"""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from groundhop.agents.chat import ChatModel
from groundhop.agents.loop import Budget, Tools, solve
from groundhop.errors import CredentialError, ServerError
from groundhop.judges.protocol import Judge
from groundhop.pipeline.journal import Journal, Pair
from groundhop.pipeline.redact import redacted_rollout, redacted_verdict
from groundhop.progress import Progress, progress
from groundhop.records import Question, Rollout, Split, Verdict
from groundhop.runs import StageFolder

logger = logging.getLogger(__name__)

Solver = Callable[[Question, int, int], Awaitable[Rollout]]
"""Tries a question: (question, repeat, seed) -> rollout."""

PASSES = 2
"""Pairs that infrastructure failed are tried again so often in one run, counting the first."""
ERRORS_IN_A_ROW = 20
JUDGE_ERROR_LIMIT = 0.05
"""A greater share of verdicts lost to the judge is warned about."""
UNJUDGED = frozenset({"judge_error", "rollout_error"})


@dataclass(slots=True)
class Tally:
    """What came out so far; `lost` lists what infrastructure failed as (item, reason, detail)."""

    right: int = 0
    wrong: int = 0
    no_verdict: int = 0
    errors: int = 0
    tokens: int = 0
    judge_dollars: float = 0.0
    stops: Counter[str] = field(default_factory=Counter)
    lost: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, stop: str, verdict: Verdict) -> None:
        """Count one judged rollout."""
        self.stops[stop] += 1
        self.judge_dollars += verdict.dollars
        if stop == "error":
            self.errors += 1
        elif verdict.correct is None:
            self.no_verdict += 1
        else:
            self.right += verdict.correct
            self.wrong += not verdict.correct
        if verdict.state in UNJUDGED:
            self.lost.append((f"{verdict.question_id}/{verdict.repeat}", verdict.state, verdict.reason))

    def counts(self) -> dict[str, float]:
        """What a summary says about these rollouts."""
        return {
            "right": self.right,
            "wrong": self.wrong,
            "no_verdict": self.no_verdict,
            "errors": self.errors,
            "completion_tokens": self.tokens,
            "judge_dollars": self.judge_dollars,
        }

    def notes(self) -> dict[str, int]:
        """The counters worth seeing while work goes on."""
        return {"right": self.right, "wrong": self.wrong, "no-verdict": self.no_verdict, "errors": self.errors}


def stable_seed(run_seed: int, policy: str, pair: Pair) -> int:
    """A seed of 31 bits from what names a rollout."""
    name = f"{run_seed}\x1f{policy}\x1f{pair.question_id}\x1f{pair.repeat}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") >> 1


def choose(questions: Sequence[Question], split: Split, limit: int) -> list[Question]:
    """The first `limit` questions of a split, by id."""
    return sorted((q for q in questions if q.split == split), key=lambda q: q.id)[:limit]


def make_solver(*, model: ChatModel, toolbox: Tools, budget: Budget, policy: str, prompt: Path | None = None) -> Solver:
    """Try questions with the agent loop; `prompt` is the system prompt's file where it is not the project's own."""

    async def tries(question: Question, repeat: int, seed: int) -> Rollout:
        return await solve(
            question.question,
            model=model,
            toolbox=toolbox,
            budget=budget,
            seed=seed,
            question_id=question.id,
            repeat=repeat,
            policy=policy,
            forbidden=question.forbidden,
            prompt=prompt,
        )

    return tries


class Collector:
    """Tries and judges all pairs of a set of questions, into one folder."""

    def __init__(
        self,
        folder: Path,
        *,
        policy: str,
        seed: int,
        repeats: int,
        questions: Sequence[Question],
        judge: Judge,
        concurrency: int,
        redact: bool = False,
    ) -> None:
        self._questions = {question.id: question for question in questions}
        self._pairs = [Pair(name, repeat) for name in sorted(self._questions) for repeat in range(repeats)]
        self._policy, self._seed, self._redact = policy, seed, redact
        self._judge, self._concurrency = judge, concurrency
        self._rollouts = Journal(folder / "rollouts.jsonl", Rollout)
        self._verdicts = Journal(folder / "verdicts.jsonl", Verdict)
        self._in_a_row: Counter[str] = Counter()

    def missing(self) -> list[Pair]:
        """Pairs that have no verdict yet, or that infrastructure failed."""
        return [pair for pair in self._pairs if self._is_missing(pair)]

    async def collect(self, solver: Solver) -> Tally:
        """Do what is missing, then `settle`. Raises: ServerError when nothing works."""
        self._solver = solver
        for _ in range(PASSES):
            todo = self.missing()
            if not todo:
                break
            await self._work_through(todo)
        return self.settle()

    def settle(self) -> Tally:
        """Count everything and put both files in order. Raises: ServerError when nothing but errors came out."""
        tally = self._tally()
        if self._pairs and tally.errors == len(self._pairs):
            raise ServerError(_give_up("every rollout", tally.lost[-1][2]))
        if tally.lost:
            _warn(tally, len(self._pairs))
        self._rollouts.settle(self._pairs)
        self._verdicts.settle(self._pairs)
        return tally

    def _is_missing(self, pair: Pair) -> bool:
        if pair not in self._rollouts or pair not in self._verdicts:
            return True
        return self._verdicts.get(pair).state in UNJUDGED

    async def _work_through(self, todo: Sequence[Pair]) -> None:
        remaining = iter(todo)
        finished = Tally()
        with progress(f"rollouts {self._policy}", len(self._pairs), len(self._pairs) - len(todo)) as shown:
            workers = [self._worker(remaining, finished, shown) for _ in range(min(self._concurrency, len(todo)))]
            await _all(workers)

    async def _worker(self, remaining: Iterator[Pair], finished: Tally, shown: Progress) -> None:
        for pair in remaining:
            fresh = pair not in self._verdicts
            rollout, verdict = await self._try(pair)
            finished.add(rollout.stop, verdict)
            shown.advance(notes=finished.notes())
            if fresh:  # pairs that failed before may well fail again: they say nothing about the server
                self._stop_if_dead(verdict)

    async def _try(self, pair: Pair) -> tuple[Rollout, Verdict]:
        """One pair, both records written. A rollout that is there and sound is judged again, not made again."""
        question = self._questions[pair.question_id]
        kept = self._rollouts.get(pair) if pair in self._rollouts and not self._redact else None
        if kept is not None and kept.stop != "error":
            rollout = kept
        else:
            rollout = await self._solve(question, pair)
            if not self._redact:
                self._rollouts.append(rollout)
        verdict = await self._judge(rollout, question)
        if self._redact:  # judged before it is written: what is on disk could not be judged again
            rollout, verdict = redacted_rollout(rollout), redacted_verdict(verdict)
            self._rollouts.append(rollout)
        self._verdicts.append(verdict)
        return rollout, verdict

    async def _solve(self, question: Question, pair: Pair) -> Rollout:
        seed = stable_seed(self._seed, self._policy, pair)
        try:
            return await self._solver(question, pair.repeat, seed)
        except CredentialError:
            raise
        except Exception as error:
            # A traceback may quote what must stay secret.
            logger.error("rollout %s/%d broke", pair.question_id, pair.repeat, exc_info=not self._redact)
            return Rollout(
                question_id=pair.question_id,
                repeat=pair.repeat,
                policy=self._policy,
                seed=seed,
                messages=(),
                stop="error",
                error=f"{type(error).__name__}: {error}",
            )

    def _stop_if_dead(self, verdict: Verdict) -> None:
        limit = max(ERRORS_IN_A_ROW, self._concurrency)
        for state, what in (("rollout_error", "rollouts"), ("judge_error", "verdicts")):
            self._in_a_row[state] = self._in_a_row[state] + 1 if verdict.state == state else 0
            if self._in_a_row[state] >= limit:
                raise ServerError(_give_up(f"{limit} {what} in a row", verdict.reason))

    def _tally(self) -> Tally:
        tally = Tally()
        for pair in self._pairs:
            rollout = self._rollouts.get(pair)
            tally.tokens += rollout.usage.completion_tokens
            tally.add(rollout.stop, self._verdicts.get(pair))
        return tally


def run(
    *,
    questions: Sequence[Question],
    model: ChatModel,
    toolbox: Tools,
    budget: Budget,
    judge: Judge,
    policy: str,
    repeats: int,
    concurrency: int,
    seed: int,
    folder: StageFolder,
    prompt: Path | None = None,
) -> None:
    """Write `rollouts.jsonl` and `verdicts.jsonl` of these questions, sorted by question and repeat."""
    if folder.done:
        return
    solver = make_solver(model=model, toolbox=toolbox, budget=budget, policy=policy, prompt=prompt)
    asyncio.run(
        run_with(
            solver,
            questions=questions,
            judge=judge,
            policy=policy,
            repeats=repeats,
            concurrency=concurrency,
            seed=seed,
            folder=folder,
        )
    )


async def run_with(
    solver: Solver,
    *,
    questions: Sequence[Question],
    judge: Judge,
    policy: str,
    repeats: int,
    concurrency: int,
    seed: int,
    folder: StageFolder,
) -> None:
    """As `run`, inside a running event loop and with any solver."""
    if folder.done:
        return
    collector = Collector(
        folder.path,
        policy=policy,
        seed=seed,
        repeats=repeats,
        questions=questions,
        judge=judge,
        concurrency=concurrency,
    )
    tally = await collector.collect(solver)
    folder.fail_all(tally.lost)
    counts = {"questions": len(questions), "rollouts": len(questions) * repeats, **tally.counts()}
    folder.log_metrics({f"rollouts/{key}": value for key, value in counts.items()})
    folder.finish({**counts, "stops": dict(sorted(tally.stops.items()))})


async def _all(workers: Sequence[Awaitable[None]]) -> None:
    """Run workers to their end; the first error ends them all and is raised as itself."""
    tasks = [asyncio.ensure_future(worker) for worker in workers]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _give_up(what: str, why: str) -> str:
    return f"{what} failed for reasons that are not the model's; nothing is lost, run again when this is mended: {why}"


def _warn(tally: Tally, total: int) -> None:
    reasons = Counter(reason for _, reason, _ in tally.lost)
    share = len(tally.lost) / total
    level = logging.WARNING if share > JUDGE_ERROR_LIMIT else logging.INFO
    words = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    logger.log(level, "%.1f %% of rollouts say nothing (%s): they count neither way", 100 * share, words)

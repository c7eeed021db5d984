"""Sample groups until enough of them say something: lost tries are sampled again, dead groups replaced."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from groundhop.errors import CredentialError, ServerError
from groundhop.progress import Progress
from groundhop.records import Rollout, StepRollout, Task, Verdict
from groundhop.training.groups import Group, Try, as_try, seed_of, tasks_of_step

logger = logging.getLogger(__name__)


class Solve(Protocol):
    """One rollout of the agent loop against the live servers, and its verdict."""

    async def __call__(self, task: Task, *, repeat: int, seed: int, step: int, policy: str) -> tuple[Rollout, Verdict]:
        """Infrastructure failures come back as `stop="error"`; CredentialError stops the run."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is sampled a step."""

    prompts: int
    group: int
    refill_rounds: int
    max_length: int
    concurrency: int
    seed: int
    policy: str = "grpo"


@dataclass(frozen=True, slots=True)
class Collected:
    """All groups of a step in the order of their slots; at most `plan.prompts` are trained on."""

    step: int
    groups: tuple[Group, ...]
    trained: tuple[Group, ...]
    backfilled: int

    @property
    def fates(self) -> Counter[str]:
        """Groups by what became of them."""
        return Counter(group.fate for group in self.groups)

    @property
    def tries(self) -> list[Try]:
        """All tries of the step."""
        return [one for group in self.groups for one in group.tries]

    def records(self) -> Iterator[StepRollout]:
        """What is kept of the step's rollouts."""
        trained = {group.slot for group in self.trained}
        for group in self.groups:
            values = group.advantages() if group.slot in trained else {}
            for one in group.tries:
                yield StepRollout(
                    step=self.step,
                    slot=group.slot,
                    mark=one.mark,
                    reward=one.reward,
                    advantage=values.get(one.repeat),
                    trained=one.trained and one.repeat in values,
                    rollout=one.rollout,
                    verdict=one.verdict,
                )


async def collect(tasks: Sequence[Task], solve: Solve, plan: Plan, step: int) -> Collected:
    """Sample the groups of optimizer step `step` (from 1).

    Each round samples again what was lost of the groups that can still be used, and a further task for each group
    that came out all right or all wrong. The outcome does not depend on which rollout finishes first.
    Raises: ServerError when not one rollout of the step got a verdict.
    """
    queue = tasks_of_step(tasks, step=step - 1, prompts=plan.prompts, seed=plan.seed)
    sampler = _Sampler(solve, plan, step)
    groups: list[Group] = []
    _open_groups(groups, queue, plan, plan.prompts)
    await sampler.fill(groups)
    backfilled = 0
    for _ in range(plan.refill_rounds):
        open_again = [group for group in groups if group.wanted]
        usable = sum(1 for group in groups if group.alive or group.wanted)
        fresh = _open_groups(groups, queue, plan, plan.prompts - usable)
        if not open_again and not fresh:
            break
        backfilled += sum(group.wanted for group in open_again)
        await sampler.fill(open_again + fresh)
    sampler.close()
    _refuse_if_all_lost(groups, step)
    alive = [group for group in groups if group.alive]
    return Collected(step, tuple(groups), tuple(alive[: plan.prompts]), backfilled)


def _open_groups(groups: list[Group], queue: Iterator[Task], plan: Plan, count: int) -> list[Group]:
    fresh = [Group(len(groups) + at, task, plan.group) for at, task in zip(range(count), queue, strict=False)]
    groups += fresh
    return fresh


class _Sampler:
    """Runs the tries of one step, a bounded number at a time."""

    def __init__(self, solve: Solve, plan: Plan, step: int) -> None:
        self._solve, self._plan, self._step = solve, plan, step
        self._room = asyncio.Semaphore(plan.concurrency)
        self._progress = Progress(f"grpo step {step}: rollouts", None)

    async def fill(self, groups: Sequence[Group]) -> None:
        """Sample the missing tries of all groups together."""
        places = [(group, len(group.tries) + at) for group in groups for at in range(group.wanted)]
        try:
            async with asyncio.TaskGroup() as running:
                jobs = [running.create_task(self._one(group, repeat)) for group, repeat in places]
        except* CredentialError as errors:
            raise errors.exceptions[0] from None
        for (group, _), job in zip(places, jobs, strict=True):
            group.tries.append(job.result())

    async def _one(self, group: Group, repeat: int) -> Try:
        seed = seed_of(self._plan.seed, self._step, group.slot, repeat)
        rollout: Rollout | None = None
        verdict: Verdict | None = None
        async with self._room:
            try:
                rollout, verdict = await self._solve(
                    group.task, repeat=repeat, seed=seed, step=self._step, policy=self._plan.policy
                )
            except CredentialError:
                raise
            except Exception:  # one bad rollout never stops a run; it is kept as lost and sampled again
                logger.exception("grpo step %d: rollout %d of %s failed", self._step, repeat, group.task.id)
        self._progress.advance(1)
        return as_try(repeat, rollout, verdict, max_length=self._plan.max_length)

    def close(self) -> None:
        """Show the final count."""
        self._progress.close()


def _refuse_if_all_lost(groups: Sequence[Group], step: int) -> None:
    tries = [one for group in groups for one in group.tries]
    if all(one.lost for one in tries):
        counts = ", ".join(f"{mark} {count}" for mark, count in sorted(Counter(one.mark for one in tries).items()))
        raise ServerError(
            f"GRPO step {step}: none of {len(tries)} rollouts got a verdict ({counts}). "
            "See the servers' logs; the run goes on from its last checkpoint"
        )

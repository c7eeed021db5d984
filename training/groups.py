"""One group of GRPO: tries at one task, what each counts for, and whether together they say anything."""

import hashlib
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from groundhop.records import Rollout, Task, Verdict
from groundhop.training.advantages import advantages, is_dead

Mark = Literal["right", "wrong", "over_budget", "too_long", "no_verdict", "error", "bad_tokens"]

OVER_BUDGET = frozenset({"turns", "tokens", "time", "context", "truncated"})
LOST = frozenset[Mark](("no_verdict", "error", "bad_tokens"))
"""Tries that say nothing about the model: no reward, no loss, sampled again."""
UNTRAINED = LOST | frozenset[Mark](("over_budget", "too_long"))


@dataclass(frozen=True, slots=True)
class Try:
    """One rollout of a group with its verdict; both None when the agent loop itself failed."""

    repeat: int
    mark: Mark
    reward: float | None
    rollout: Rollout | None
    verdict: Verdict | None

    @property
    def lost(self) -> bool:
        """Whether it says nothing about the model."""
        return self.mark in LOST

    @property
    def trained(self) -> bool:
        """Whether its sampled tokens may enter the loss."""
        return self.mark not in UNTRAINED


def as_try(repeat: int, rollout: Rollout | None, verdict: Verdict | None, *, max_length: int) -> Try:
    """Say what a rollout counts for.

    A right answer is reward 1 however it came about. A wrong or missing one is 0; if a budget ended the rollout, its
    question was not solved, so it lowers the group's baseline, but its tokens stay out of the loss: which of them were
    to blame is not known, and the cut is not the model's. Infrastructure and judge failures have no reward.
    """
    mark = _mark(rollout, verdict, max_length)
    if mark in LOST:
        return Try(repeat, mark, None, rollout, verdict)
    assert verdict is not None
    return Try(repeat, mark, 1.0 if verdict.correct else 0.0, rollout, verdict)


def _mark(rollout: Rollout | None, verdict: Verdict | None, max_length: int) -> Mark:
    if rollout is None or rollout.stop == "error":
        return "error"
    if verdict is None or verdict.correct is None:
        return "no_verdict"
    if not has_good_tokens(rollout):
        return "bad_tokens"
    if len(rollout.token_ids) > max_length:
        return "too_long"
    if verdict.correct:
        return "right"
    return "over_budget" if rollout.stop in OVER_BUDGET else "wrong"


def has_good_tokens(rollout: Rollout) -> bool:
    """Whether ids, mask and log-probabilities line up, something was sampled, all of it with a number."""
    ids, mask, log_probs = rollout.token_ids, rollout.mask, rollout.log_probs
    lengths_agree = len(ids) == len(mask) == len(log_probs) and 0 < rollout.prompt_length < len(ids)
    if not lengths_agree or any(mask[: rollout.prompt_length]) or not any(mask):
        return False
    return all(math.isfinite(log_prob) for log_prob, sampled in zip(log_probs, mask, strict=True) if sampled)


@dataclass(slots=True)
class Group:
    """All tries at one task in one step."""

    slot: int
    task: Task
    size: int
    """Tries with a reward that a full group has."""
    tries: list[Try] = field(default_factory=list)

    @property
    def kept(self) -> list[Try]:
        """Tries with a reward."""
        return [one for one in self.tries if not one.lost]

    @property
    def wanted(self) -> int:
        """How many tries are still missing."""
        return self.size - len(self.kept)

    @property
    def alive(self) -> bool:
        """Whether training on it would move anything."""
        kept = self.kept
        return not is_dead([one.reward for one in kept]) and any(one.trained for one in kept)

    @property
    def fate(self) -> Literal["alive", "all_right", "all_wrong", "lost"]:
        """What became of it."""
        rewards = {one.reward for one in self.kept}
        if self.alive:
            return "alive"
        if len(self.kept) < 2 or len(rewards) > 1:
            return "lost"
        return "all_right" if rewards == {1.0} else "all_wrong"

    def advantages(self) -> dict[int, float]:
        """Advantage by repeat, of the tries with a reward."""
        kept = self.kept
        return dict(zip((one.repeat for one in kept), advantages([one.reward for one in kept]), strict=True))


def tasks_of_step(tasks: Sequence[Task], *, step: int, prompts: int, seed: int) -> Iterator[Task]:
    """First the `prompts` tasks whose turn it is, then the others in an order of the step's own.

    Turns go round through one shuffle of all tasks after another, so every task comes equally often. Depends on
    nothing but the arguments: a step that is done again after a kill gets the same tasks.
    """
    turn = step * prompts
    first = [
        _shuffled(tasks, f"{seed}/epoch/{at // len(tasks)}")[at % len(tasks)] for at in range(turn, turn + prompts)
    ]
    yield from first
    taken = {task.id for task in first}
    yield from (task for task in _shuffled(tasks, f"{seed}/refill/{step}") if task.id not in taken)


def _shuffled(tasks: Sequence[Task], key: str) -> list[Task]:
    copied = list(tasks)
    random.Random(key).shuffle(copied)
    return copied


def seed_of(seed: int, step: int, slot: int, repeat: int) -> int:
    """Sampling seed of one try, below 2^31: vLLM takes one an integer."""
    digest = hashlib.sha256(f"{seed}/{step}/{slot}/{repeat}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1

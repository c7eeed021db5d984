"""What happens around an optimizer step of GRPO: sample before it, refit after it, write both down."""

# TRL exports its classes lazily and types its trainers' arguments and batches more widely than they are.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import asyncio
import logging
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from groundhop import jsonl
from groundhop.progress import Progress
from groundhop.records import Task
from groundhop.runs import StageFolder
from groundhop.training.collect import Collected, Plan, Solve, collect
from groundhop.training.grpo_steps import metrics_of, sampled_line, sketching, step_line, step_row, with_norm
from groundhop.training.hotload.checkpoint import open_checkpoint
from groundhop.training.hotload.refit import RefitResult, Refitter
from groundhop.training.kl.controlled import Controlled
from groundhop.training.policy_trainer import PolicyTrainer
from groundhop.training.sketch.refit import SketchRefitter, make_sketch_refitter

logger = logging.getLogger(__name__)

ROLLOUTS = "rollouts.jsonl"
STEPS = "steps.jsonl"


class Loop:
    """What happens around an optimizer step: sample before it, refit after it, and write both down."""

    def __init__(
        self, tasks: Sequence[Task], solve: Solve, refitter: Refitter, plan: Plan, folder: StageFolder, steps: int
    ) -> None:
        self.version = ""
        self.trainer: PolicyTrainer
        self._tasks, self._solve, self._refitter, self._plan = tasks, solve, refitter, plan
        self._folder, self._steps = folder, steps
        # One event loop for the whole run: clients keep their connections in the loop they were made in.
        self._runner = asyncio.Runner()
        self._shown: Progress | None = None
        self._sampled_version = ""
        self._collected: Collected
        self._refitted: RefitResult
        self._rollout_s = self._refit_s = self._train_from = 0.0
        self.optimizer: torch.optim.Optimizer

    def collect(self, step: int) -> Collected:
        """Sample the groups of a step and append its rollouts."""
        start = time.monotonic()
        self._sampled_version = self.version
        self._collected = self._runner.run(collect(self._tasks, self._solve, self._plan, step))
        with jsonl.Appender(self._folder.path / ROLLOUTS) as out:
            for record in self._collected.records():
                out.append(record)
        self._train_from = time.monotonic()
        self._rollout_s = self._train_from - start
        logger.info("grpo step %d/%d: %s", step, self._steps, sampled_line(self._collected))
        return self._collected

    def show(self, done: int, total: int) -> None:
        """Show progress inside a step, by micro-batch."""
        if done == 0:
            self._shown = Progress("grpo: training, micro-batches", total)
        elif self._shown is not None and done <= total:
            self._shown.advance(1)

    def before_update(self) -> None:
        """Tell a KL control how far the servers' log-probabilities are off: so much less may the step move the policy."""
        counts = self.trainer.statistics
        if isinstance(self.optimizer, Controlled) and counts.tokens and math.isfinite(counts.log_ratio):
            self.optimizer.budget.observe(-counts.log_ratio / counts.tokens)

    def send_sketches(self, base: Path, folder: Path) -> None:
        """From here on, send steps to the servers' site as sketches; the site in `folder` begins at the trainer's weights."""
        targets = {target.name for target in sketching(self.optimizer).sketches.targets}
        self._refitter = make_sketch_refitter(self._refitter, self._named(), open_checkpoint(base), targets, folder)

    def refit(self) -> None:
        """Put the trainer's weights into the servers."""
        start = time.monotonic()
        if isinstance(self._refitter, SketchRefitter):
            self._refitter.add(sketching(self.optimizer).last_update)
        self._refitted = self._runner.run(self._refitter.refit(self._named()))
        self.version = self._refitted.version
        self._refit_s = time.monotonic() - start

    def commit(self, step: int, logs: dict[str, float]) -> None:
        """Write the row of a finished step."""
        row = step_row(
            step=step,
            collected=self._collected,
            statistics=self.trainer.statistics,
            refitted=self._refitted,
            sampled_version=self._sampled_version,
            control=self.optimizer.last if isinstance(self.optimizer, Controlled) else None,
            traffic=self._refitter.traffic[-1] if isinstance(self._refitter, SketchRefitter) else None,
            logs=with_norm(logs, self.optimizer),
            seconds=(self._rollout_s, time.monotonic() - self._train_from - self._refit_s, self._refit_s),
        )
        with jsonl.Appender(self._folder.path / STEPS) as out:
            out.append(row)
        self._folder.log_metrics(metrics_of(row))
        if row.stale_share > 0:
            logger.warning("grpo step %d: %.1f %% of sampled tokens came from another version than %s",
                           step, 100 * row.stale_share, self._sampled_version)  # fmt: skip
        logger.info("grpo step %d/%d done: %s", step, self._steps, step_line(row))

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert self.trainer.model is not None
        for name, weight in self.trainer.model.named_parameters():
            yield name, weight.detach()

    def close(self) -> None:
        """End the event loop."""
        self._runner.close()


class Steps(TrainerCallback):
    """Hooks the loop into the trainer. With `site`, a checkpoint and a folder, steps go to the servers as sketches."""

    def __init__(self, loop: Loop, site: tuple[Path, Path] | None = None) -> None:
        self._loop, self._site = loop, site

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Bring the servers to the trainer's weights: after a kill they may be ahead, or fresh."""
        if self._site is not None:
            self._loop.send_sketches(*self._site)
        self._loop.refit()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """All gradients are there; the optimizer comes next."""
        self._loop.before_update()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After the optimizer: the next step's rollouts are to come from these weights."""
        self._loop.refit()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """After the refit and before a checkpoint is written."""
        if logs and "loss" in logs:
            self._loop.commit(state.global_step, logs)

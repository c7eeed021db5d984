"""Train the policy on judged rollouts of our agent loop against servers that take each step's weights (TRL GRPO)."""

# TRL exports its classes lazily and types its trainers' arguments and batches more widely than they are.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import asyncio
import logging
import math
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from groundhop import jsonl
from groundhop.config import GrpoConfig
from groundhop.errors import InputError
from groundhop.progress import Progress
from groundhop.records import GrpoStep, StepRollout, Task
from groundhop.runs import StageFolder
from groundhop.training.arguments import micro_batch_of, shared_arguments
from groundhop.training.checkpoints import forget_after, last_complete, save_model, step_of
from groundhop.training.collect import Collected, Plan, Solve, collect
from groundhop.training.hotload.checkpoint import open_checkpoint
from groundhop.training.hotload.refit import RefitResult, Refitter
from groundhop.training.kl.controlled import Controlled, StepControl
from groundhop.training.logra.optimizer import Logra
from groundhop.training.optimizers import device, make_optimizer, trainers_clip, with_budget
from groundhop.training.policy_trainer import GRPOConfig as TrlConfig
from groundhop.training.policy_trainer import PolicyTrainer, StepStatistics, known_reward
from groundhop.training.sketch.refit import SketchRefitter, Traffic, make_sketch_refitter

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
        logger.info("grpo step %d/%d: %s", step, self._steps, _line(self._collected))
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
        logger.info(
            "grpo step %d/%d done: reward %s  loss %s  |log ratio| %s  version %s  %.0f s sampling, %.0f s training",
            step, self._steps, _short(row.reward_mean), _short(row.loss), _short(row.log_ratio_abs_mean), row.version,
            row.rollout_s, row.train_s,
        )  # fmt: skip

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


def run(
    *,
    config: GrpoConfig,
    tasks: Sequence[Task],
    model: Path,
    folder: StageFolder,
    seed: int,
    solve: Solve,
    refitter: Refitter,
    concurrency: int = 32,
) -> None:
    """Train `model` (a Hugging Face folder that the servers hold too) and leave the result in `folder.path/model`.

    Goes on from the last complete checkpoint after a kill; what was sampled and trained since then is done again and
    replaces what was written of it.
    Raises: InputError without tasks; ServerError when a whole step got no verdict or a server takes no weights.
    """
    if folder.done:
        return
    if not tasks:
        raise InputError("no tasks to train on: no question falls into a trainable bucket (see buckets.trainable)")
    plan = Plan(config.prompts, config.group, config.refill_rounds, config.max_length, concurrency, seed)
    ordered = sorted(tasks, key=lambda task: task.id)
    loop = Loop(ordered, solve, refitter, plan, folder, config.steps)
    loop.trainer = make_trainer(config, model, folder.path / "checkpoints", seed, loop)
    try:
        _train(loop.trainer, folder)
    finally:
        loop.close()
    save_model(loop.trainer.model, model, folder.path / "model")
    folder.finish(_summary(folder))
    for name in ("checkpoints", "site"):
        shutil.rmtree(folder.path / name, ignore_errors=True)


def make_trainer(config: GrpoConfig, model: Path, output: Path, seed: int, loop: Loop) -> PolicyTrainer:
    """The trainer; a batch of TRL's is all groups of one optimizer step."""
    rows = config.prompts * config.group
    micro = micro_batch_of(config.micro_batch, rows)
    args = TrlConfig(
        **shared_arguments(
            learning_rate=config.learning_rate,
            bf16=config.bf16,
            checkpoint_steps=config.checkpoint_steps,
            output=str(output),
            seed=seed,
        ),
        max_grad_norm=trainers_clip(config.optimizer, config.max_grad_norm),
        max_steps=config.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=rows // micro,
        steps_per_generation=rows // micro,
        num_generations=config.group,
        max_completion_length=config.max_length,
        temperature=config.temperature,
        beta=config.kl_coefficient,
        epsilon=config.clip_low,
        epsilon_high=config.clip_high,
        loss_type="dapo",
        scale_rewards="group",
        num_iterations=1,
        shuffle_dataset=False,
        ignore_data_skip=True,
        use_vllm=False,
    )
    # Rows stand for places in a batch; the tasks themselves come from `collect`, which can also replace them.
    places = datasets.Dataset.from_dict({"prompt": [f"place {n}" for n in range(config.prompts * config.steps)]})
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device())
    loop.optimizer = _optimizer(config, policy, seed)
    logging.getLogger("trl").setLevel(logging.ERROR)  # it warns of every row without a reward; those are counted here
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # rollout_func is called experimental
        trainer = PolicyTrainer(
            model=policy,
            optimizers=(loop.optimizer, None),
            reward_funcs=known_reward,
            args=args,
            train_dataset=places,
            processing_class=AutoTokenizer.from_pretrained(model),
            rollout_func=lambda prompts, owner: owner.rollouts(prompts),
        )
    trainer.warmup_steps = config.warmup_steps
    trainer.collect, trainer.on_micro_batch = loop.collect, loop.show
    site = (model, output.with_name("site")) if config.sync == "sketch" else None
    trainer.add_our_callbacks(Steps(loop, site))
    if isinstance(loop.optimizer, Controlled):
        loop.optimizer.probe = lambda: trainer.probes(config.kl_probe)
    return trainer


def _optimizer(config: GrpoConfig, policy: torch.nn.Module, seed: int) -> torch.optim.Optimizer:
    made = make_optimizer(
        policy,
        config.optimizer,
        config.logra,
        learning_rate=config.learning_rate,
        max_norm=config.max_grad_norm,
        seed=seed,
        exact=config.sync == "sketch",
    )
    if config.kl_budget is None:
        return made
    return with_budget(
        made,
        policy,
        budget=config.kl_budget,
        budget_end=config.kl_budget_end,
        updates=config.steps,
        scale_max=config.kl_scale_max,
        temperature=config.temperature,
    )


def _train(trainer: PolicyTrainer, folder: StageFolder) -> None:
    checkpoint = last_complete(folder.path / "checkpoints")
    done = step_of(checkpoint) if checkpoint else 0
    forget_after(folder, done)
    rollouts, steps = folder.path / ROLLOUTS, folder.path / STEPS
    jsonl.write(rollouts, [row for row in jsonl.read_if_there(rollouts, StepRollout) if row.step <= done])
    jsonl.write(steps, [row for row in jsonl.read_if_there(steps, GrpoStep) if row.step <= done])
    if checkpoint:
        logger.info("grpo: going on from optimizer step %d", done)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)


def step_row(
    *,
    step: int,
    collected: Collected,
    statistics: StepStatistics,
    refitted: RefitResult,
    sampled_version: str,
    control: StepControl | None,
    traffic: Traffic | None,
    logs: dict[str, float],
    seconds: tuple[float, float, float],
) -> GrpoStep:
    """The record of one optimizer step."""
    tries, fates = collected.tries, collected.fates
    rewards = [one.reward for one in tries if one.reward is not None]
    calls = [len(one.rollout.calls) for one in tries if one.rollout is not None and not one.lost]
    trained = statistics.tokens > 0
    return GrpoStep(
        step=step,
        version=refitted.version,
        sampled_version=sampled_version,
        stale_share=stale_share(collected, sampled_version),
        reward_mean=_mean(rewards),
        rollouts=len(tries),
        groups=len(collected.trained),
        groups_tried=len(collected.groups),
        all_right=fates["all_right"],
        all_wrong=fates["all_wrong"],
        groups_lost=fates["lost"],
        backfilled=collected.backfilled,
        marks=dict(sorted(Counter(one.mark for one in tries).items())),
        calls_mean=_mean(calls),
        trained_rollouts=statistics.rollouts,
        trained_tokens=statistics.tokens,
        loss=_finite(logs["loss"]),
        grad_norm=_finite(logs.get("grad_norm")) if trained else None,
        learning_rate=logs["learning_rate"],
        log_ratio_abs_mean=statistics.log_ratio_abs / statistics.tokens if trained else None,
        log_ratio_std=statistics.log_ratio_std if trained else None,
        clip_share=statistics.clipped / statistics.tokens if trained else None,
        entropy=statistics.entropy / statistics.tokens if trained else None,
        kl_budget=control.budget if control else None,
        kl_predicted=control.predicted if control else None,
        kl_realised=control.realised if control else None,
        step_scale=control.alpha if control else None,
        changed=refitted.changed,
        total=refitted.total,
        bytes=refitted.bytes,
        site_bytes=traffic.record_bytes + traffic.repair_bytes if traffic else None,
        sketched=traffic.sketched if traffic else None,
        rollout_s=round(seconds[0], 3),
        train_s=round(seconds[1], 3),
        refit_s=round(seconds[2], 3),
    )


def with_norm(logs: dict[str, float], optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """A step's logs with the gradient's norm, which a LoGRA knows and the trainer does not."""
    inside = optimizer.wrapped if isinstance(optimizer, Controlled) else optimizer
    return {**logs, "grad_norm": inside.last_norm} if isinstance(inside, Logra) else logs


def sketching(optimizer: torch.optim.Optimizer) -> Logra:
    """The LoGRA inside a KL control, or the one given."""
    inside = optimizer.wrapped if isinstance(optimizer, Controlled) else optimizer
    assert isinstance(inside, Logra)  # the config allows sketches with LoGRA only
    return inside


def stale_share(collected: Collected, version: str) -> float:
    """Share of the sampled tokens that a server produced with another version than `version`."""
    stale = total = 0
    for rollout in (one.rollout for one in collected.tries if one.rollout is not None):
        for span in rollout.spans:
            if span.version is not None:
                sampled = sum(rollout.mask[span.start : span.end])
                total += sampled
                stale += sampled if span.version != version else 0
    return stale / total if total else 0.0


def metrics_of(row: GrpoStep) -> dict[str, float | int | str | None]:
    """A step's row as flat numbers to plot."""
    flat: dict[str, float | int | str | None] = {"step": row.step}
    for name in row.__struct_fields__:
        value = getattr(row, name)
        if name not in ("step", "marks"):
            flat[f"grpo/{name}"] = value
    flat |= {f"grpo/marks_{mark}": count for mark, count in row.marks.items()}
    return flat | {"grpo/all_masked": int(row.trained_tokens == 0)}


def _summary(folder: StageFolder) -> dict[str, Any]:
    rows = jsonl.read_if_there(folder.path / STEPS, GrpoStep)
    marks = sum((Counter(row.marks) for row in rows), Counter[str]())
    return {
        "steps": len(rows),
        "rollouts": sum(row.rollouts for row in rows),
        "groups_trained": sum(row.groups for row in rows),
        "groups_tried": sum(row.groups_tried for row in rows),
        "all_right": sum(row.all_right for row in rows),
        "all_wrong": sum(row.all_wrong for row in rows),
        "marks": dict(sorted(marks.items())),
        "reward_first": rows[0].reward_mean if rows else None,
        "reward_last": rows[-1].reward_mean if rows else None,
        "version": rows[-1].version if rows else None,
    }


def _line(collected: Collected) -> str:
    marks = Counter(one.mark for one in collected.tries)
    counts = "  ".join(f"{mark} {count}" for mark, count in sorted(marks.items()))
    return f"{len(collected.trained)} of {len(collected.groups)} groups have a signal  {counts}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _short(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"

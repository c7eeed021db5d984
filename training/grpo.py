"""Train the policy on judged rollouts of our agent loop against servers that take each step's weights (TRL GRPO)."""

# TRL exports its classes lazily and types its trainers' arguments and batches more widely than they are.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import logging
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from groundhop import jsonl
from groundhop.config import GrpoConfig
from groundhop.errors import InputError
from groundhop.records import GrpoStep, StepRollout, Task
from groundhop.runs import StageFolder
from groundhop.training.arguments import micro_batch_of, shared_arguments
from groundhop.training.checkpoints import forget_after, last_complete, save_model, step_of
from groundhop.training.collect import Plan, Solve
from groundhop.training.grpo_loop import ROLLOUTS, STEPS, Loop, Steps
from groundhop.training.grpo_steps import summary_of
from groundhop.training.hotload.refit import Refitter
from groundhop.training.kl.controlled import Controlled
from groundhop.training.optimizers import device, make_optimizer, trainers_clip, with_budget
from groundhop.training.policy_trainer import GRPOConfig as TrlConfig
from groundhop.training.policy_trainer import PolicyTrainer, known_reward

logger = logging.getLogger(__name__)


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
    folder.finish(summary_of(jsonl.read_if_there(folder.path / STEPS, GrpoStep)))
    for name in ("checkpoints", "site"):
        shutil.rmtree(folder.path / name, ignore_errors=True)


def make_trainer(config: GrpoConfig, model: Path, output: Path, seed: int, loop: Loop) -> PolicyTrainer:
    """The trainer; a batch of TRL's is all groups of one optimizer step."""
    # Rows stand for places in a batch; the tasks themselves come from `collect`, which can also replace them.
    places = datasets.Dataset.from_dict({"prompt": [f"place {n}" for n in range(config.prompts * config.steps)]})
    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    policy.to(device())
    loop.optimizer = _optimizer(config, policy, seed)
    logging.getLogger("trl").setLevel(logging.ERROR)  # it warns of every row without a reward; those are counted here
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # rollout_func is called experimental
        trainer = PolicyTrainer(
            model=policy,
            optimizers=(loop.optimizer, None),
            reward_funcs=known_reward,
            args=_arguments(config, output, seed),
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


def _arguments(config: GrpoConfig, output: Path, seed: int) -> TrlConfig:
    rows = config.prompts * config.group
    micro = micro_batch_of(config.micro_batch, rows)
    return TrlConfig(
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

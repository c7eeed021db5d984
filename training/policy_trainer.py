"""TRL's GRPOTrainer on rollouts of our agent loop: server log-probabilities, tool text masked, nothing computed twice.

What of TRL is used: the training loop, checkpoints, advantages, the clipped loss and its normalisation. What is ours:
where rollouts come from, which are left out, how they are cut into micro-batches, and where logits are computed.
One process only: ranks could differ in how many micro-batches they have.
"""

# TRL exports its classes lazily and types its trainers' arguments and batches more widely than they are.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false, reportArgumentType=false
# pyright: reportAssignmentType=false, reportIncompatibleMethodOverride=false

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from groundhop.training.arguments import QuietTrainer
from groundhop.training.collect import Collected
from groundhop.training.groups import Try
from groundhop.training.heads import log_probs_at
from groundhop.training.kl.probe import Probe

# TRL imports all of vLLM (half a minute of a core, half a gigabyte) for a client that is not used here.
with mock.patch("trl.import_utils.is_vllm_available", return_value=False):
    from trl import GRPOConfig, GRPOTrainer

__all__ = ["GRPOConfig", "PolicyTrainer", "StepStatistics", "known_reward", "micro_batches"]

Batch = dict[str, Any]


@dataclass(slots=True)
class StepStatistics:
    """Sums over the trained tokens of one optimizer step, before its update."""

    tokens: int = 0
    rollouts: int = 0
    log_ratio: float = 0.0
    log_ratio_abs: float = 0.0
    log_ratio_squared: float = 0.0
    clipped: int = 0
    entropy: float = 0.0

    @property
    def log_ratio_std(self) -> float:
        """Standard deviation of log p_trainer - log p_server."""
        mean = self.log_ratio / self.tokens
        return float(max(self.log_ratio_squared / self.tokens - mean**2, 0.0) ** 0.5)


class PolicyTrainer(QuietTrainer, GRPOTrainer):
    """GRPO with the server's log-probabilities as those of the old policy.

    Ratios are per token and compare trainer and server at the sampling temperature; there is no ratio of whole
    sequences, whose noise grows with length. With one update a batch they differ from 1 by numerics alone.
    """

    collect: Callable[[int], Collected]
    """Gives the groups of optimizer step n (from 1)."""
    on_micro_batch: Callable[[int, int], None]
    """Told how many micro-batches of the step are done, and how many hold something."""
    statistics = StepStatistics()
    _prepared = -1
    _micro: Sequence[Batch | None] = ()
    _targets: Tensor | None = None
    _log_probs: Tensor
    _entropies: Tensor

    def rollouts(self, prompts: list[Any]) -> dict[str, list[Any]]:
        """Rows for TRL's `rollout_func`, as many as `prompts`; groups that are missing become blanks."""
        collected = self.collect(self.state.global_step + 1)
        size = self.num_generations
        rows = [row for group in collected.trained for row in group_rows(group.kept, size)]
        rows += [blank_row()] * (len(prompts) - len(rows))
        return {key: [row[key] for row in rows] for key in rows[0]}

    def _prepare_inputs(self, generation_batch: Batch) -> Batch | None:
        at = self._step // self.args.steps_per_generation
        if self._prepared != at:
            self._prepared = at
            self.statistics = StepStatistics()
            batch: Batch = self._generate_and_score_completions(generation_batch)
            batch["old_per_token_logps"] = batch.pop("sampling_per_token_logps")
            size, count = self.args.per_device_train_batch_size, self.args.steps_per_generation
            self._micro = micro_batches(batch, size, count, keep_level=self.beta != 0.0)
        at_micro: int = self._step % self.args.steps_per_generation
        return self._micro[at_micro]

    def training_step(self, model: Any, inputs: Batch, num_items_in_batch: Any = None) -> Tensor:
        """Skip a micro-batch that holds nothing: no forward, no gradient, so that AdamW leaves its state alone."""
        empty = self._prepare_inputs(inputs) is None
        self.on_micro_batch(self._step % self.args.steps_per_generation, sum(one is not None for one in self._micro))
        if empty:
            self._step += 1
            return torch.zeros((), device=self.args.device)
        return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[no-any-return]

    def _compute_loss(self, model: Any, inputs: Batch) -> Tensor:
        self._targets = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        try:
            loss: Tensor = super()._compute_loss(model, inputs)
        finally:
            targets, self._targets = self._targets, None
        self._count(inputs, targets)
        return loss

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor, None]:
        """Log-probabilities and entropies of shape (batch, logits_to_keep), 0 where nothing is trained."""
        kept = attention_mask[:, -logits_to_keep:].bool() if self._targets is None else self._targets
        parts: list[tuple[Tensor, Tensor]] = []
        step = batch_size or len(input_ids)
        for rows in (slice(start, start + step) for start in range(0, len(input_ids), step)):
            targets = torch.zeros_like(input_ids[rows], dtype=torch.bool)
            targets[:, -logits_to_keep:] = kept[rows]
            parts.append(
                log_probs_at(model, input_ids[rows], attention_mask[rows], targets, temperature=self.temperature)
            )
        log_probs, entropies = (torch.cat(values) for values in zip(*parts, strict=True))
        blank = torch.zeros(kept.shape, device=log_probs.device)
        self._log_probs, self._entropies = log_probs.detach(), entropies
        return blank.masked_scatter(kept, log_probs), blank.masked_scatter(kept, entropies), None

    def probes(self, rows: int) -> list[Probe]:
        """The first `rows` rollouts of the step that were trained on, to measure on how far an update moves the policy."""
        found: list[Probe] = []
        for batch in self._micro:
            if batch is not None and len(found) < rows:
                found += [_probe(batch, row) for row in range(len(batch["prompt_ids"]))]
        return found[:rows]

    @torch.no_grad()
    def _count(self, inputs: Batch, targets: Tensor) -> None:
        ratios = self._log_probs - inputs["old_per_token_logps"][targets]
        signs = inputs["advantages"][:, None].expand_as(targets)[targets]
        high = (ratios.exp() > 1 + self.epsilon_high) & (signs > 0)
        low = (ratios.exp() < 1 - self.epsilon_low) & (signs < 0)
        counts = self.statistics
        counts.tokens += ratios.numel()
        counts.rollouts += len(targets)
        counts.log_ratio += float(ratios.sum())
        counts.log_ratio_abs += float(ratios.abs().sum())
        counts.log_ratio_squared += float(ratios.square().sum())
        counts.clipped += int((high | low).sum())
        counts.entropy += float(self._entropies.sum())

    def _clip_grad_norm(self, model: Any) -> Tensor:
        norm: Tensor = super()._clip_grad_norm(model)
        if not torch.isfinite(norm):
            model.zero_grad(set_to_none=True)
        return norm


def group_rows(tries: Sequence[Try], size: int) -> list[dict[str, Any]]:
    """Rows of one group for TRL: token ids as sampled, never text that was tokenised again; blanks fill it up."""
    return [try_row(one) for one in tries] + [blank_row() for _ in range(size - len(tries))]


def try_row(one: Try) -> dict[str, Any]:
    """Prompt, completion with its mask and log-probabilities, and the reward of a try that has one."""
    rollout = one.rollout
    assert rollout is not None
    start = rollout.prompt_length
    return {
        "prompt_ids": list(rollout.token_ids[:start]),
        "completion_ids": list(rollout.token_ids[start:]),
        "logprobs": list(rollout.log_probs[start:]),
        "env_mask": list(rollout.mask[start:]) if one.trained else [0] * (len(rollout.token_ids) - start),
        "reward": one.reward,
    }


def blank_row() -> dict[str, Any]:
    """A place in the batch that holds nothing: TRL wants all groups to have the same size."""
    return {"prompt_ids": [0], "completion_ids": [0], "logprobs": [0.0], "env_mask": [0], "reward": None}


def known_reward(prompts: Any, completions: Any, reward: list[float | None], **_: Any) -> list[float | None]:
    """TRL's reward function. None keeps a row out of the statistics of its group."""
    return reward


def micro_batches(batch: Batch, size: int, count: int, *, keep_level: bool) -> list[Batch | None]:
    """Cut a batch into `count` micro-batches of at most `size` rows of like length; None for those without a row.

    Rows without a token to train are left out, and without `keep_level` also those with advantage 0: neither has a
    gradient. `num_items_in_batch` stays that of the whole batch, so the mean over tokens does not change.
    """
    masked = batch["completion_mask"] * batch["tool_mask"]
    matters = masked.sum(1) > 0
    if not keep_level:
        matters &= batch["advantages"] != 0
    lengths = batch["prompt_mask"].sum(1) + batch["completion_mask"].sum(1)
    rows = sorted(matters.nonzero().flatten().tolist(), key=lambda row: (-int(lengths[row]), row))
    cut = [_take(batch, rows[start : start + size]) for start in range(0, len(rows), size)]
    return [*cut, *[None] * (count - len(cut))]


def _probe(batch: Batch, row: int) -> Probe:
    at = slice(row, row + 1)
    masks = (batch["prompt_mask"][at], batch["completion_mask"][at])
    targets = (torch.zeros_like(masks[0]), masks[1] * batch["tool_mask"][at])
    return Probe(
        torch.cat((batch["prompt_ids"][at], batch["completion_ids"][at]), 1),
        torch.cat(masks, 1),
        torch.cat(targets, 1).bool(),
    )


def _take(batch: Batch, rows: list[int]) -> Batch:
    height = batch["prompt_ids"].shape[0]
    part = {k: v[rows] if isinstance(v, Tensor) and v.dim() and v.shape[0] == height else v for k, v in batch.items()}
    before = int((~part["prompt_mask"].bool().any(0)).sum())
    after = int(part["completion_mask"].bool().any(0).sum())
    for key in ("prompt_ids", "prompt_mask"):
        part[key] = part[key][:, before:]
    wide = ("completion_ids", "completion_mask", "tool_mask", "old_per_token_logps", "ref_per_token_logps")
    for key in wide:
        if key in part:
            part[key] = part[key][:, :after]
    return part

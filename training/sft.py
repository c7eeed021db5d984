"""Fine-tune the policy on traces, loss on the assistant's tokens only (TRL's SFTTrainer)."""

# TRL exports its classes lazily and types its trainers' arguments and batches more widely than they are.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import logging
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
import torch.nn.functional as functional
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig as TrlConfig
from trl import SFTTrainer

from groundhop import jsonl
from groundhop.config import SftConfig
from groundhop.errors import InputError
from groundhop.progress import Progress
from groundhop.records import Trace
from groundhop.runs import StageFolder
from groundhop.training.arguments import QuietTrainer, micro_batch_of, shared_arguments, warmup_of
from groundhop.training.batches import order
from groundhop.training.checkpoints import forget_after, last_complete, save_model, step_of
from groundhop.training.heads import inner, projected_only_at
from groundhop.training.masks import IGNORED, Dropped, Encoded, check_template, encode_all
from groundhop.training.optimizers import device, make_optimizer, trainers_clip

logger = logging.getLogger(__name__)


class MaskedTrainer(QuietTrainer, SFTTrainer):
    """TRL's trainer, with logits computed only where there is a label.

    On a CPU TRL 1.16 projects every position and keeps that gradient in float32, three quarters of it for nothing.
    """

    tokens_seen = 0
    """Tokens of all rows so far, padding not counted."""

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Mean negative log-likelihood (nats) over the labelled tokens of the whole optimizer step."""
        labels = inputs["labels"][:, 1:]
        predicting = functional.pad(labels != IGNORED, (0, 1))
        with projected_only_at(inner(model), predicting):
            outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False)
        loss = functional.cross_entropy(outputs.logits.float(), labels[labels != IGNORED], reduction="sum")
        count = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        self.tokens_seen += int(inputs["attention_mask"].sum())
        return loss / torch.as_tensor(count).clamp(min=1)


class StepLog(TrainerCallback):
    """Progress by micro-batch, and one row of metrics an optimizer step."""

    def __init__(self, folder: StageFolder, trainer: MaskedTrainer, total: int, done: int) -> None:
        self._folder, self._trainer = folder, trainer
        self._micro = trainer.args.gradient_accumulation_steps
        self._progress = Progress("sft: micro-batches", total * self._micro, done * self._micro)
        self._time, self._tokens = time.monotonic(), 0
        self._notes: dict[str, object] = {}

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called by the trainer after each micro-batch but the last of a step."""
        self._progress.advance(1, self._notes)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Called by the trainer after each optimizer step."""
        if not logs or "loss" not in logs:
            return
        now, tokens = time.monotonic(), self._trainer.tokens_seen
        rate = (tokens - self._tokens) / max(now - self._time, 1e-9)
        self._time, self._tokens = now, tokens
        row = {"sft/loss": logs["loss"], "sft/grad_norm": logs.get("grad_norm"), "sft/lr": logs.get("learning_rate")}
        self._folder.log_metrics({"step": state.global_step, **row, "sft/tokens_per_s": round(rate, 1)})
        self._notes = {"step": state.global_step, "loss": f"{logs['loss']:.3f}", "tokens/s": f"{rate:.0f}"}
        self._progress.advance(1, self._notes)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called by the trainer at its end."""
        self._progress.close()


def read_traces(traces: Sequence[Path] | Iterable[Trace]) -> Iterator[Trace]:
    """Traces from records or from the files that hold them, each id once."""
    seen: set[str] = set()
    for item in traces:
        for trace in jsonl.read(item, Trace) if isinstance(item, Path) else (item,):
            if trace.id not in seen:
                seen.add(trace.id)
                yield trace


def keep(encoded: Iterable[Encoded | Dropped], folder: StageFolder) -> list[Encoded]:
    """Rows to train, sorted by id; the dropped ones go to `failures.jsonl`.

    Raises: InputError with the counts by reason when nothing is left.
    """
    rows: list[Encoded] = []
    dropped: list[Dropped] = []
    for item in encoded:
        (rows if isinstance(item, Encoded) else dropped).append(item)  # type: ignore[arg-type]
    folder.fail_all((item.id, item.reason, item.detail) for item in dropped)
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(folder.drops.items()))
    logger.info("sft: %d traces to train, %d dropped %s", len(rows), len(dropped), f"({reasons})" if reasons else "")
    if not rows:
        raise InputError(f"none of {len(dropped)} traces can be trained: {reasons or 'there are no traces'}")
    return sorted(rows, key=lambda row: row.id)


def run(
    *, config: SftConfig, traces: Sequence[Path] | Iterable[Trace], model: Path, folder: StageFolder, seed: int
) -> None:
    """Train `model` (a Hugging Face folder) on `traces` and leave the result in `folder.path/model`.

    Goes on from the last complete checkpoint after a kill, in the same order and with the same result.
    Raises: ConfigError for a template without generation markers; InputError when no trace can be trained.
    """
    if folder.done:
        return
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = list(read_traces(traces))
    check_template(tokenizer, found[0].tools if found else ())
    rows = keep(encode_all(tokenizer, found, max_length=config.max_length), folder)
    reads = order([len(row.input_ids) for row in rows], epochs=config.epochs, batch=config.batch, seed=seed)
    if config.max_steps > 0:
        reads = (reads * (1 + config.max_steps * config.batch // len(reads)))[: config.max_steps * config.batch]
    trainer = make_trainer(config, tokenizer, [rows[read] for read in reads], model, folder.path, seed)
    _train(trainer, folder, total=-(-len(reads) // config.batch))
    save_model(trainer.model, model, folder.path / "model")
    folder.finish(_summary(rows, folder, trainer))
    shutil.rmtree(folder.path / "checkpoints", ignore_errors=True)


def make_trainer(
    config: SftConfig, tokenizer: Any, rows: Sequence[Encoded], model: Path, folder: Path, seed: int
) -> MaskedTrainer:
    """A trainer that reads `rows` in their order; weights are kept in float32, compute runs in BF16 if configured."""
    micro = micro_batch_of(config.micro_batch, config.batch)
    args = TrlConfig(
        **shared_arguments(
            learning_rate=config.learning_rate,
            bf16=config.bf16,
            checkpoint_steps=config.checkpoint_steps,
            output=str(folder / "checkpoints"),
            seed=seed,
        ),
        max_grad_norm=trainers_clip(config.optimizer, config.max_grad_norm),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=config.batch // micro,
        num_train_epochs=1,
        train_sampling_strategy="sequential",
        max_length=None,
        packing=False,
    )
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded.to(device())
    optimizer = make_optimizer(
        loaded,
        config.optimizer,
        config.logra,
        learning_rate=config.learning_rate,
        max_norm=config.max_grad_norm,
        seed=seed,
    )
    data = datasets.Dataset.from_dict({"input_ids": [r.input_ids for r in rows], "labels": [r.labels for r in rows]})
    trainer = MaskedTrainer(
        model=loaded, args=args, train_dataset=data, processing_class=tokenizer, optimizers=(optimizer, None)
    )
    trainer.warmup_steps = warmup_of(config.warmup_share, -(-len(rows) // config.batch))
    trainer.decays = True
    return trainer


def _train(trainer: MaskedTrainer, folder: StageFolder, total: int) -> None:
    checkpoint = last_complete(folder.path / "checkpoints")
    done = step_of(checkpoint) if checkpoint else 0
    forget_after(folder, done)
    if checkpoint:
        logger.info("sft: going on from optimizer step %d of %d", done, total)
    log = StepLog(folder, trainer, total, done)
    trainer.add_our_callbacks(log)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)


def _summary(rows: Sequence[Encoded], folder: StageFolder, trainer: MaskedTrainer) -> dict[str, Any]:
    metrics = [row for row in jsonl.read_if_there(folder.path / "metrics.jsonl", dict[str, Any]) if "sft/loss" in row]
    return {
        "traces": len(rows),
        "dropped": dict(folder.drops),
        "tokens": sum(len(row.input_ids) for row in rows),
        "trained_tokens": sum(row.trained for row in rows),
        "steps": trainer.state.global_step,
        "loss_first": metrics[0]["sft/loss"] if metrics else None,
        "loss_last": metrics[-1]["sft/loss"] if metrics else None,
    }

"""What both trainers share: precision, schedule without a wasted first step, silence on the console and the network."""

import math
from typing import Any

import datasets
import torch
import transformers
from torch.optim.lr_scheduler import LambdaLR
from transformers import PrinterCallback, Trainer, TrainerCallback

from groundhop.training.allocator import keep_freed_memory
from groundhop.training.checkpoints import KeepLastComplete


class QuietTrainer(Trainer):
    """A mix-in for TRL's trainers: they print, phone home and write model cards by default."""

    lr_scheduler: Any
    warmup_steps = 0
    decays = False
    """Whether the learning rate falls linearly to zero after the warm-up."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Linear warm-up that is not zero at the first step, then constant or falling.

        The stock schedule trains its first step with a rate of zero: of 20 steps one would be lost.
        """
        if self.lr_scheduler is None:
            warmup, total, decays = self.warmup_steps, num_training_steps, self.decays

            def factor(step: int) -> float:
                return rate_factor(step, warmup=warmup, total=total, decays=decays)

            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, factor)  # pyright: ignore[reportArgumentType]
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def add_our_callbacks(self, *callbacks: TrainerCallback) -> None:
        """Replace the console printer by ours, and mark complete checkpoints."""
        self.remove_callback(PrinterCallback)
        for callback in (KeepLastComplete(), *callbacks):
            self.add_callback(callback)

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Write none: checkpoints are not published."""

    def _send_telemetry(self) -> None:
        """Send nothing."""


def rate_factor(step: int, *, warmup: int, total: int, decays: bool) -> float:
    """Share of the full learning rate at optimizer step `step` (from 0) of `total`."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return (total - step) / max(total - warmup, 1) if decays else 1.0


def shared_arguments(
    *, learning_rate: float, bf16: bool, checkpoint_steps: int, output: str, seed: int
) -> dict[str, Any]:
    """Keyword arguments for TRL's configs. Weights stay float32; with `bf16` compute runs under BF16 autocast."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        keep_freed_memory()
    return {
        "output_dir": output,
        "learning_rate": learning_rate,
        "weight_decay": 0.0,
        "optim": "adamw_torch",
        "bf16": bf16,
        "use_cpu": on_cpu,
        "gradient_checkpointing": not on_cpu,
        # LoGRA's capture sits in the graph of the second pass, which reentrant checkpointing would not show.
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "dataloader_pin_memory": False,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "steps",
        "save_steps": checkpoint_steps,
        "report_to": [],
        "disable_tqdm": True,
        "seed": seed % 2**32,
    }


def warmup_of(share: float, total: int) -> int:
    """Optimizer steps of a warm-up that takes `share` of `total`."""
    return math.floor(share * total)


def micro_batch_of(wanted: int, batch: int) -> int:
    """The largest divisor of `batch` up to `wanted`."""
    return next(size for size in range(min(wanted, batch), 0, -1) if batch % size == 0)

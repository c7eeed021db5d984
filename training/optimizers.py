"""Which optimizer a trainer uses: Trainer's own AdamW, or LoGRA made from the `logra` table of the config."""

from typing import Literal

import torch
from torch import nn

from groundhop.config import LograConfig
from groundhop.training.logra.optimizer import Logra
from groundhop.training.logra.settings import LograSettings

Kind = Literal["adamw", "logra"]


def make_optimizer(
    model: nn.Module,
    kind: Kind,
    table: LograConfig,
    *,
    learning_rate: float,
    max_norm: float,
    seed: int,
    exact: bool = False,
) -> Logra | None:
    """None for AdamW, which Trainer makes itself; a LoGRA that clips to `max_norm` otherwise.

    `model` must already lie on its device. `exact` rounds each update to 16-bit integers, which a receiver can repeat bit for bit.
    """
    match kind:
        case "adamw":
            return None
        case "logra":
            return Logra(
                model,
                LograSettings(
                    rank=table.rank,
                    seed=seed,
                    learning_rate=learning_rate,
                    variant=table.variant,
                    max_norm=max_norm,
                    refresh=table.refresh,
                    capture=table.capture,
                    quantise="int16" if exact else "none",
                    others=table.others,
                    others_learning_rate=table.others_learning_rate or learning_rate,
                ),
            )


def trainers_clip(kind: Kind, max_norm: float) -> float:
    """`max_grad_norm` for Trainer: 0 where the optimizer clips, because Trainer sees no gradient of a sketched weight."""
    return 0.0 if kind == "logra" else max_norm


def device() -> torch.device:
    """Where this process trains."""
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")

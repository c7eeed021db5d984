"""Which optimizer a trainer uses: AdamW or LoGRA, with or without a KL budget, made from the config's tables."""

import logging
from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from groundhop.config import LograConfig
from groundhop.errors import NotFiniteError
from groundhop.training.kl.budget import Budget
from groundhop.training.kl.controlled import Controlled
from groundhop.training.logra.optimizer import Logra
from groundhop.training.logra.settings import LograSettings

logger = logging.getLogger(__name__)

Kind = Literal["adamw", "logra"]


class SparingLogra(Logra):
    """A LoGRA for long runs: a step that is not finite is left out and said, and the next one goes on from the same weights.

    Any other reason not to take a step would hold for the next ones too, so it stops the run.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take the step, or none of it."""
        try:
            loss: float | None = super().step(closure)
        except NotFiniteError as error:
            logger.warning("the optimizer took no step: %s", error)
            self.zero_grad()
            return None
        return loss


class SparingControlled(Controlled):
    """A KL control for long runs; see `SparingLogra`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take the step, or none of it; `last` is None then."""
        self.last = None
        try:
            loss: float | None = super().step(closure)
        except NotFiniteError as error:
            logger.warning("the optimizer took no step: %s", error)
            self.zero_grad()
            return None
        return loss


def make_optimizer(
    model: nn.Module,
    kind: Kind,
    table: LograConfig,
    *,
    learning_rate: float,
    max_norm: float,
    seed: int,
    exact: bool = False,
) -> torch.optim.Optimizer:
    """AdamW with the settings of Trainer's own, or a LoGRA that clips to `max_norm`.

    `model` must already lie on its device. `exact` rounds each update to 16-bit integers, which a receiver can repeat bit for bit.
    """
    match kind:
        case "adamw":
            return torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
        case "logra":
            return SparingLogra(
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


def with_budget(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    *,
    budget: float,
    budget_end: float | None,
    updates: int,
    scale_max: float,
    temperature: float,
) -> Controlled:
    """`optimizer`, each step of which is scaled so that the policy moves by at most the budget, as predicted."""
    schedule = Budget(budget, budget if budget_end is None else budget_end, updates)
    return SparingControlled(optimizer, model, schedule, alpha_max=scale_max, temperature=temperature, measure=True)


def trainers_clip(kind: Kind, max_norm: float) -> float:
    """`max_grad_norm` for Trainer: 0 where the optimizer clips, because Trainer sees no gradient of a sketched weight."""
    return 0.0 if kind == "logra" else max_norm


def device() -> torch.device:
    """Where this process trains."""
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")

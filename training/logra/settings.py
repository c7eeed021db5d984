"""What a LoGRA optimizer is set to; the defaults are those of NeMo RL's main LoGRA runs (`nemo_rl/models/automodel/logra.py`)."""

from dataclasses import dataclass
from typing import Literal, get_args

from groundhop.errors import ConfigError
from groundhop.training.logra.memory import TARGETS

Variant = Literal["scaled", "plain"]
Capture = Literal["activation", "gradient"]
Others = Literal["frozen", "adamw"]
Quantise = Literal["none", "int16", "int8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LograSettings:
    """All of an optimizer's settings.

    Raises: ConfigError for a value out of range.
    """

    rank: int = 256
    seed: int = 42
    learning_rate: float = 6e-5
    """With variant "scaled" the size of a step as a share of the target weights' norm; with "plain" AdamW's kind of rate."""
    variant: Variant = "scaled"
    targets: tuple[str, ...] = TARGETS
    """Last parts of the names of the modules whose weights are trained by sketch."""
    weight_decay: float = 0.0
    """Of the targets, decoupled and times the learning rate. A predicted direction leaves it out."""
    beta2: float = 0.95
    eps: float = 1e-8
    """With "scaled" a share of the mean root that is added to each, with "plain" added as it is."""
    max_norm: float | None = 1.0
    """Gradients of targets and others are scaled down together to this norm. None never clips."""
    refresh: int = 1
    """Steps that share a projection; 0 keeps the first one for ever."""
    capture: Capture = "activation"
    """With "gradient" each dense gradient exists for a moment: for modules that are no plain `nn.Linear`."""
    quantise: Quantise = "none"
    """Rounds each update to integers that a receiver can repeat bit for bit, before it is applied."""
    others: Others = "frozen"
    """What happens to all parameters that are no target's weight."""
    others_learning_rate: float = 1e-6
    others_weight_decay: float = 0.0
    """Of the others with two axes or more; biases and norms never decay."""
    others_betas: tuple[float, float] = (0.9, 0.999)
    reduce_others: bool = False
    """Whether the others' gradients are averaged over processes here: only where no DDP or FSDP does it."""

    def __post_init__(self) -> None:
        for name, allowed in (("variant", Variant), ("capture", Capture), ("quantise", Quantise), ("others", Others)):
            if getattr(self, name) not in get_args(allowed):
                raise ConfigError(f"LoGRA's {name} must be one of {get_args(allowed)}, got {getattr(self, name)!r}")
        if not (self.rank >= 1 and self.refresh >= 0 and 0 <= self.beta2 < 1 and self.eps >= 0):
            raise ConfigError(
                "LoGRA needs rank >= 1, refresh >= 0, 0 <= beta2 < 1 and eps >= 0, "
                f"got {self.rank}, {self.refresh}, {self.beta2} and {self.eps}"
            )
        if not self.targets or (self.max_norm is not None and self.max_norm <= 0):
            raise ConfigError(f"LoGRA needs targets and max_norm > 0, got {self.targets} and {self.max_norm}")

    def identity(self) -> dict[str, str | int | float]:
        """What must be the same for a saved state to go on bit for bit; rates, decays and the clip may change."""
        return {
            "rank": self.rank,
            "seed": self.seed,
            "variant": self.variant,
            "beta2": self.beta2,
            "eps": self.eps,
            "refresh": self.refresh,
            "quantise": self.quantise,
            "others": self.others,
        }

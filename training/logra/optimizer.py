"""LoGRA as a plain `torch.optim.Optimizer`, which can also propose a step and take a part of it (docs/logra.md)."""

import math
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from groundhop.errors import ConfigError, GroundhopError, NotFiniteError, StepError
from groundhop.training.kl.direction import Direction, JointDirection, LowRank, LowRankDirection
from groundhop.training.kl.proposal import DenseProposer
from groundhop.training.logra import row_adam
from groundhop.training.logra.capture import Sketches, Target
from groundhop.training.logra.others import adamw_for_others
from groundhop.training.logra.ranks import add_up, average, check_same, norm_squared, rows_of, world_size
from groundhop.training.logra.settings import LograSettings
from groundhop.training.logra.signs import projection_seed
from groundhop.training.logra.write import code, write
from groundhop.training.sketch.quantise import SketchUpdate


class Logra(torch.optim.Optimizer):
    """Trains target weights W by W <- W - U A, where U is made of the sketch S = G Aᵀ, and the other parameters by AdamW or not at all.

    Make it after `fully_shard` when FSDP2 is used. `param_groups[0]` holds the targets, the next ones the others; `lr` of each may be
    scheduled. Gradients in float16 are refused: sketches know of no loss scale. `step` clears the sketches itself.
    """

    def __init__(self, model: nn.Module, settings: LograSettings, group: Any = None) -> None:
        """Install the capture in `model`, whose targets must be float32; `group` is the process group of the data (None: all).

        Raises: ConfigError when a target cannot be trained by sketch.
        """
        self.settings = settings
        self.last_norm = 0.0
        """Norm of the last step's whole gradient before it was clipped."""
        self.last_update: Mapping[str, SketchUpdate] = {}
        """What the last step did to each target's weight, by name; empty unless updates are quantised."""
        self.sketches = Sketches(model, settings.targets, settings.rank, settings.capture)
        self._group = group
        self._model = model
        self._native = adamw_for_others(model, self.sketches.targets, settings)
        self._dense: DenseProposer | None = None
        self._pending: Tensor | None = None
        self._compared = False
        targets: dict[str, Any] = {
            "params": [target.weight for target in self.sketches.targets],
            "weight_decay": settings.weight_decay,
            "updates": 0,
            "row_squares": torch.zeros(
                sum(target.rows for target in self.sketches.targets), device=self.sketches.device
            ),
            "identity": {**settings.identity(), "targets": _digest(self.sketches.targets)},
        }
        super().__init__([targets], {"lr": settings.learning_rate})
        if self._native is not None:
            self.param_groups.extend(self._native.param_groups)
        self._link()
        self._draw()

    @property
    def updates(self) -> int:
        """Steps that the targets have taken."""
        return int(self.param_groups[0]["updates"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take the whole step.

        Raises: StepError when a gradient is not finite; weights and state are then as before.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._prepare()
        updates = self._code(1.0)
        if self._native is not None:
            self._native.step()
        self._finish(1.0, updates)
        return loss

    @torch.no_grad()
    def propose(self) -> Direction:
        """Make the step's direction of what was collected; weights and state stay as they are until `apply`.

        Weight decay of the targets is not part of it. Raises: StepError as `step` does.
        """
        self._prepare()
        parts: dict[str, LowRank] = {}
        if self._pending is not None:
            for target in self.sketches.targets:
                parts |= dict.fromkeys(target.modules, LowRank(factor=target.sketch, projection=target.signs))
        low = LowRankDirection(parts)
        if self._native is None:
            return low
        try:
            self._dense = DenseProposer(self._native, self._model)
            return JointDirection(low, self._dense.propose())
        except BaseException:
            self.abandon()
            raise

    @torch.no_grad()
    def apply(self, alpha: float) -> None:
        """Take `alpha` of the proposed step.

        Raises: StepError when nothing was proposed, or `alpha` is negative or not finite; nothing changes then.
        """
        if not self.sketches.held:
            raise StepError("nothing was proposed: need propose() before apply()")
        if not (math.isfinite(alpha) and alpha >= 0):
            raise StepError(f"need a finite share of the step, at least 0, got {alpha}")
        updates = self._code(alpha)
        dense, self._dense = self._dense, None
        if dense is not None:
            dense.apply(alpha)
        self._finish(alpha, updates)

    def abandon(self) -> None:
        """Drop the proposal and what was collected for it; weights and state are as before."""
        dense, self._dense = self._dense, None
        if dense is not None:
            dense.abandon()
        self._pending = None
        self.sketches.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget what was collected, and the others' gradients. A proposal is dropped."""
        self.abandon()
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The whole state; projections are drawn again from seed and update.

        Raises: StepError between `propose` and `apply`: half a step is no state.
        """
        if self.sketches.held:
            raise StepError("a step is proposed and not applied: need apply or abandon before a checkpoint")
        state: dict[str, Any] = super().state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state, bit for bit.

        Raises: ConfigError when it was made with other settings or for other weights.
        """
        mine, theirs = self.param_groups[0]["identity"], state_dict["param_groups"][0].get("identity", {})
        differing = [f"{key} {theirs.get(key)!r}, not {mine[key]!r}" for key in mine if theirs.get(key) != mine[key]]
        if differing:
            raise ConfigError(f"the optimizer's state was made with other LoGRA settings: {', '.join(differing)}")
        super().load_state_dict(state_dict)
        group = self.param_groups[0]
        group["row_squares"] = group["row_squares"].to(self.sketches.device)
        self._pending = None
        self._link()
        self._draw()

    def close(self) -> None:
        """Take the capture out of the model; weights stay frozen."""
        self.sketches.close()

    def _link(self) -> None:
        # AdamW works on our groups and our state: schedulers, checkpoints and accelerate see one optimizer.
        if self._native is not None:
            self._native.param_groups, self._native.state = self.param_groups[1:], self.state

    def _draw(self) -> None:
        every = self.settings.refresh
        at = self.updates - self.updates % every if every else 0
        names = (target.name for target in self.sketches.targets)
        self.sketches.draw({name: projection_seed(self.settings.seed, at, name) for name in names})

    def _prepare(self) -> None:
        """Turn the sketches in place into factors U, rate and 1 / sqrt(rank) included: the whole step is W - U signs."""
        if self.sketches.held:
            raise StepError("a step is already proposed: need apply or abandon first")
        self._link()
        self.last_update = {}  # a step that is not taken has none
        try:
            self.sketches.check()
            self._compare()
            self._reduce()
            self._pending = self._factors() if self._clip() else None
        except GroundhopError:
            self.sketches.clear()
            raise
        self.sketches.held = True

    def _compare(self) -> None:
        """Once: all processes project alike. The first row of each projection stands for it."""
        if not self._compared:
            drawn = [target.signs[0].cpu().numpy().tobytes() for target in self.sketches.targets]
            identity = repr(sorted(self.param_groups[0]["identity"].items())).encode()
            check_same([identity, *drawn], self._group, self.sketches.device)
            self._compared = True

    def _reduce(self) -> None:
        processes = world_size(self._group)
        if processes == 1:
            return
        add_up(self.sketches.flat, self._group)
        for target in self.sketches.targets:
            # FSDP2 has averaged the gradients whose rows were collected here: each row came once from each set of shards.
            sharers = rows_of(target.weight).group if self.settings.capture == "gradient" else None
            target.sketch.div_(processes if sharers is None else processes // world_size(sharers))
        if self.settings.reduce_others:
            average(self._native_gradients(), self._group)

    def _clip(self) -> bool:
        """Scale all gradients to the largest norm allowed; False when the sketches hold nothing."""
        gradients = list(self._native_gradients())
        targets = self.sketches.targets
        collected = torch.stack([row_adam.gram_norm_squared(target.sketch, target.signs) for target in targets]).sum()
        native = norm_squared(gradients, self.sketches.device)
        anything, norm = float(collected) != 0.0, math.sqrt(float(collected + native))
        if not math.isfinite(norm):
            raise NotFiniteError(f"the gradient's norm is {norm} at update {self.updates}: nothing was changed")
        self.last_norm = norm
        if self.settings.max_norm is not None and norm > self.settings.max_norm:
            scale = self.settings.max_norm / norm
            self.sketches.flat.mul_(scale)
            for gradient in gradients:
                gradient.mul_(scale)
        return anything

    def _factors(self) -> Tensor:
        """The row moments after the step; the sketches become factors."""
        group, settings, targets = self.param_groups[0], self.settings, self.sketches.targets
        squares = group["row_squares"].to(self.sketches.device).clone()
        for target, part in zip(targets, squares.split([target.rows for target in targets]), strict=True):
            part.copy_(row_adam.row_squares(part, target.sketch, settings.beta2))
            root = row_adam.root_of(part, settings.beta2, self.updates + 1)
            turn = row_adam.rescale_ if settings.variant == "scaled" else row_adam.divide_
            turn(target.sketch, root, settings.eps)
        rate = float(group["lr"])
        if settings.variant == "scaled":
            weights = norm_squared((target.weight for target in targets), self.sketches.device)
            moved = torch.stack([row_adam.gram_norm_squared(target.sketch, target.signs) for target in targets]).sum()
            rate *= math.sqrt(float(weights / moved))
        if not math.isfinite(rate):
            raise NotFiniteError(f"the step's size is {rate} at update {self.updates}: nothing was changed")
        self.sketches.flat.mul_(rate * settings.rank**-0.5)
        return squares

    def _code(self, alpha: float) -> dict[str, SketchUpdate]:
        """All updates as integers; a factor that cannot be coded drops the step before anything is written."""
        if self._pending is None or self.settings.quantise == "none":
            return {}
        bits: Literal[8, 16] = 8 if self.settings.quantise == "int8" else 16
        try:
            return code(self.sketches, alpha, self._decay(alpha), bits)
        except GroundhopError:
            self.abandon()
            raise

    def _decay(self, alpha: float) -> float:
        group = self.param_groups[0]
        return float(np.float32(1.0 - alpha * float(group["lr"]) * float(group["weight_decay"])))

    def _finish(self, alpha: float, updates: Mapping[str, SketchUpdate]) -> None:
        """Write the step into the weights, as integers where there are some, and make ready for the next one."""
        self.last_update = updates
        if self._pending is not None:
            write(self.sketches, alpha, self._decay(alpha), updates)
            self.param_groups[0]["row_squares"] = self._pending
            self.param_groups[0]["updates"] += 1
        self._pending = None
        self._draw()

    def _native_gradients(self) -> Iterator[Tensor]:
        for group in self.param_groups[1:]:
            for weight in group["params"]:
                if weight.grad is not None:
                    yield weight.grad


def _digest(targets: list[Target]) -> str:
    shapes = "\n".join(f"{target.name} {target.rows} {target.columns}" for target in targets)
    return blake2b(shapes.encode(), digest_size=8).hexdigest()

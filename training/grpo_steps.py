"""What one optimizer step of GRPO did, as a record, as metrics and as a line for people."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from groundhop.records import GrpoStep
from groundhop.training.collect import Collected
from groundhop.training.hotload.refit import RefitResult
from groundhop.training.kl.controlled import Controlled, StepControl
from groundhop.training.logra.optimizer import Logra
from groundhop.training.policy_trainer import StepStatistics
from groundhop.training.sketch.refit import Traffic


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
    made = inside(optimizer)
    return {**logs, "grad_norm": made.last_norm} if isinstance(made, Logra) else logs


def sketching(optimizer: torch.optim.Optimizer) -> Logra:
    """The LoGRA that the trainer uses, with or without a KL control around it."""
    made = inside(optimizer)
    assert isinstance(made, Logra)  # the config allows sketches with LoGRA only
    return made


def inside(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that a KL control wraps, or the one given."""
    return optimizer.wrapped if isinstance(optimizer, Controlled) else optimizer


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


def summary_of(rows: Sequence[GrpoStep]) -> dict[str, Any]:
    """The stage's summary."""
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


def step_line(row: GrpoStep) -> str:
    """A finished step for people."""
    scale = "" if row.step_scale is None else f"  {row.step_scale:.2f} of the step, KL {row.kl_realised or 0.0:.1e}"
    return (
        f"reward {_short(row.reward_mean)}  loss {_short(row.loss)}  |log ratio| {_short(row.log_ratio_abs_mean)}{scale}  "
        f"version {row.version}  {row.rollout_s:.0f} s sampling, {row.train_s:.0f} s training"
    )


def sampled_line(collected: Collected) -> str:
    """A step's rollouts for people."""
    marks = Counter(one.mark for one in collected.tries)
    counts = "  ".join(f"{mark} {count}" for mark, count in sorted(marks.items()))
    return f"{len(collected.trained)} of {len(collected.groups)} groups have a signal  {counts}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _short(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"

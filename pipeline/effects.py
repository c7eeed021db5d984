"""Read what training changed: the evaluation's numbers and the training curves, for the report and the notebook."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groundhop.pipeline import findings
from groundhop.pipeline.plots import Curve, Estimate

SFT_PANELS: tuple[tuple[str, Mapping[str, str], bool], ...] = (
    ("loss, nats a token", {"loss": "sft/loss"}, True),
    ("norm of the gradient", {"norm": "sft/grad_norm"}, True),
    ("tokens a second", {"tokens": "sft/tokens_per_s"}, True),
)
GRPO_PANELS: tuple[tuple[str, Mapping[str, str], bool], ...] = (
    ("mean reward", {"reward": "reward_mean"}, True),
    ("tool calls a rollout", {"calls": "calls_mean"}, True),
    (
        "groups of a step",
        {"trained": "groups", "all right": "all_right", "all wrong": "all_wrong", "lost": "groups_lost"},
        True,
    ),
    ("|log p trainer - log p server|", {"mean": "log_ratio_abs_mean"}, True),
    ("entropy, nats a token", {"entropy": "entropy"}, True),
    ("norm of the gradient", {"norm": "grad_norm"}, True),
    (
        "KL of a step, nats a token",
        {"budget": "kl_budget", "as predicted, whole": "kl_predicted", "as taken": "kl_realised"},
        True,
    ),
    ("share of a step that was taken", {"share": "step_scale"}, True),
    ("weights changed, % of all", {"changed": "changed_percent"}, True),
    ("bytes to the servers, MB", {"delta": "megabytes", "to the site, sketches": "site_megabytes"}, True),
    ("seconds", {"rollouts": "rollout_s", "training": "train_s", "refit": "refit_s"}, True),
)
"""Title, legend name -> column, whether the axis starts at zero. A panel without any of its columns is left out."""


@dataclass(frozen=True, slots=True)
class Score:
    """One policy on the held-out questions."""

    policy: str
    questions: int
    tries: int
    judged: int
    right: int
    accuracy: Estimate | None
    worst: float | None
    """Accuracy if each try without a verdict were wrong."""
    best: float | None
    """Accuracy if each were right."""
    calls: Estimate | None
    """Tool calls of a try that infrastructure did not fail."""
    censored: Estimate | None
    """Share of tries that a budget ended, which cuts off their calls."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two policies on the same questions; differences and ratios are of the later to the earlier.

    A question counts as solved when at least half of its judged tries were right (`pipeline.scores`).
    """

    name: str
    difference: Estimate | None
    p: float | None
    test: str
    gained: int | None
    lost: int | None
    ratio: Estimate | None
    """Tool calls a try."""
    ratio_both: Estimate | None
    """The same where both solved the question."""
    ratio_other: Estimate | None
    """Where one solved it and the other did not."""
    ratio_neither: Estimate | None
    solved: tuple[int, int, int]
    """Questions that both, one and neither solved."""


def scores(folder: Path) -> list[Score]:
    """The policies of an evaluation's folder, in the order of training; none before it ran."""
    found = findings.load(folder / "summary.json").get("policies", {})
    return [_score(policy, row) for policy, row in found.items()]


def comparisons(folder: Path) -> list[Comparison]:
    """The paired comparisons of an evaluation's folder."""
    return [_comparison(row) for row in findings.load(folder / "summary.json").get("comparisons", [])]


def stops(folder: Path) -> dict[str, dict[str, int]]:
    """How the tries of each policy ended."""
    found = findings.load(folder / "summary.json").get("policies", {})
    return {policy: row.get("stops", {}) for policy, row in found.items()}


def other_sets(root: Path) -> dict[str, list[Score]]:
    """Evaluations on question sets that were given as files, by name."""
    found = {folder.name.removeprefix("evaluate-"): scores(folder) for folder in sorted(root.glob("evaluate-*"))}
    return {name: given for name, given in found.items() if given}


def sft_curves(root: Path) -> list[Curve]:
    """Loss and speed of SFT by optimizer step."""
    return curves(findings.rows(root / "sft" / "metrics.jsonl"), SFT_PANELS)


def grpo_curves(root: Path) -> list[Curve]:
    """What GRPO did by optimizer step (`records.GrpoStep`)."""
    steps = findings.rows(root / "grpo" / "steps.jsonl")
    more = [
        {
            "changed_percent": 100 * row["changed"] / max(1, row["total"]),
            "megabytes": row["bytes"] / 1e6,
            **_to_site(row),
        }
        for row in steps
    ]
    return curves([row | extra for row, extra in zip(steps, more, strict=True)], GRPO_PANELS)


def curves(rows: Sequence[Mapping[str, Any]], panels: Sequence[tuple[str, Mapping[str, str], bool]]) -> list[Curve]:
    """The panels that these rows hold values for. A row written again for the same step replaces the earlier one."""
    by_step = {row["step"]: row for row in rows if isinstance(row.get("step"), int | float)}
    ordered = [by_step[step] for step in sorted(by_step)]
    found = []
    for title, columns, zero in panels:
        lines = {name: [_float(row.get(column)) for row in ordered] for name, column in columns.items()}
        lines = {name: values for name, values in lines.items() if any(value is not None for value in values)}
        if lines:
            found.append(Curve(title, sorted(by_step), lines, zero))
    return found


def _score(policy: str, row: Mapping[str, Any]) -> Score:
    return Score(
        policy=policy,
        questions=row["questions"],
        tries=row["tries"],
        judged=row["judged"],
        right=row["right"],
        accuracy=_estimate("accuracy", row.get("accuracy")),
        worst=row.get("worst"),
        best=row.get("best"),
        calls=_estimate("calls", row.get("calls")),
        censored=_estimate("cut by a budget", row.get("censored")),
    )


def _comparison(row: Mapping[str, Any]) -> Comparison:
    return Comparison(
        name=row["name"],
        difference=_estimate("difference", row.get("difference")),
        p=row.get("p"),
        test=row.get("test", ""),
        gained=row.get("gained"),
        lost=row.get("lost"),
        ratio=_estimate("ratio", row.get("ratio")),
        ratio_both=_estimate("ratio", row.get("ratio_both")),
        ratio_other=_estimate("ratio", row.get("ratio_other")),
        ratio_neither=_estimate("ratio", row.get("ratio_neither")),
        solved=(row.get("both_solved", 0), row.get("one_solved", 0), row.get("neither_solved", 0)),
    )


def _estimate(name: str, row: Mapping[str, Any] | None) -> Estimate | None:
    return None if row is None else Estimate(name, row["value"], row.get("low"), row.get("high"))


def _float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _to_site(row: Mapping[str, Any]) -> dict[str, float]:
    sent = row.get("site_bytes")
    return {} if sent is None else {"site_megabytes": sent / 1e6}

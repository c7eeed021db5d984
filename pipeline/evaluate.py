"""Compare policies on questions that none of them was trained on, with the agent loop that everything else uses."""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from groundhop import jsonl
from groundhop.config import EvaluateConfig
from groundhop.judges.protocol import Judge
from groundhop.pipeline.journal import Pair
from groundhop.pipeline.rollouts import Collector, Solver
from groundhop.pipeline.score_table import table
from groundhop.pipeline.scores import PolicyScores, comparisons, policy_summary
from groundhop.records import Question, Rollout, Verdict
from groundhop.runs import StageFolder

logger = logging.getLogger(__name__)

Opener = Callable[[str], AbstractContextManager[Solver]]
"""Serves a policy by its name while the context is open: `with opener("sft") as solver`."""


def run(
    *,
    config: EvaluateConfig,
    questions: Sequence[Question],
    opener: Opener,
    judge: Judge,
    concurrency: int,
    seed: int,
    folder: StageFolder,
    secret: bool = False,
    source: Mapping[str, Any] | None = None,
    bad: Sequence[tuple[str, str, str]] = (),
) -> None:
    """Write `<policy>/rollouts.jsonl`, `<policy>/verdicts.jsonl` and `summary.json`.

    A policy is only served where something is missing. `secret` keeps all text of questions, answers and conversations out of
    every file; `source` says where the questions come from; `bad` are rows of it that cannot be asked.
    """
    if folder.done:
        return
    asked = sorted(questions, key=lambda question: question.id)[: config.limit]
    lost = list(bad)
    for policy in config.policies:
        collector = Collector(
            folder.path / policy,
            policy=policy,
            seed=seed,
            repeats=config.repeats,
            questions=asked,
            judge=judge,
            concurrency=concurrency,
            redact=secret,
        )
        if collector.missing():
            with opener(policy) as solver:
                tally = asyncio.run(collector.collect(solver))
        else:
            tally = collector.settle()
            lost += [(f"{policy}/{item}", reason, "" if secret else detail) for item, reason, detail in tally.lost]
    summary = summarise(folder.path, config.policies, seed=seed, draws=config.bootstrap)
    summary |= {"source": {"questions": len(asked), "unreadable_rows": len(bad), **(source or {})}, "seed": seed}
    _write(folder.path / "summary.json", summary)
    folder.fail_all(lost)
    logger.info("evaluation\n%s", table(summary))
    folder.finish({"questions": len(asked), "repeats": config.repeats, **_headline(summary)})


def summarise(folder: Path, policies: Sequence[str], *, seed: int, draws: int) -> dict[str, Any]:
    """The numbers of all policies whose records lie in `folder`, computed from the records alone."""
    scores = {policy: score_folder(folder / policy) for policy in policies if (folder / policy).exists()}
    return {
        "policies": {policy: policy_summary(found, seed=seed, draws=draws) for policy, found in scores.items()},
        "comparisons": comparisons(scores, seed=seed, draws=draws),
    }


def score_folder(folder: Path) -> PolicyScores:
    """Count the judged rollouts of one folder."""
    verdicts = {Pair(v.question_id, v.repeat): v for v in jsonl.read(folder / "verdicts.jsonl", Verdict)}
    scores = PolicyScores()
    for rollout in jsonl.read(folder / "rollouts.jsonl", Rollout):
        verdict = verdicts.get(Pair(rollout.question_id, rollout.repeat))
        if verdict is not None:
            scores.add(rollout, verdict)
    return scores


def _headline(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {
        policy: {"accuracy": row["accuracy"], "calls": row["calls"], "judged": row["judged"]}
        for policy, row in summary["policies"].items()
    }


def _write(path: Path, value: Mapping[str, Any]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")
    temporary.replace(path)

"""Sort questions by how many of their rollouts were right; write the SFT traces and GRPO tasks that follow from it."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from groundhop import jsonl
from groundhop.agents.loop import Tools
from groundhop.config import BucketsConfig
from groundhop.pipeline.pass_rate import count_all
from groundhop.pipeline.tables import Provenance, write_tables
from groundhop.pipeline.traces import PathFailure, construction_traces, rollout_traces, tasks
from groundhop.records import Bucketed, Question, Rollout, Task, Trace, Verdict
from groundhop.runs import StageFolder


class _Licence(msgspec.Struct):
    """What is read of a page."""

    key: str
    licence: str | None = None


def run(
    *,
    config: BucketsConfig,
    questions: Sequence[Question],
    rollouts: StageFolder,
    tools: Tools,
    policy: str,
    seed: int,
    folder: StageFolder,
    pages: Path | None = None,
    prompt: Path | None = None,
) -> None:
    """Write `buckets.jsonl`, `traces.jsonl`, `tasks.jsonl` and `parquet/`.

    `rollouts` is the finished folder of the policy's rollouts, `pages` the file whose licences the card names, `prompt` the
    system prompt's file where it is not the project's own.
    """
    asyncio.run(
        run_with(
            config=config,
            questions=questions,
            rollouts=rollouts,
            tools=tools,
            policy=policy,
            seed=seed,
            folder=folder,
            pages=pages,
            prompt=prompt,
        )
    )


async def run_with(
    *,
    config: BucketsConfig,
    questions: Sequence[Question],
    rollouts: StageFolder,
    tools: Tools,
    policy: str,
    seed: int,
    folder: StageFolder,
    pages: Path | None = None,
    prompt: Path | None = None,
) -> None:
    """As `run`, inside a running event loop."""
    if folder.done:
        return
    verdicts = list(jsonl.read(rollouts.output("verdicts.jsonl"), Verdict))
    train = [question for question in questions if question.split == "train"]
    rows = [row for row in count_all(verdicts, config.min_judged) if row.policy == policy]
    made, failures = await construction_traces(train, tools, prompt) if config.construction else ([], [])
    made += rollout_traces(
        jsonl.read(rollouts.output("rollouts.jsonl"), Rollout),
        verdicts,
        train,
        rows,
        trainable=config.trainable,
        per_question=config.traces_per_question,
    )
    chosen = tasks(train, rows, config.trainable)
    repeats = 1 + max((verdict.repeat for verdict in verdicts), default=-1)
    provenance = Provenance(policy, repeats, seed, config.min_judged, licences(train, pages))
    _write(folder, rows, made, chosen)
    write_tables(
        folder.path / "parquet",
        questions=train,
        buckets=rows,
        traces=made,
        tasks=chosen,
        prompt=prompt,
        provenance=provenance,
    )
    folder.fail_all(_reasons(rows, failures))
    folder.finish(_summary(rows, made, chosen))


def licences(questions: Iterable[Question], pages: Path | None) -> Counter[str]:
    """How many of the pages that these questions stand on are under which licence."""
    used = {hop.seed for q in questions for hop in q.hops} | {hop.target for q in questions for hop in q.hops}
    used |= {evidence.page for q in questions for evidence in q.evidence}
    if pages is None or not used:
        return Counter()
    return Counter(page.licence or "unknown" for page in jsonl.read(pages, _Licence) if page.key in used)


def _write(folder: StageFolder, rows: list[Bucketed], made: list[Trace], chosen: list[Task]) -> None:
    jsonl.write(folder.path / "buckets.jsonl", rows)
    jsonl.write(folder.path / "traces.jsonl", made)
    jsonl.write(folder.path / "tasks.jsonl", chosen)


def _reasons(rows: Iterable[Bucketed], failures: Iterable[PathFailure]) -> list[tuple[str, str, str]]:
    few = [
        (row.question_id, "too_few_judged", f"{row.judged} judged, {row.errors} without a verdict")
        for row in rows
        if row.bucket is None
    ]
    return few + [(failure.question_id, failure.reason, failure.detail) for failure in failures]


def _summary(rows: Sequence[Bucketed], made: Sequence[Trace], chosen: Sequence[Task]) -> dict[str, object]:
    return {
        "questions": len(rows),
        "buckets": dict(sorted(Counter(row.bucket or "none" for row in rows).items())),
        "traces": len(made),
        "origins": dict(sorted(Counter(trace.origin for trace in made).items())),
        "tasks": len(chosen),
    }

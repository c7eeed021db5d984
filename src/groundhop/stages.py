"""Wire the stages together: which config each depends on, which folders it reads, which servers it needs."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from groundhop import jsonl
from groundhop.errors import ConfigError
from groundhop.records import Question, Rollout, Task, Verdict
from groundhop.runs import Run, StageFolder

if TYPE_CHECKING:
    from groundhop.agents.loop import Budget
    from groundhop.agents.tools import Toolbox
    from groundhop.hosting import PolicyHost

logger = logging.getLogger(__name__)

ORDER = (
    "pages",
    "graph",
    "questions",
    "rollouts-base",
    "buckets-base",
    "sft",
    "rollouts-sft",
    "buckets-sft",
    "grpo",
    "evaluate",
)
"""Stages of `groundhop run`. The buckets that feed GRPO are measured with the policy that GRPO starts from."""

AGENT_KEYS = ("seed", "search", "model", "agent", "judge", "serve.max_model_len")
"""What every rollout depends on, whatever it is for."""


def run_all(run: Run) -> None:
    """Run every stage in order; those whose output is complete are skipped. Ends with the report."""
    from groundhop.hosting import PolicyHost

    with PolicyHost(run) as host:
        for stage in ORDER:
            _timed(run, stage, host)
    write_report(run)


def run_stage(run: Run, stage: str, policy: str | None, questions: str | None) -> str:
    """Run one stage and say what came out. `policy` chooses whose rollouts or buckets; `questions` is for evaluate."""
    from groundhop.hosting import PolicyHost

    if stage == "report":
        write_report(run)
        return f"{run.root / 'report.html'}"
    if questions is not None and stage != "evaluate":
        raise ConfigError(f"--questions goes with evaluate, not with {stage}")
    with PolicyHost(run) as host:
        if questions is not None:
            return evaluate_file(run, host, questions, policy)
        name = f"{stage}-{policy or 'base'}" if stage in {"rollouts", "buckets"} else stage
        if name not in ORDER:
            raise ConfigError(f"there is no stage {name}: rollouts and buckets are of the policies base and sft")
        folder = _timed(run, name, host)
    return "\n".join(f"{key}: {value}" for key, value in folder.summary().items())


def _timed(run: Run, stage: str, host: "PolicyHost") -> StageFolder:
    """Open the stage's folder, do the work unless it is done, enter it into the manifest."""
    folder = run.open(stage, *_dependencies(stage))
    if folder.done:
        if not run.is_stamped(stage):  # killed between the stage's end and its entry
            run.stamp(stage, {"summary": folder.summary()})
        logger.info("%s: done before", stage)
        return folder
    logger.info("%s: begins", stage)
    start = time.monotonic()
    _STAGES[stage.split("-")[0]](run, folder, host)
    seconds = time.monotonic() - start
    folder.log_metrics({"stage/seconds": round(seconds, 1)})
    run.stamp(stage, {"summary": folder.summary(), "seconds": round(seconds, 1)})
    logger.info("%s: done in %.0f s", stage, seconds)
    return folder


def _dependencies(stage: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Config keys, and stages whose output is read."""
    match stage:
        case "pages":
            return ("pages", "search.passage_words"), ()
        case "graph":
            return ("seed", "graph"), ("pages",)
        case "questions":
            return ("seed", "questions", "search", "model"), ("graph",)
        case "rollouts-base":
            return (*AGENT_KEYS, "rollouts.repeats", "rollouts.base_limit"), ("questions",)
        case "rollouts-sft":
            return (*AGENT_KEYS, "rollouts.repeats", "rollouts.limit"), ("questions", "sft")
        case "buckets-base" | "buckets-sft":
            return ("seed", "buckets", "agent.prompt"), (stage.replace("buckets", "rollouts"),)
        case "sft":
            return ("seed", "sft", "model"), ("buckets-base",)
        case "grpo":
            return (*AGENT_KEYS, "grpo"), ("sft", "buckets-sft")
        case "evaluate":
            return (*AGENT_KEYS, "evaluate"), ("questions", "sft", "grpo")
    raise ConfigError(f"there is no stage {stage}")


def _pages(run: Run, folder: StageFolder, host: "PolicyHost") -> None:
    from groundhop.pipeline import pages

    pages.run(run.config.pages, folder, seed=run.config.seed)
    host.index()


def _graph(run: Run, folder: StageFolder, host: "PolicyHost") -> None:
    from groundhop.pipeline import graph

    graph.run(config=run.config.graph, pages=_page_file(run), folder=folder, seed=run.config.seed)


def _questions(run: Run, folder: StageFolder, host: "PolicyHost") -> None:
    from groundhop.pipeline import questions

    questions.run(
        config=run.config.questions,
        search=run.config.search,
        hops=run.look("graph").output("hops.jsonl"),
        pages=_page_file(run),
        index=host.index(),
        folder=folder,
        seed=run.config.seed,
        count_tokens=host.count_tokens(),
    )


def _rollouts(run: Run, folder: StageFolder, host: "PolicyHost") -> None:
    from groundhop.judges.make import make_judge
    from groundhop.pipeline import rollouts

    policy = folder.name.split("-")[1]
    table = run.config.rollouts
    asked = _questions_of(run, "train")[: table.base_limit if policy == "base" else table.limit]
    if not asked:
        # Nothing to try needs no server: `rollouts.base_limit = 0` skips the untrained policy.
        for name in ("rollouts.jsonl", "verdicts.jsonl"):
            jsonl.write(folder.path / name, ())
        folder.finish({"questions": 0, "rollouts": 0})
        return
    rollouts.run(
        questions=asked,
        model=host.model(policy, run.config.agent.temperature, run.config.agent.top_p),
        toolbox=host.toolbox(),
        budget=budget(run),
        judge=make_judge(run.config.judge),
        policy=policy,
        repeats=table.repeats,
        concurrency=run.config.agent.concurrency,
        seed=run.config.seed,
        folder=folder,
        prompt=run.config.agent.prompt,
    )


def _buckets(run: Run, folder: StageFolder, host: "PolicyHost") -> None:
    from groundhop.pipeline import buckets

    policy = folder.name.split("-")[1]
    buckets.run(
        config=run.config.buckets,
        questions=_questions_of(run),
        rollouts=run.look(f"rollouts-{policy}"),
        tools=host.toolbox(),
        policy=policy,
        seed=run.config.seed,
        folder=folder,
        pages=_page_file(run),
        prompt=run.config.agent.prompt,
    )


def _sft(run: Run, folder: StageFolder, host: "PolicyHost") -> None:
    from groundhop.training import sft
    from groundhop.training.allocator import give_back_freed_memory

    traces = run.look("buckets-base").output("traces.jsonl")
    sft.run(config=run.config.sft, traces=[traces], model=host.base_folder(), folder=folder, seed=run.config.seed)
    give_back_freed_memory()


def _grpo(run: Run, folder: StageFolder, host: "PolicyHost") -> None:
    from groundhop.training import grpo
    from groundhop.training.allocator import give_back_freed_memory

    tasks = list(jsonl.read(run.look("buckets-sft").output("tasks.jsonl"), Task))
    grpo.run(
        config=run.config.grpo,
        tasks=tasks,
        model=host.folder_of("sft"),
        folder=folder,
        seed=run.config.seed,
        solve=make_solve(run, host),
        refitter=host.refitter("sft", folder.path / "refits"),
        concurrency=run.config.agent.concurrency,
    )
    host.forget_weights()
    give_back_freed_memory()


def _evaluate(run: Run, folder: StageFolder, host: "PolicyHost") -> None:
    _compare(
        run, host, folder, _questions_of(run, "heldout")[: run.config.evaluate.limit], run.config.evaluate.policies
    )


_STAGES: dict[str, Callable[[Run, StageFolder, Any], None]] = {
    "pages": _pages,
    "graph": _graph,
    "questions": _questions,
    "rollouts": _rollouts,
    "buckets": _buckets,
    "sft": _sft,
    "grpo": _grpo,
    "evaluate": _evaluate,
}


def evaluate_file(run: Run, host: "PolicyHost", source: str, policy: str | None) -> str:
    """Ask the questions of a file or address, in a folder of their own under `evaluate-<name>`; returns the table."""
    from groundhop.pipeline.question_files import read_questions
    from groundhop.pipeline.score_table import table

    found = read_questions(source)
    policies = (policy,) if policy else tuple(p for p in run.config.evaluate.policies if host.has(p))
    name = f"evaluate-{found.name}"
    folder = run.open(name, (*AGENT_KEYS, "evaluate"), facts={"digest of the questions": found.digest})
    origin = {"name": found.name, "digest": found.digest}
    _compare(run, host, folder, found.questions, policies, secret=found.secret, source=origin, bad=found.bad)
    run.stamp(name, {"summary": folder.summary(), "source": origin})
    return table(json.loads((folder.path / "summary.json").read_text()))


def _compare(
    run: Run, host: "PolicyHost", folder: StageFolder, asked: Sequence[Question], policies: Sequence[str], **given: Any
) -> None:
    from groundhop.judges.make import make_judge
    from groundhop.pipeline import evaluate
    from groundhop.pipeline.rollouts import Solver, make_solver

    @contextlib.contextmanager
    def opener(policy: str) -> Iterator[Solver]:
        model = host.model(policy, run.config.evaluate.temperature, run.config.agent.top_p)
        toolbox = host.toolbox(keep=not given.get("secret", False))
        yield make_solver(
            model=model, toolbox=toolbox, budget=budget(run), policy=policy, prompt=run.config.agent.prompt
        )

    evaluate.run(
        config=msgspec.structs.replace(run.config.evaluate, policies=tuple(policies)),
        questions=asked,
        opener=opener,
        judge=make_judge(run.config.judge),
        concurrency=run.config.agent.concurrency,
        seed=run.config.seed,
        folder=folder,
        **given,
    )


def make_solve(run: Run, host: "PolicyHost") -> Any:
    """The callable that GRPO samples with: our agent loop against the live servers, then the judge."""
    from groundhop.agents.loop import solve
    from groundhop.judges.make import make_judge

    model = host.model("sft", run.config.grpo.temperature, run.config.agent.top_p)
    toolbox, judge, limits = host.toolbox(), make_judge(run.config.judge), budget(run)

    async def one(task: Task, *, repeat: int, seed: int, step: int, policy: str) -> tuple[Rollout, Verdict]:
        rollout = await solve(
            task.question,
            model=model,
            toolbox=toolbox,
            budget=limits,
            seed=seed,
            question_id=task.id,
            repeat=repeat,
            policy=policy,
            forbidden=task.forbidden,
            prompt=run.config.agent.prompt,
        )
        return rollout, await judge(rollout, task)

    return one


def write_report(run: Run) -> None:
    """Write `report.html` from what is on disk."""
    from groundhop.pipeline import report

    report.run(run.root, run.root / "report.html")


def serve(run: Run, policy: str) -> None:
    """Start the replicas of a policy and keep them until Ctrl-C."""
    from groundhop.hosting import PolicyHost
    from groundhop.serve import serve_until_interrupted

    with PolicyHost(run) as host:
        serve_until_interrupted(host.folder_of(policy), run.config.serve, run.root / "logs")


def search(run: Run, words: Sequence[str], url: str | None) -> str:
    """What the agent would see for a query, or on a page when `url` is given (the words are then `find`)."""
    from groundhop.hosting import PolicyHost

    query = " ".join(words)
    name, arguments = ("visit", {"url": url, "find": query}) if url else ("search", {"queries": [query]})
    with PolicyHost(run) as host:
        return asyncio.run(_call_once(host.toolbox(), name, arguments))


async def _call_once(toolbox: "Toolbox", name: str, arguments: dict[str, Any]) -> str:
    try:
        return (await toolbox.call(name, arguments)).text
    finally:
        await toolbox.close()


def budget(run: Run) -> "Budget":
    """The limits of one rollout."""
    from groundhop.agents.loop import Budget

    table = run.config.agent
    return Budget(
        max_turns=table.max_turns,
        max_tokens=table.max_tokens,
        turn_tokens=table.turn_tokens,
        max_time_s=table.max_time_s,
    )


def _page_file(run: Run) -> Path:
    return run.look("pages").output("pages.jsonl.zst")


def _questions_of(run: Run, split: str | None = None) -> list[Question]:
    rows = jsonl.read(run.look("questions").output("questions.jsonl"), Question)
    return [row for row in rows if split is None or row.split == split]

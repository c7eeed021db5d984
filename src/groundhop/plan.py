"""What a run would do: stages with their state, counts, time and cost, before anything is done."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from groundhop.config import RunConfig
from groundhop.runs import Run

# Rough rates of two CPU cores with SmolLM2-135M, read off demo runs (docs/results.md). They only feed the plan.
PAGES_PER_S = 60.0
HOPS_PER_S = 20.0
ROLLOUTS_PER_S = 0.7
TRACES_PER_S = 0.2
TRAINED_ROLLOUTS_PER_S = 0.45
SERVER_START_S = 30.0
SEARCH_DOLLARS = 5.0 / 1000
"""You.com's list price of one search (search-agents survey); a page view costs a fifth."""
CALLS_PER_ROLLOUT = 3.0


class Step(NamedTuple):
    """One line of the plan."""

    stage: str
    work: str
    seconds: float | None
    """None where nothing on disk tells how much work there is."""
    dollars: float = 0.0


def plan(run: Run, only: str | None = None) -> str:
    """The plan as text, one line a stage."""
    lines = [f"run {run.config.name} in {run.root}, model {run.config.model.name}, seed {run.config.seed}"]
    total, dollars, unknown = 0.0, 0.0, 0
    for step in _steps(run):
        if only and not step.stage.startswith(only):
            continue
        done = run.look(step.stage).done if (run.root / step.stage).exists() else False
        state = "done" if done else "begun" if (run.root / step.stage / "config.json").exists() else "to do"
        lines.append(f"  {step.stage:<14} {state:<6} {step.work:<62} {_time(step.seconds):>8}  {_money(step.dollars)}")
        if not done:
            total, dollars, unknown = (
                total + (step.seconds or 0.0),
                dollars + step.dollars,
                unknown + (step.seconds is None),
            )
    tail = f" + {unknown} stage(s) that nothing on disk can size yet" if unknown else ""
    lines.append(
        f"left: about {_time(total)}{tail}, {_money(dollars) or 'nothing to pay'}; times are rough, from two CPU cores with SmolLM2-135M"
    )
    return "\n".join(lines)


def _steps(run: Run) -> Iterator[Step]:
    config, root = run.config, run.root
    pages = _count(root / "pages" / "pages.jsonl.zst", run, "pages", "pages") or _source_size(config)
    questions = _summary(run, "questions")
    train, heldout = int(questions.get("train", 0)) or None, int(questions.get("heldout", 0)) or None
    yield Step("pages", f"import {_n(pages)} pages from {_sources(config)}", pages / PAGES_PER_S if pages else None)
    yield Step(
        "graph",
        f"rank {_n(pages)} pages, band {config.graph.band[0]:.0%} to {config.graph.band[1]:.0%}",
        pages / 400 if pages else None,
    )
    yield Step(
        "questions",
        f"{config.questions.writer} writer over the band's hops, admission on the index",
        pages / HOPS_PER_S if pages else None,
    )
    for policy, limit in (("base", config.rollouts.base_limit), ("sft", config.rollouts.limit)):
        asked = min(train, limit) if train is not None else limit if limit < 1_000_000 else None
        yield _rollouts(config, f"rollouts-{policy}", asked, config.rollouts.repeats, "training questions")
        yield Step(f"buckets-{policy}", "counts to buckets, traces, tasks, Parquet with a card", 5.0)
        if policy == "base":
            yield Step(
                "sft",
                f"{config.sft.epochs:g} epoch(s) over {_n(train)} construction traces and right rollouts",
                _sft_reads(config, train) / TRACES_PER_S if train or config.sft.max_steps > 0 else None,
            )
    trained = config.grpo.steps * config.grpo.prompts * config.grpo.group
    seconds = trained / TRAINED_ROLLOUTS_PER_S + 2 * trained / ROLLOUTS_PER_S
    cost = trained * 2 * CALLS_PER_ROLLOUT * SEARCH_DOLLARS if config.search.provider == "you" else 0.0
    yield Step(
        "grpo",
        f"{config.grpo.steps} steps x {config.grpo.prompts} groups x {config.grpo.group} rollouts, refit after each",
        seconds,
        cost,
    )
    asked = (
        min(heldout, config.evaluate.limit)
        if heldout is not None
        else config.evaluate.limit
        if config.evaluate.limit < 1_000_000
        else None
    )
    yield _rollouts(
        config, "evaluate", asked, config.evaluate.repeats * len(config.evaluate.policies), "held-out questions"
    )


def _sft_reads(config: RunConfig, train: int | None) -> float:
    """How many traces SFT reads, each epoch counted."""
    most = config.sft.max_steps * config.sft.batch if config.sft.max_steps > 0 else float("inf")
    return min((train or most) * config.sft.epochs, most)


def _rollouts(config: RunConfig, stage: str, questions: int | None, repeats: int, what: str) -> Step:
    if questions is None:
        return Step(stage, f"{repeats} rollouts for each of the {what}", None)
    count = questions * repeats
    dollars = count * CALLS_PER_ROLLOUT * SEARCH_DOLLARS if config.search.provider == "you" else 0.0
    return Step(
        stage,
        f"{count} rollouts: {questions} {what} x {repeats}",
        count / ROLLOUTS_PER_S + (SERVER_START_S if count else 0.0),
        dollars,
    )


def _summary(run: Run, stage: str) -> dict[str, int]:
    return run.look(stage).summary() if (run.root / stage / "done.json").exists() else {}


def _count(path: Path, run: Run, stage: str, key: str) -> int | None:
    return int(_summary(run, stage).get(key, 0)) or None if path.exists() else None


def _source_size(config: RunConfig) -> int | None:
    """Pages that the sources probably hold: about 2.6 kB of packed HTML each; a crawl fetches at most its limit."""
    files = [path for path in (*config.pages.warc, *config.pages.jsonl) if path.exists()]
    size = sum(path.stat().st_size for path in files) // 2600
    return (size + (config.pages.crawl_pages if config.pages.crawl else 0)) or None


def _sources(config: RunConfig) -> str:
    sources = [str(path) for path in (*config.pages.warc, *config.pages.jsonl)] + list(config.pages.crawl)
    return ", ".join(sources) or "nowhere: set pages.warc, pages.jsonl or pages.crawl"


def _n(count: int | None) -> str:
    return "the" if count is None else f"about {count}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )


def _money(dollars: float) -> str:
    return f"${dollars:,.2f}" if dollars else ""

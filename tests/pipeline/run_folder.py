"""Builds a small run folder by hand, with every file that the report and the notebook read."""

import json
import random
from pathlib import Path
from typing import Any

from groundhop import jsonl
from groundhop.config import RunConfig
from groundhop.pipeline.band import NodeRow
from groundhop.pipeline.evaluate import summarise
from groundhop.pipeline.pass_rate import count_all
from groundhop.pipeline.tables import Provenance, write_tables
from groundhop.pipeline.traces import tasks
from groundhop.records import (
    Evidence,
    GrpoStep,
    Hop,
    Link,
    Page,
    Question,
    Rollout,
    ToolCall,
    Trace,
    Usage,
    Verdict,
)
from groundhop.runs import Run, StageFolder

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)> & \"quotes\" $x_1$"
"""Page text that must never become markup."""

SCHEMAS = ({"type": "function", "function": {"name": "search", "parameters": {}}},)


def make_run(root: Path, only: tuple[str, ...] | None = None, hostile: bool = True) -> Path:
    """A finished run in `root`; `only` names the stages that ran."""
    run = Run(root, RunConfig(name="synthetic", seed=7))
    builders = {
        "pages": _pages,
        "graph": _graph,
        "questions": _questions,
        "rollouts-base": lambda stage: _rollouts(stage, "base", 0.04, hostile),
        "buckets-base": lambda stage: _buckets(stage, "base", 0.04),
        "sft": _sft,
        "rollouts-sft": lambda stage: _rollouts(stage, "sft", 0.45, hostile),
        "buckets-sft": lambda stage: _buckets(stage, "sft", 0.45),
        "grpo": _grpo,
        "evaluate": lambda stage: _evaluate(stage, hostile),
    }
    for name, build in builders.items():
        if only is None or name in only:
            stage = run.open(name, ("seed",))
            summary = build(stage)
            stage.finish(summary)
            run.stamp(name, summary)
    return root


def page_key(number: int) -> str:
    return f"site{number % 3}.example/page-{number}"


def _links(number: int) -> list[int]:
    draw = random.Random(number)
    return sorted({draw.randrange(40) for _ in range(4)} | {(number * 7 + 1) % 40, 0} - {number})


def _pages(stage: StageFolder) -> dict[str, Any]:
    pages = []
    for number in range(40):
        links = tuple(
            Link(url=f"https://{page_key(to)}", key=page_key(to), anchor=f"page {to}", main=to != 0)
            for to in _links(number)
        )
        key = page_key(number)
        title = f"Page {number} costs $5 & more" if number % 9 == 0 else f"The history of thing number {number}"
        pages.append(
            Page(
                url=f"https://{key}",
                key=key,
                host=key.split("/")[0],
                title=title,
                text=f"Text of page {number}.",
                links=links,
                digest="0" * 64,
                licence="CC0-1.0",
            )
        )
    jsonl.write(stage.path / "pages.jsonl.zst", sorted(pages, key=lambda page: page.key))
    stage.fail("https://site0.example/thin", "thin", "12 characters")
    stage.fail("https://site0.example/robots", "robots")
    return {"pages": 40, "hosts": 3, "read": 42}


def _graph(stage: StageFolder) -> dict[str, Any]:
    rows = [node_row(number) for number in range(40)]
    jsonl.write(stage.path / "pages.jsonl", rows)
    jsonl.write(stage.path / "hops.jsonl", [_hop(number) for number in range(5, 25)])
    jsonl.write(
        stage.path / "edges.jsonl.zst", sorted((page_key(a), page_key(b)) for a in range(40) for b in _links(a))
    )
    stage.fail_all([(page_key(0), "home", ""), (page_key(39), "thin", "9 words")])
    return {"pages": 40, "links": 170, "band": 24, "hops": 20}


def node_row(number: int) -> NodeRow:
    place = number / 39
    role = {0: "home", 39: "thin"}.get(number, "content")
    return NodeRow(
        key=page_key(number),
        host=page_key(number).split("/")[0],
        in_degree=4,
        out_degree=4,
        pagerank=0.4 / (number + 3),
        harmonic=0.5,
        percentile=place,
        harmonic_percentile=place,
        disagreement=0.0,
        role=role,
        in_band=4 <= number < 30,
    )


def _hop(number: int) -> Hop:
    target = next(to for to in _links(number) if to not in (0, number))
    return Hop(
        seed=page_key(number),
        target=page_key(target),
        anchor="x",
        anchor_start=0,
        anchor_end=1,
        sentence_start=0,
        sentence_end=4,
        seed_percentile=number / 39,
        target_percentile=target / 39,
    )


def question(number: int, split: str) -> Question:
    hop = _hop(5 + number % 20)
    evidence = Evidence(page=hop.target, start=0, end=4, text="Text")
    return Question(
        id=f"{split}-{number:03}",
        question=f"In which year was thing {number}, which the page on the earlier one names, opened? {HOSTILE if number == 0 else ''}",
        answer=str(1900 + number),
        kind="date",
        evidence=(evidence,),
        hops=(hop,),
        split="train" if split == "train" else "heldout",
        writer="cloze",
    )


def _questions(stage: StageFolder) -> dict[str, Any]:
    rows = [question(n, "heldout") for n in range(24)] + [question(n, "train") for n in range(48)]
    jsonl.write(stage.path / "questions.jsonl", rows)
    stage.fail_all([(f"hop {n}", "one_hop" if n % 3 else "ambiguous", "") for n in range(30)])
    return {"train": 48, "heldout": 24, "hops": 102}


def rollout(policy: str, question_id: str, repeat: int, right: bool | None, hostile: bool = True) -> Rollout:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "search", "arguments": json.dumps({"queries": ["thing opened"]})},
    }
    tool_text = f"1. The thing (https://{page_key(3)})\n{HOSTILE if hostile else 'opened long ago'}"
    answer = None if right is None else "1900" if right else "1999"
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Find the answer."},
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": tool_text},
    ]
    if answer:
        messages.append({"role": "assistant", "content": f"It was then.\nExact Answer: {answer}"})
    return Rollout(
        question_id=question_id,
        repeat=repeat,
        policy=policy,
        seed=repeat,
        messages=tuple(messages),
        tools=SCHEMAS,
        token_ids=tuple(range(20)),
        prompt_length=8,
        mask=(0,) * 8 + (1,) * 12,
        log_probs=(0.0,) * 8 + (-0.5,) * 12,
        answer=answer,
        stop="error" if right is None else "answered",
        error="search provider is down" if right is None else None,
        calls=(ToolCall(turn=0, name="search", arguments={"queries": ["thing opened"]}, outcome="ok"),)
        * (1 if policy == "base" else 2),
        usage=Usage(prompt_tokens=200, completion_tokens=40, tool_tokens=90, turns=2, seconds=1.5),
    )


def _tries(
    policy: str, split: str, count: int, repeats: int, rate: float, hostile: bool
) -> tuple[list[Rollout], list[Verdict]]:
    draw = random.Random(f"{policy}{split}")
    rollouts, verdicts = [], []
    for number in range(count):
        skill = min(1.0, max(0.0, rate + draw.uniform(-0.4, 0.4) if rate > 0.1 else rate))
        for repeat in range(repeats):
            right = None if draw.random() < 0.01 else draw.random() < skill
            name = f"{split}-{number:03}"
            rollouts.append(rollout(policy, name, repeat, right, hostile))
            verdicts.append(
                Verdict(
                    question_id=name,
                    repeat=repeat,
                    policy=policy,
                    correct=right,
                    judge="exact",
                    state="rollout_error" if right is None else "judged",
                )
            )
    return rollouts, verdicts


def _rollouts(stage: StageFolder, policy: str, rate: float, hostile: bool) -> dict[str, Any]:
    rollouts, verdicts = _tries(policy, "train", 48, 8, rate, hostile)
    jsonl.write(stage.path / "rollouts.jsonl", rollouts)
    jsonl.write(stage.path / "verdicts.jsonl", verdicts)
    return {
        "rollouts": len(rollouts),
        "right": sum(v.correct is True for v in verdicts),
        "no_verdict": sum(v.correct is None for v in verdicts),
    }


def _buckets(stage: StageFolder, policy: str, rate: float) -> dict[str, Any]:
    _, verdicts = _tries(policy, "train", 48, 8, rate, True)
    asked = [question(number, "train") for number in range(48)]
    rows = count_all(verdicts, min_judged=6)
    found = tasks(asked, rows, ("easy", "medium", "hard"))
    traces = [_trace(number) for number in range(20)]
    jsonl.write(stage.path / "buckets.jsonl", rows)
    jsonl.write(stage.path / "traces.jsonl", traces)
    jsonl.write(stage.path / "tasks.jsonl", found)
    provenance = Provenance(policy, repeats=8, seed=7, min_judged=6, licences={"CC0-1.0": 40})
    write_tables(
        stage.path / "parquet",
        questions=asked,
        buckets=rows,
        traces=traces,
        tasks=found,
        prompt=None,
        provenance=provenance,
    )
    return {"questions": 48, "traces": 20, "tasks": len(found)}


def _trace(number: int) -> Trace:
    messages = rollout("base", "x", 0, True).messages
    return Trace(
        id=f"c-{number}", question_id=f"train-{number:03}", origin="construction", messages=messages, tools=SCHEMAS
    )


def _sft(stage: StageFolder) -> dict[str, Any]:
    for step in range(1, 21):
        stage.log_metrics(
            {
                "step": step,
                "sft/loss": 2.2 * 0.88**step + 0.3,
                "sft/grad_norm": 1.0 + step % 3 / 5,
                "sft/lr": 2e-4 * (1 - step / 20),
                "sft/tokens_per_s": 250.0 + step % 3,
            }
        )
    stage.fail("c-9", "too_long", "1702 tokens")
    return {"traces": 19, "steps": 20, "loss": 0.47}


def _grpo(stage: StageFolder) -> dict[str, Any]:
    jsonl.write(stage.path / "steps.jsonl", [grpo_step(step) for step in range(1, 13)])
    return {"steps": 12, "version": "12"}


def grpo_step(step: int) -> GrpoStep:
    return GrpoStep(
        step=step,
        version=str(step),
        sampled_version=str(step - 1),
        stale_share=0.0,
        reward_mean=0.4 + 0.02 * step if step != 5 else None,
        rollouts=40,
        groups=4,
        groups_tried=5 + step % 3,
        all_right=step % 2,
        all_wrong=1,
        groups_lost=0,
        backfilled=0,
        marks={"right": 20, "wrong": 19, "error": 1},
        calls_mean=2.5 - 0.05 * step,
        trained_rollouts=32,
        trained_tokens=2000,
        loss=0.01,
        grad_norm=0.4,
        learning_rate=1e-5,
        log_ratio_abs_mean=0.004,
        log_ratio_std=0.01,
        clip_share=0.01,
        entropy=0.5 - 0.01 * step,
        changed=2_000_000 + 10_000 * step,
        total=134_000_000,
        bytes=4_000_000 + 20_000 * step,
        rollout_s=20.0,
        train_s=15.0,
        refit_s=1.2,
    )


def _evaluate(stage: StageFolder, hostile: bool) -> dict[str, Any]:
    for policy, rate in (("base", 0.02), ("sft", 0.4), ("grpo", 0.55)):
        rollouts, verdicts = _tries(policy, "heldout", 24, 4, rate, hostile)
        jsonl.write(stage.path / policy / "rollouts.jsonl", rollouts)
        jsonl.write(stage.path / policy / "verdicts.jsonl", verdicts)
    summary = summarise(stage.path, ("base", "sft", "grpo"), seed=7, draws=200)
    (stage.path / "summary.json").write_text(json.dumps(summary))
    return {"questions": 24}

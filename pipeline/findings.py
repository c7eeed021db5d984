"""Read what a run's folder holds, whichever stages ran: the material of the report and the notebook.

Everything here tolerates what is missing. A stage that did not run has no records, and nothing raises for it.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from groundhop import jsonl
from groundhop.pipeline.band import NodeRow
from groundhop.pipeline.graph_plots import Neighbourhood
from groundhop.records import Bucketed, Failure, Hop, Question, Rollout, Verdict

STAGES = (
    ("pages", "Pages"),
    ("graph", "Link graph"),
    ("questions", "Questions"),
    ("rollouts-base", "Rollouts, base"),
    ("buckets-base", "Buckets, base"),
    ("sft", "SFT"),
    ("rollouts-sft", "Rollouts, SFT"),
    ("buckets-sft", "Buckets, SFT"),
    ("grpo", "GRPO"),
    ("evaluate", "Evaluation"),
)
POLICIES = ("base", "sft", "grpo")


@dataclass(frozen=True, slots=True)
class StageLook:
    """What one stage left behind."""

    name: str
    title: str
    state: str
    """`done`, `half done` or `not run yet`."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    drops: Mapping[str, int] = field(default_factory=dict)
    """Dropped items by reason, most frequent first."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One held-out question with one try of each policy."""

    question: Question
    tries: tuple[tuple[Rollout, Verdict | None], ...]


class PageHead(Struct, frozen=True):
    """The part of a `Page` that the picture needs."""

    key: str
    title: str = ""


def look(root: Path) -> list[StageLook]:
    """Say for each stage whether it ran, what it counted and what it dropped."""
    return [_look(root / name, name, title) for name, title in STAGES]


def load(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty when the file is absent."""
    if not path.exists():
        return {}
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def manifest(root: Path) -> dict[str, Any]:
    """The run's manifest; empty before the first stage ended."""
    return load(root / "manifest.json")


def rows(path: Path) -> list[dict[str, Any]]:
    """Any JSONL file as plain rows; none when the file is absent."""
    return jsonl.read_if_there(path, dict[str, Any])


def buckets(root: Path) -> dict[str, list[Bucketed]]:
    """Bucketed questions by policy, policies without any left out."""
    found = {policy: jsonl.read_if_there(root / f"buckets-{policy}" / "buckets.jsonl", Bucketed) for policy in POLICIES}
    return {policy: records for policy, records in found.items() if records}


def tries(folder: Path) -> list[tuple[Rollout, Verdict | None]]:
    """The rollouts of a folder, each with its verdict, by question and repeat. A later verdict replaces an earlier one."""
    verdicts = {(v.question_id, v.repeat): v for v in jsonl.read_if_there(folder / "verdicts.jsonl", Verdict)}
    rollouts = {(r.question_id, r.repeat): r for r in jsonl.read_if_there(folder / "rollouts.jsonl", Rollout)}
    return [(rollouts[name], verdicts.get(name)) for name in sorted(rollouts)]


def evaluated(root: Path) -> list[str]:
    """The policies that an evaluation holds rollouts of, in the order of training."""
    return [policy for policy in POLICIES if (root / "evaluate" / policy / "rollouts.jsonl").exists()]


def samples(root: Path, limit: int = 4) -> list[Sample]:
    """Held-out questions that show what changed, each with its first try by each policy.

    Chosen by what the first tries did, so that gains and losses are both shown: first one that training won, one
    that GRPO lost, one that nobody solved, one that all solved; then more of them in the same turn.
    """
    by_policy = {policy: _first_tries(root / "evaluate" / policy) for policy in evaluated(root)}
    questions = {q.id: q for q in jsonl.read_if_there(root / "questions" / "questions.jsonl", Question)}
    shared = [name for name in sorted(questions) if by_policy and all(name in found for found in by_policy.values())]
    groups: dict[str, list[Sample]] = defaultdict(list)
    for name in shared:
        sample = Sample(questions[name], tuple(found[name] for found in by_policy.values()))
        groups[_story(sample)].append(sample)
    ordered = [groups[story] for story in ("gained", "lost", "never", "always", "mixed")]
    turns = [group[turn] for turn in range(limit) for group in ordered if turn < len(group)]
    return turns[:limit]


def nodes(root: Path) -> list[NodeRow]:
    """The ranked pages of the link graph."""
    return jsonl.read_if_there(root / "graph" / "pages.jsonl", NodeRow)


def seed_percentiles(root: Path) -> list[float]:
    """Popularity of the page that each question starts from."""
    kept = jsonl.read_if_there(root / "questions" / "questions.jsonl", Question)
    return sorted(question.hops[0].seed_percentile for question in kept if question.hops)


def picture(root: Path, ranked: Sequence[NodeRow], size: int = 60) -> Neighbourhood | None:
    """Cut the neighbourhood of the page with the most question hops out of the link graph; None without links."""
    edges = jsonl.read_if_there(root / "graph" / "edges.jsonl.zst", tuple[str, str])
    hops = [(hop.seed, hop.target) for hop in jsonl.read_if_there(root / "graph" / "hops.jsonl", Hop)]
    starts = Counter(seed for seed, _ in hops) or Counter(seed for seed, _ in edges)
    if not starts:
        return None
    centre = min(starts, key=lambda key: (-starts[key], key))
    kept = _spread(centre, edges, hops, size)
    on_hops = frozenset((seed, target) for seed, target in hops if seed in kept and target in kept)
    named = sorted(kept, key=lambda key: (key != centre, -sum(key in hop for hop in on_hops), key))
    return Neighbourhood(
        labels=_titles(root, kept),
        edges=sorted({(a, b) for a, b in edges if a in kept and b in kept} | on_hops),
        band=frozenset(row.key for row in ranked if row.in_band and row.key in kept),
        dropped=frozenset(row.key for row in ranked if row.role != "content" and row.key in kept),
        hops=on_hops,
        named=named[:14],
    )


def _look(folder: Path, name: str, title: str) -> StageLook:
    if not folder.exists():
        return StageLook(name, title, "not run yet")
    drops = Counter(failure.reason for failure in jsonl.read_if_there(folder / "failures.jsonl", Failure))
    state = "done" if (folder / "done.json").exists() else "half done"
    return StageLook(
        name,
        title,
        state,
        load(folder / "done.json"),
        dict(sorted(drops.items(), key=lambda item: (-item[1], item[0]))),
    )


def _first_tries(folder: Path) -> dict[str, tuple[Rollout, Verdict | None]]:
    """Each question's first try. Tokens are left behind and rollouts are read one at a time: real runs are large."""
    verdicts = {(v.question_id, v.repeat): v for v in jsonl.read_if_there(folder / "verdicts.jsonl", Verdict)}
    found: dict[str, tuple[Rollout, Verdict | None]] = {}
    for rollout in jsonl.read(folder / "rollouts.jsonl", Rollout):
        known = found.get(rollout.question_id)
        if known is None or rollout.repeat <= known[0].repeat:
            light = msgspec.structs.replace(rollout, token_ids=(), mask=(), log_probs=(), spans=())
            found[rollout.question_id] = (light, verdicts.get((rollout.question_id, rollout.repeat)))
    return found


def _story(sample: Sample) -> str:
    right = [verdict is not None and verdict.correct is True for _, verdict in sample.tries]
    if all(right):
        return "always"
    if not any(right):
        return "never"
    if len(right) > 1 and right[-1] and not right[0]:
        return "gained"
    return "lost" if not right[-1] else "mixed"


def _titles(root: Path, keys: Collection[str]) -> dict[str, str]:
    """Titles of these pages; the key itself where a page has none or is not there."""
    found = dict.fromkeys(keys, "")
    path = root / "pages" / "pages.jsonl.zst"
    for page in jsonl.read(path, PageHead) if path.exists() else ():
        if page.key in found:
            found[page.key] = " ".join(page.title.split())
    return {key: title or key for key, title in found.items()}


def _spread(centre: str, edges: Sequence[tuple[str, str]], hops: Sequence[tuple[str, str]], size: int) -> set[str]:
    """Walk from `centre` along links and against them, hops first, at most 14 from a page, until `size` are met."""
    around: dict[str, set[str]] = defaultdict(set)
    for a, b in [*edges, *hops]:
        around[a].add(b)
        around[b].add(a)
    wanted = set(hops) | {(target, seed) for seed, target in hops}
    met, queue = {centre}, [centre]
    for key in queue:
        for other in sorted(around[key], key=lambda other: ((key, other) not in wanted, other))[:14]:
            if other not in met and len(met) < size:
                met.add(other)
                queue.append(other)
    return met

"""Write a run's report: one HTML file with pictures inside, from what lies on the disk, whichever stages ran."""

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from groundhop.pipeline import effects, findings, graph_plots, plots
from groundhop.pipeline.effects import Comparison, Score
from groundhop.pipeline.findings import Sample
from groundhop.pipeline.plots import Estimate
from groundhop.records import Rollout, Verdict

logger = logging.getLogger(__name__)

BUCKETS = ("too_easy", "easy", "medium", "hard", "too_hard")


def run(root: Path, output: Path) -> None:
    """Write the report of the run in `root` to `output`. Stages that did not run are said to be missing."""
    page = render(root)
    temporary = output.with_name(output.name + ".tmp")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(output)
    logger.info("report: %s (%d kB)", output, len(page) // 1000)


def render(root: Path) -> str:
    """The report as HTML. Texts from pages and models are escaped by the template engine, SVG is our own."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "words": _words,
        "number": _number,
        "percent": _percent,
        "span": _span,
        "points": _points,
        "p_value": _p_value,
    }
    environment.tests["shown"] = lambda value: isinstance(value, str | int | float) and not isinstance(value, bool)
    template = resources.files("groundhop.pipeline").joinpath("templates/report.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(_material(root))


def headline(scores: Sequence[Score], comparisons: Sequence[Comparison], stages: Sequence[findings.StageLook]) -> str:
    """What happened, in one or two sentences with numbers."""
    if not scores:
        done = [stage.title.lower() for stage in stages if stage.state == "done"]
        return f"Not evaluated yet. Done so far: {', '.join(done)}." if done else "Nothing ran yet."
    parts = [f"{score.policy} {_span(score.accuracy, share=True)}" for score in scores]
    text = f"On {scores[0].questions} held-out questions, {scores[0].tries} tries a policy, the share of right answers was: {'; '.join(parts)}."
    tests = [
        f"{row.name}: {_points(row.difference, interval=False)}, p {_p_phrase(row.p)}"
        for row in comparisons
        if row.difference is not None
    ]
    text += f" Paired, {'; '.join(tests)}." if tests else ""
    return (
        text
        + f" Tool calls a try: {', '.join(f'{score.policy} {score.calls.value:.2f}' for score in scores if score.calls)}."
    )


def _material(root: Path) -> dict[str, Any]:
    manifest = findings.manifest(root)
    config = manifest.get("config", {})
    stages, scores, comparisons = (
        findings.look(root),
        effects.scores(root / "evaluate"),
        effects.comparisons(root / "evaluate"),
    )
    return {
        "name": manifest.get("name", root.name),
        "seed": config.get("seed", "?"),
        "model": config.get("model", {}).get("name", "?"),
        "provider": config.get("search", {}).get("provider", "?"),
        "judge": config.get("judge", {}).get("kind", "?"),
        "versions": manifest.get("versions", {}),
        "config": json.dumps(config, indent=1),
        "folder": root.as_posix(),
        "stages": stages,
        "sentence": headline(scores, comparisons, stages),
        "policies": findings.evaluated(root),
        **_before_after(root, scores, comparisons),
        **_buckets(root),
        **_training(root),
        **_graph(root, config),
        "samples": [_sample(sample) for sample in findings.samples(root)],
    }


def _before_after(root: Path, scores: Sequence[Score], comparisons: Sequence[Comparison]) -> dict[str, Any]:
    stops = effects.stops(root / "evaluate")
    seen = sorted({stop for found in stops.values() for stop in found})
    return {
        "scores": scores,
        "comparisons": comparisons,
        "tests": sorted({row.test for row in comparisons}),
        "stops": stops,
        "stop_names": seen,
        "other_sets": effects.other_sets(root),
        "accuracy_svg": _dots([(score.policy, score.accuracy) for score in scores], "accuracy", share=True),
        "calls_svg": _dots([(score.policy, score.calls) for score in scores], "tool calls a try"),
    }


def _dots(named: Sequence[tuple[str, Estimate | None]], label: str, share: bool = False) -> str:
    known = [Estimate(name, value.value, value.low, value.high) for name, value in named if value is not None]
    return plots.estimates(known, label, share) if known else ""


def _buckets(root: Path) -> dict[str, Any]:
    by_policy = findings.buckets(root)
    return {
        "bucket_names": BUCKETS,
        "bucket_svgs": {policy: plots.bucket_histogram(rows) for policy, rows in by_policy.items()},
        "bucket_counts": {policy: Counter(row.bucket for row in rows) for policy, rows in by_policy.items()},
        "bucket_errors": {policy: sum(row.errors for row in rows) for policy, rows in by_policy.items()},
    }


def _training(root: Path) -> dict[str, Any]:
    sft = effects.sft_curves(root)
    grpo = effects.grpo_curves(root)
    return {"sft_svg": plots.curves(sft) if sft else "", "grpo_svg": plots.curves(grpo) if grpo else ""}


def _graph(root: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    ranked = findings.nodes(root)
    linked = [row for row in ranked if row.out_degree > 0]
    piece = findings.picture(root, ranked) if ranked else None
    low, high = config.get("graph", {}).get("band", (0.0, 1.0))
    seeds = findings.seed_percentiles(root)
    return {
        "rank_svg": graph_plots.ranks([row.pagerank for row in linked], (low, high), seeds) if linked else "",
        "graph_svg": graph_plots.neighbourhood(piece) if piece else "",
        "graph_names": [(piece.labels[key], key) for key in piece.named] if piece else [],
    }


def _sample(sample: Sample) -> dict[str, Any]:
    return {"question": sample.question, "tries": [_try(rollout, verdict) for rollout, verdict in sample.tries]}


def _try(rollout: Rollout, verdict: Verdict | None) -> dict[str, Any]:
    correct = verdict.correct if verdict else None
    return {
        "policy": rollout.policy,
        "verdict": "unknown" if correct is None else "right" if correct else "wrong",
        "turns": [turn for message in rollout.messages for turn in _turns(message)],
        "answer": rollout.answer,
        "stop": rollout.stop,
        "calls": len(rollout.calls),
    }


def _turns(message: Mapping[str, Any]) -> list[dict[str, str]]:
    """A chat message as boxes: what was said, each call, what a tool returned (folded)."""
    text = str(message.get("content") or "").strip()
    match message.get("role"):
        case "system":
            return [{"kind": "box", "label": "system prompt", "text": text}]
        case "user":
            return [{"kind": "box", "label": "user", "text": text}]
        case "tool":
            first = next((line for line in text.splitlines() if line.strip()), "nothing")
            return [{"kind": "box", "label": f"result: {first[:70]}{'…' if len(first) > 70 else ''}", "text": text}]
    calls = [{"kind": "call", "text": _call(call.get("function", {}))} for call in message.get("tool_calls") or ()]
    return ([{"kind": "says", "text": text}] if text else []) + calls


def _call(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments", "")
    try:
        values = json.loads(arguments) if isinstance(arguments, str) else arguments
        inside = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items())
    except (ValueError, AttributeError):
        inside = str(arguments)
    return f"{function.get('name', '?')}({inside})"


def _words(value: object) -> str:
    return str(value).replace("_", " ")


def _number(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return "–" if value is None else str(value).lower()
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _span(value: Estimate | None, share: bool = False) -> str:
    """`41.2 % (33.0 to 49.8)`."""
    if value is None:
        return "–"
    factor, digits, unit = (100, 1, " %") if share else (1, 2, "")
    text = f"{factor * value.value:.{digits}f}{unit}"
    if value.low is None or value.high is None:
        return text
    return f"{text} ({factor * value.low:.{digits}f} to {factor * value.high:.{digits}f})"


def _points(value: Estimate | None, interval: bool = True) -> str:
    """`+41.2 points (33.0 to 49.8)`: a difference of shares."""
    if value is None:
        return "–"
    text = f"{100 * value.value:+.1f} points"
    if interval and value.low is not None and value.high is not None:
        text += f" ({100 * value.low:+.1f} to {100 * value.high:+.1f})"
    return text.replace("-", "−")


def _p_value(value: float | None) -> str:
    return (
        "–" if value is None else "< 0.0001" if value < 0.0001 else f"{value:.2g}" if value < 0.01 else f"{value:.3f}"
    )


def _p_phrase(value: float | None) -> str:
    text = _p_value(value)
    return text if text.startswith("<") else f"= {text}"

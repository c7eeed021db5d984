"""Loss of SFT after the same tokens: AdamW against LoGRA, each at the best learning rate of a small sweep, three seeds.

The data are the construction-path traces of a demo run. A share of them is held out; the seed draws the order of the others (and LoGRA's
projections). The sweep takes the first seed; the best rate by held-out loss is then run with the other two. Runs that are in `--out`
already are not done again.

    python bench/logra_quality.py --run runs/demo --cache models --write docs/results.md --plot docs/plots/logra-quality.svg
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from result_page import replace_between
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from groundhop import jsonl
from groundhop.records import Trace
from groundhop.training.allocator import keep_freed_memory
from groundhop.training.heads import projected_only_at
from groundhop.training.logra.optimizer import Logra
from groundhop.training.logra.settings import LograSettings
from groundhop.training.masks import IGNORED, Encoded, encode_all
from groundhop.training.models import prepare

SWEEP = {
    "AdamW": (1e-4, 3e-4, 1e-3),
    "LoGRA r=64": (1e-4, 3e-4, 1e-3, 3e-3),
    "LoGRA r=256": (1e-4, 3e-4, 1e-3),
}
SEEDS = (1, 2, 3)
GOAL = 0.02
HELD_OUT = 16


@dataclass(frozen=True, slots=True)
class Curve:
    """One training run."""

    kind: str
    rate: float
    seed: int
    losses: list[float]
    """Nats a token of each step's batch, before its update."""
    held_out: float
    """Nats a token of the rows that were held out, at the end."""
    tokens: int
    seconds: float


def read_rows(run: Path, folder: Path, longest: int) -> tuple[list[Encoded], list[Encoded]]:
    """Rows to train and rows held out; by id, so that they are the same for every run."""
    traces = list(jsonl.read(run / "buckets-base" / "traces.jsonl", Trace))
    encoded = encode_all(AutoTokenizer.from_pretrained(folder), traces, max_length=longest)
    rows = sorted((row for row in encoded if isinstance(row, Encoded)), key=lambda row: row.id)
    random.Random(0).shuffle(rows)
    return rows[HELD_OUT:], rows[:HELD_OUT]


def loss_of(model: Any, rows: Sequence[Encoded]) -> torch.Tensor:
    """Sum over the labelled tokens, in nats."""
    ids = pad_sequence([torch.tensor(row.input_ids) for row in rows], batch_first=True)
    labels = pad_sequence([torch.tensor(row.labels) for row in rows], batch_first=True, padding_value=IGNORED)
    mask = pad_sequence([torch.ones(len(row.input_ids), dtype=torch.long) for row in rows], batch_first=True)
    predicting = functional.pad(labels[:, 1:] != IGNORED, (0, 1))
    with projected_only_at(model, predicting), torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    wanted = labels[:, 1:][labels[:, 1:] != IGNORED]
    return functional.cross_entropy(logits.float(), wanted, reduction="sum")


def make(model: Any, kind: str, rate: float, seed: int) -> torch.optim.Optimizer:
    """The optimizer of a run; both train all parameters and clip to a norm of 1."""
    if kind == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    rank = int(kind.rpartition("=")[2])
    settings = LograSettings(
        rank=rank, seed=seed, learning_rate=rate, variant="plain", others="adamw", others_learning_rate=3e-4
    )
    return Logra(model, settings)


def train(folder: Path, kind: str, rate: float, seed: int, options: argparse.Namespace) -> Curve:
    """Train from the same start on the same number of rows."""
    rows, held = read_rows(options.run, folder, options.longest)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train()
    optimizer = make(model, kind, rate, seed)
    order = random.Random(seed).sample(range(len(rows)), options.steps * options.batch)
    losses, tokens, start = [], 0, time.monotonic()
    for step in range(options.steps):
        chosen = [rows[at] for at in order[step * options.batch : (step + 1) * options.batch]]
        for group in optimizer.param_groups:
            group.setdefault("full", group["lr"])
            group["lr"] = group["full"] * (options.steps - step) / options.steps
        count = sum(row.trained for row in chosen)
        total = 0.0
        for part in (chosen[at : at + options.micro] for at in range(0, len(chosen), options.micro)):
            loss = loss_of(model, part) / count
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        if not isinstance(optimizer, Logra):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
        losses.append(total)
        tokens += sum(len(row.input_ids) for row in chosen)
    return Curve(kind, rate, seed, losses, held_out_loss(model, held), tokens, time.monotonic() - start)


@torch.no_grad()
def held_out_loss(model: Any, rows: Sequence[Encoded]) -> float:
    """Nats a labelled token."""
    model.eval()
    total = sum(float(loss_of(model, rows[at : at + 4])) for at in range(0, len(rows), 4))
    return total / sum(row.trained for row in rows)


def run_all(folder: Path, options: argparse.Namespace) -> list[Curve]:
    """The sweep, then the other seeds at each kind's best rate."""
    curves = [Curve(**row) for row in jsonl.read_if_there(options.out, dict[str, Any])]

    def one(kind: str, rate: float, seed: int) -> Curve:
        for curve in curves:
            if (curve.kind, curve.rate, curve.seed) == (kind, rate, seed):
                return curve
        curve = train(folder, kind, rate, seed, options)
        curves.append(curve)
        with options.out.open("a") as out:
            out.write(json.dumps(asdict(curve)) + "\n")
        print(f"{kind:<12} {rate:.0e} seed {seed}: held out {curve.held_out:.4f}, {curve.seconds:.0f} s", flush=True)
        return curve

    for kind in options.kinds:
        swept = [one(kind, rate, SEEDS[0]) for rate in SWEEP[kind]]
        best = min(swept, key=lambda curve: curve.held_out)
        for seed in SEEDS[1:]:
            one(kind, best.rate, seed)
    return curves


def tables(curves: Sequence[Curve], options: argparse.Namespace) -> str:
    """The sweep, and the comparison at the best rates."""
    best = best_of(curves)
    base = statistics.mean(curve.held_out for curve in best["AdamW"])
    lines = [
        "| optimizer | rate | held-out loss, three seeds | mean | against AdamW | bar 2 % |",
        "|---|---|---|---|---|---|",
    ]
    for kind, rows in best.items():
        mean = statistics.mean(curve.held_out for curve in rows)
        bar = "" if kind == "AdamW" else ("met" if mean <= base * (1 + GOAL) else "not met")
        each = ", ".join(f"{curve.held_out:.4f}" for curve in rows)
        lines.append(f"| {kind} | {rows[0].rate:.0e} | {each} | {mean:.4f} | {mean / base - 1:+.1%} | {bar} |")
    sweep = ["| optimizer, first seed | rate: held-out loss |", "|---|---|"]
    for kind in best:
        found = sorted((c for c in curves if c.kind == kind and c.seed == SEEDS[0]), key=lambda c: c.rate)
        sweep.append(f"| {kind} | {', '.join(f'{c.rate:.0e}: {c.held_out:.4f}' for c in found)} |")
    tokens = {curve.tokens for curve in curves if curve.seed == SEEDS[0]}
    head = (
        f"{options.steps} steps of {options.batch} traces ({min(tokens):,} tokens with the first seed), rate falling to 0, "
        f"{HELD_OUT} traces held out."
    )
    return "\n\n".join([head, "\n".join(lines), "\n".join(sweep)])


def best_of(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    """The runs of all seeds at each kind's best rate."""
    found: dict[str, list[Curve]] = {}
    for kind in dict.fromkeys(curve.kind for curve in curves):
        swept = [curve for curve in curves if curve.kind == kind and curve.seed == SEEDS[0]]
        rate = min(swept, key=lambda curve: curve.held_out).rate
        found[kind] = sorted((c for c in curves if c.kind == kind and c.rate == rate), key=lambda c: c.seed)
    return found


def plot(curves: Sequence[Curve], path: Path) -> None:
    """Training loss by step at the best rates, mean of the seeds and their range."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "groundhop"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    for kind, rows in best_of(curves).items():
        steps = range(1, len(rows[0].losses) + 1)
        columns = list(zip(*(curve.losses for curve in rows), strict=True))
        axes.plot(steps, [statistics.mean(column) for column in columns], label=f"{kind}, rate {rows[0].rate:.0e}")
        axes.fill_between(steps, [min(column) for column in columns], [max(column) for column in columns], alpha=0.2)
    axes.set(xlabel="optimizer step", ylabel="loss, nats a token", yscale="log")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Run what is missing, print the tables, and put them into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/demo"))
    parser.add_argument("--cache", type=Path, default=Path("models"))
    parser.add_argument("--out", type=Path, default=Path("runs/logra-quality.jsonl"))
    parser.add_argument("--kinds", nargs="+", choices=list(SWEEP), default=list(SWEEP)[:2])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--micro", type=int, default=2)
    parser.add_argument("--longest", type=int, default=1536)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    keep_freed_memory()
    curves = run_all(prepare("smollm2-135m-instruct", options.cache), options)
    text = tables(curves, options)
    print(text)
    if options.plot:
        plot(curves, options.plot)
    if options.write:
        replace_between(options.write, "logra, quality", text)


if __name__ == "__main__":
    main()

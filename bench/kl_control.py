"""Does a step scaled to a KL budget move the policy by that much? Predicted against realised KL, and what a prediction costs.

SmolLM2-135M, one batch of a demo run's traces: the step that AdamW and LoGRA (rank 64) propose from the same gradient after some steps of
training, scaled to each budget and taken; then the exact KL between the policies before and after on the probe's tokens.

    python bench/kl_control.py --run runs/demo --cache models --write docs/results.md
"""

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from logra_quality import loss_of, make, read_rows
from result_page import replace_between
from transformers import AutoModelForCausalLM

from groundhop.training.kl.budget import tried_size
from groundhop.training.kl.differences import moved
from groundhop.training.kl.predict import predict, realised
from groundhop.training.kl.probe import Probe
from groundhop.training.kl.proposal import DenseProposer
from groundhop.training.logra.optimizer import Logra
from groundhop.training.masks import IGNORED, Encoded
from groundhop.training.models import prepare

BUDGETS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
RATES = {"AdamW": 3e-4, "LoGRA r=64": 1e-3}
GOAL = 0.05
PROBED = 2


def probe_of(row: Encoded) -> Probe:
    """One trace, its labelled tokens taken as the generated ones."""
    ids, labels = torch.tensor([row.input_ids]), torch.tensor([row.labels])
    return Probe(ids, torch.ones_like(ids), labels != IGNORED)


def backward(model: Any, rows: Sequence[Encoded]) -> None:
    """Gradients of one batch."""
    count = sum(row.trained for row in rows)
    for row in rows:
        (loss_of(model, [row]) / count).backward()  # type: ignore[no-untyped-call]


def measure(folder: Path, run: Path, kind: str, steps: int) -> list[str]:
    """Rows of the table."""
    rows, held = read_rows(run, folder, 1536)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train()
    optimizer = make(model, kind, RATES[kind], seed=1)
    for step in range(steps):
        backward(model, rows[2 * step : 2 * step + 2])
        optimizer.step()
        model.zero_grad()
    start = time.perf_counter()
    backward(model, rows[-2:])
    gradient_s = time.perf_counter() - start
    proposer = optimizer if isinstance(optimizer, Logra) else DenseProposer(optimizer, model)
    direction = proposer.propose()
    probes = [probe_of(row) for row in held[:PROBED]]
    start = time.perf_counter()
    before: list[torch.Tensor] = []
    whole = predict(model, direction, probes, kept=before)
    predict_s = time.perf_counter() - start
    lines = []

    def trial(alpha: float) -> float:
        with direction.shift(model, alpha):
            return realised(model, probes, before)

    for budget in BUDGETS:
        alone = trial(math.sqrt(budget / whole))
        tried = tried_size(whole, budget, math.inf, trial)
        with moved(model, direction, tried.alpha):
            found = realised(model, probes, before)
        cells = [kind, f"{budget:.0e}", f"{alone / budget:.4f}", f"{tried.alpha:.3g}", str(tried.trials)]
        met = "met" if abs(found / budget - 1) <= GOAL else "not met"
        lines.append(f"| {' | '.join([*cells, f'{found:.4g}', f'{found / budget:.4f}', met])} |")
        print(lines[-1], flush=True)
    proposer.abandon()
    tokens = sum(int(probe.targets.sum()) for probe in probes)
    note = f"{kind}: the whole step predicts {whole:.3g} nats a token; the prediction took {predict_s:.1f} s"
    return [*lines, f"{note} on {tokens} tokens of {PROBED} traces, the gradient of 2 traces {gradient_s:.1f} s."]


def main() -> None:
    """Print the table, and put it into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/demo"))
    parser.add_argument("--cache", type=Path, default=Path("models"))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    folder = prepare("smollm2-135m-instruct", options.cache)
    found = [measure(folder, options.run, kind, options.steps) for kind in RATES]
    head = [
        "| optimizer | budget, nats a token | by prediction alone: realised / budget | share of the step | trials | realised | realised / budget | bar 5 % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    text = (
        "\n".join([*head, *(line for rows in found for line in rows[:-1])])
        + "\n\n"
        + " ".join(rows[-1] for rows in found)
    )
    print(text)
    if options.write:
        replace_between(options.write, "kl control", text)


if __name__ == "__main__":
    main()

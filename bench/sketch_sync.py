"""Bytes of a sync by sketches against the delta alone, and whether the site ends with the trainer's bits.

SmolLM2-135M trained by LoGRA (rank 64) on a demo run's traces at several sizes of a step; after each step a record goes to a site, which
expands it. Per weight the smaller encoding is sent. The seconds are those of sender and site together, on this machine's cores.

    python bench/sketch_sync.py --run runs/demo --cache models --write docs/results.md
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from kl_control import backward
from logra_quality import read_rows
from result_page import replace_between
from transformers import AutoModelForCausalLM

from groundhop.training.hotload.checkpoint import open_checkpoint
from groundhop.training.hotload.named import Given
from groundhop.training.logra.optimizer import Logra
from groundhop.training.logra.settings import LograSettings
from groundhop.training.models import prepare
from groundhop.training.sketch.sender import Sender
from groundhop.training.sketch.site import Site

SETTINGS: tuple[tuple[str, dict[str, object]], ...] = (
    ("plain, rate 1e-6, int16", {"variant": "plain", "learning_rate": 1e-6, "quantise": "int16"}),
    ("plain, rate 1e-5, int16", {"variant": "plain", "learning_rate": 1e-5, "quantise": "int16"}),
    ("plain, rate 1e-5, int8", {"variant": "plain", "learning_rate": 1e-5, "quantise": "int8"}),
    ("plain, rate 1e-3, int16", {"variant": "plain", "learning_rate": 1e-3, "quantise": "int16"}),
    ("plain, rate 1e-3, int8", {"variant": "plain", "learning_rate": 1e-3, "quantise": "int8"}),
    ("scaled, rho 6e-5, int8", {"variant": "scaled", "learning_rate": 6e-5, "quantise": "int8"}),
)


def measure(folder: Path, run: Path, name: str, given: dict[str, object], steps: int, rank: int) -> str:
    """One row of the table."""
    rows, _ = read_rows(run, folder, 1536)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train()
    optimizer = Logra(model, LograSettings(rank=rank, others="frozen", **given))  # type: ignore[arg-type]
    targets = {target.name for target in optimizer.sketches.targets}
    base = open_checkpoint(folder)
    sender = Sender(model.named_parameters(), base, targets)
    records, deltas, sketched, seconds = [], [], [], []
    with tempfile.TemporaryDirectory() as place:
        masters = Given((n, w.detach()) for n, w in model.named_parameters() if n in targets)
        site = Site.create(Path(place) / "site", sender, targets, masters)
        for step in range(steps):
            backward(model, rows[step : step + 1])
            optimizer.step()
            model.zero_grad()
            start = time.perf_counter()
            sender.add(optimizer.last_update)
            sent = sender.send(model.named_parameters())
            applied = site.apply(sent.content, sender.delta)
            seconds.append(time.perf_counter() - start)
            assert not applied.repaired, applied.repaired
            records.append(len(sent.content))
            deltas.append(sent.delta_bytes)
            sketched.append(len(sent.sketched))
        held = dict(site.named())
        equal = all(
            held[n].bits.tobytes() == w.detach().to(torch.bfloat16).view(torch.int16).numpy().tobytes()
            for n, w in model.named_parameters()
        )
    ratio = sum(records) / sum(deltas)
    cells = [name, str(steps), f"{statistics.mean(deltas):,.0f}", f"{statistics.mean(records):,.0f}", f"{ratio:.3f}"]
    cells += [f"{statistics.mean(sketched):.0f} of {len(targets)}", f"{statistics.median(seconds):.1f}"]
    line = f"| {' | '.join([*cells, 'yes' if equal else 'NO'])} |"
    print(line, flush=True)
    return line


def main() -> None:
    """Print the table, and put it into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/demo"))
    parser.add_argument("--cache", type=Path, default=Path("models"))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    folder = prepare("smollm2-135m-instruct", options.cache)
    head = [
        f"| SmolLM2-135M, rank {options.rank}, others frozen | steps | delta, bytes a step | record, bytes a step | record / delta | weights sent as sketches | seconds | bits equal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines = [measure(folder, options.run, name, given, options.steps, options.rank) for name, given in SETTINGS]
    text = "\n".join([*head, *lines])
    print(text)
    if options.write:
        replace_between(options.write, "sketch sync", text)


if __name__ == "__main__":
    main()

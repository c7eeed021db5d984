"""Memory and time of a training step: AdamW against LoGRA, same model, same batch, activation checkpointing on.

Each optimizer's memory is measured in a process of its own: what its tensors hold just before the step (exact), the peak of resident
memory in a step above what the process held with the weights alone, and the process's peak. Times are taken in one process, steps of
both in turn.

    python bench/logra_step.py --cache models --write docs/results.md
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from result_page import replace_between
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from groundhop.training.heads import projected_only_at
from groundhop.training.logra.memory import dense, logra, read_shapes
from groundhop.training.logra.optimizer import Logra
from groundhop.training.logra.settings import LograSettings
from groundhop.training.models import prepare

KINDS = ("AdamW", "LoGRA, others AdamW", "LoGRA, others frozen")
MEMORY_GOAL, TIME_GOAL, FORMULA_GOAL = 0.40, 1.15, 0.10
LABELLED_SHARE = 0.25
STEPS = 3


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one process."""

    weights: int
    held: int
    """Gradients and optimizer state, sketches and projections included, just before the update."""
    step_peak: int
    """Most resident memory in a step, above what the process held with its weights loaded."""
    process_peak: int


class Trainee:
    """A model and its optimizer, fed with the same seeded batches."""

    def __init__(self, folder: Path, kind: str, rank: int, shape: tuple[int, int], bf16: bool) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.train()
        self.resident = resident("VmRSS")
        self._shape, self._bf16 = shape, bf16
        self.optimizer = make(self.model, kind, rank)
        self.parts = {"gradient": 0.0, "update": 0.0}

    def backward(self, seed: int) -> None:
        """One forward and backward pass."""
        draw = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, self.model.config.vocab_size, self._shape, generator=draw)
        predicting = torch.rand(self._shape, generator=draw) < LABELLED_SHARE
        predicting[:, -1] = False
        labels = ids.roll(-1, 1)[predicting]
        with projected_only_at(self.model, predicting), torch.autocast("cpu", torch.bfloat16, enabled=self._bf16):
            logits = self.model(input_ids=ids, use_cache=False).logits
        functional.cross_entropy(logits.float(), labels).backward()  # type: ignore[no-untyped-call]

    def step(self, seed: int) -> float:
        """Seconds of a whole step."""
        start = time.perf_counter()
        self.backward(seed)
        between = time.perf_counter()
        if not isinstance(self.optimizer, Logra):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.model.zero_grad()
        end = time.perf_counter()
        self.parts = {"gradient": between - start, "update": end - between}
        return end - start

    def held(self) -> int:
        """Bytes of gradients, optimizer state, sketches and projections, each storage once."""
        tensors = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor) and value.dim()]
        if isinstance(self.optimizer, Logra):
            sketches = self.optimizer.sketches
            tensors += [sketches.flat, self.optimizer.param_groups[0]["row_squares"]]
            tensors += [target.signs for target in sketches.targets]
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
        return sum(storages.values())


def make(model: Any, kind: str, rank: int) -> torch.optim.Optimizer:
    """The optimizer named `kind`."""
    match kind:
        case "AdamW":
            return torch.optim.AdamW(model.parameters(), lr=1e-5)
        case "LoGRA, others AdamW":
            return Logra(model, LograSettings(rank=rank, variant="plain", learning_rate=1e-5, others="adamw"))
        case _:
            return Logra(model, LograSettings(rank=rank, variant="plain", learning_rate=1e-5, others="frozen"))


def resident(field: str) -> int:
    """Bytes of this process: `VmRSS` now, `VmHWM` at most since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure_memory(trainee: Trainee) -> Held:
    """Two steps to make all state, then one that is watched."""
    for seed in range(STEPS - 1):
        trainee.step(seed)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)
    trainee.backward(STEPS)
    held = trainee.held()
    trainee.optimizer.step()
    peak = resident("VmHWM")
    weights = sum(weight.nbytes for weight in trainee.model.parameters())
    return Held(weights=weights, held=held, step_peak=peak - trainee.resident, process_peak=peak)


def memory_of(kind: str, options: argparse.Namespace) -> Held:
    """Measure in a fresh process."""
    command = [sys.executable, __file__, "--cache", str(options.cache), "--kind", kind, "--rank", str(options.rank)]
    command += ["--batch", str(options.batch), "--tokens", str(options.tokens)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Held(**json.loads(done.stdout.splitlines()[-1]))


def memory_table(rows: dict[str, Held], rank: int, folder: Path) -> str:
    """Megabytes, beside what the formulas say."""
    shapes, base = read_shapes(folder), rows["AdamW"]
    said = {
        "AdamW": dense(shapes, ranks=1),
        "LoGRA, others AdamW": logra(shapes, rank=rank, ranks=1, others="adamw"),
        "LoGRA, others frozen": logra(shapes, rank=rank, ranks=1, others="frozen"),
    }
    lines = [
        "| optimizer | gradients + state, MB | of AdamW | by formula, MB | off by | peak of a step above the weights, MB | of AdamW | whole process, MB | of AdamW |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, row in rows.items():
        formula = said[kind].optimizer_and_gradients
        cells = [kind, _mb(row.held), _share(row.held, base.held), _mb(formula), f"{formula / row.held - 1:+.1%}"]
        cells += [_mb(row.step_peak), _share(row.step_peak, base.step_peak)]
        cells += [_mb(row.process_peak), _share(row.process_peak, base.process_peak)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def time_table(folder: Path, options: argparse.Namespace) -> str:
    """Seconds of a step, both in turn."""
    lines = [
        "| compute | optimizer | step, s | gradient, s | update, s | of AdamW | bar |",
        "|---|---|---|---|---|---|---|",
    ]
    for bf16 in (True, False):
        shape = (options.batch, options.tokens)
        trainees = {kind: Trainee(folder, kind, options.rank, shape, bf16) for kind in KINDS[:2]}
        times: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in trainees}
        for seed in range(options.repeats + 2):
            for kind, trainee in trainees.items():
                whole = trainee.step(seed)
                if seed >= 2:
                    times[kind].append((whole, trainee.parts["gradient"], trainee.parts["update"]))
        base = statistics.median(one[0] for one in times["AdamW"])
        for kind, rows in times.items():
            whole, gradient, update = (statistics.median(column) for column in zip(*rows, strict=True))
            bar = "" if kind == "AdamW" else ("met" if whole / base <= TIME_GOAL else "not met")
            cells = ["BF16" if bf16 else "float32", kind, *(f"{one:.2f}" for one in (whole, gradient, update))]
            lines.append(f"| {' | '.join([*cells, f'{whole / base:.2f}', bar])} |")
        del trainees
    return "\n".join(lines)


def main() -> None:
    """Print the tables, and put them into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path("models"))
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    folder = prepare("smollm2-135m-instruct", options.cache)
    if options.kind:
        shape = (options.batch, options.tokens)
        print(json.dumps(asdict(measure_memory(Trainee(folder, options.kind, options.rank, shape, bf16=False)))))
        return
    run: Callable[[str], Held] = lambda kind: memory_of(kind, options)  # noqa: E731
    text = "\n\n".join([
        f"SmolLM2-135M, rank {options.rank}, {options.batch} rows of {options.tokens} tokens, a quarter of them labelled, "
        f"{torch.get_num_threads()} threads.",
        memory_table({kind: run(kind) for kind in KINDS}, options.rank, folder),
        time_table(folder, options),
    ])  # fmt: skip
    print(text)
    if options.write:
        replace_between(options.write, "logra, memory and time", text)


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}"


if __name__ == "__main__":
    main()

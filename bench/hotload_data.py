"""Pairs of consecutive BF16 states for the codec bench: a real model after real optimiser steps, and synthetic ones."""

import gzip
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from groundhop.training.hotload.bits import TensorSpec
from groundhop.training.hotload.checkpoint import open_checkpoint

SIGMA = 0.02
RATES = (1e-6, 3e-6, 1e-5)
STEPS = 5
TOKENS, ROWS = 256, 2
"""Length and number of the texts in a training batch."""
MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two states of the same tensors, one after the other."""

    name: str
    specs: tuple[TensorSpec, ...]
    old: tuple[NDArray[np.uint16], ...]
    new: tuple[NDArray[np.uint16], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one state."""
        return sum(bits.nbytes for bits in self.old)


def adam_like(elements: int, rate: float, seed: int = 0) -> Pair:
    """Weights ~ N(0, 0.02) in FP32, moved by rate * clip(0.7 * N(0, 1), -3, 3); both sides rounded to BF16."""
    random = np.random.default_rng(seed)
    weights = random.standard_normal(elements, np.float32) * np.float32(SIGMA)
    moves = np.clip(np.float32(0.7) * random.standard_normal(elements, np.float32), -3, 3) * np.float32(rate)
    return _synthetic(f"Adam-like {rate:.0e}", to_bf16(weights), to_bf16(weights + moves))


def uniform(elements: int, share: float, seed: int = 0) -> Pair:
    """`share` of the weights, drawn evenly, moved by 1, 2 or 3 steps of BF16 up or down."""
    random = np.random.default_rng(seed)
    old = to_bf16(random.standard_normal(elements, np.float32) * np.float32(SIGMA))
    chosen = np.flatnonzero(random.random(elements) < share)
    moves = random.integers(1, 4, chosen.size) * random.choice([-1, 1], chosen.size)
    new = old.copy()
    new[chosen] += moves.astype(np.uint16)
    return _synthetic(f"uniform {share:.0%}", old, new)


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to the nearest BF16, ties to even; finite values only."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + ((bits >> 16) & 1) + 0x7FFF) >> 16).astype(np.uint16)


def real(cache: Path, models: Path, rate: float) -> Iterator[Pair]:
    """SmolLM2-135M before and after each of some AdamW steps at `rate`; trained once, then kept in `cache`."""
    changes = cache / f"adamw-{rate:.0e}.npz"
    if not changes.exists():
        _train(changes, models, rate)
    base = open_checkpoint(_model(models))
    specs = tuple(base.specs[name] for name in sorted(base.specs))
    old = tuple(base.bits(spec.name).copy() for spec in specs)
    held = np.load(changes)
    for step in range(1, STEPS + 1):
        new = tuple(bits.copy() for bits in old)
        for place, bits in enumerate(new):
            bits[held[f"positions-{step}-{place}"]] = held[f"values-{step}-{place}"]
        yield Pair(f"SmolLM2 {rate:.0e}, step {step}", specs, old, new)
        old = new


def _synthetic(name: str, old: NDArray[np.uint16], new: NDArray[np.uint16]) -> Pair:
    return Pair(name, (TensorSpec(name="weight", dtype="BF16", shape=(old.size,)),), (old,), (new,))


def _model(models: Path) -> Path:
    from groundhop.training.models import prepare

    return prepare(MODEL, models)


def _train(changes: Path, models: Path, rate: float) -> None:
    """AdamW (0.9, 0.95) without decay on an FP32 master; keeps what changed in its BF16 rounding at each step."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(_model(models), dtype=torch.float32)
    named = sorted(dict(model.named_parameters()).items())
    if [name for name, _ in named] != sorted(open_checkpoint(_model(models)).specs):
        raise SystemExit("the model's parameters are not the checkpoint's tensors")
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0, foreach=False)
    held: dict[str, NDArray[Any]] = {}
    before = [_rounded(tensor) for _, tensor in named]
    for step, tokens in enumerate(_batches(models), start=1):
        optimiser.zero_grad(set_to_none=True)
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        for place, (_, tensor) in enumerate(named):
            after = _rounded(tensor)
            positions = np.flatnonzero(after != before[place])
            held[f"positions-{step}-{place}"] = positions.astype(np.uint32)
            held[f"values-{step}-{place}"] = after[positions]
            before[place] = after
        print(f"AdamW {rate:.0e}: step {step} of {STEPS}", flush=True)
    changes.parent.mkdir(parents=True, exist_ok=True)
    work = changes.with_suffix(".tmp.npz")
    np.savez(work, **held)  # type: ignore[arg-type]
    work.replace(changes)


def _rounded(tensor: Any) -> NDArray[np.uint16]:
    import torch

    bits: NDArray[np.uint16] = tensor.detach().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).reshape(-1)
    return bits


def _batches(models: Path) -> Iterator[Any]:
    """Other text of the small web for each step."""
    import torch
    from transformers import AutoTokenizer

    web = Path(__file__).parents[1] / "data" / "small-web.warc.gz"
    with gzip.open(web, "rt", encoding="utf-8", errors="ignore") as file:
        text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", file.read(4_000_000)))
    need = STEPS * ROWS * TOKENS
    tokens = AutoTokenizer.from_pretrained(_model(models))(text[400_000 : 400_000 + 12 * need])["input_ids"][:need]
    yield from torch.tensor(tokens).reshape(STEPS, ROWS, TOKENS)

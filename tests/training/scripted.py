"""A server made of a tiny model in this process, and an agent that writes what a script says."""

import asyncio
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from groundhop.records import Rollout, Task, TokenSpan, ToolCall, Verdict
from groundhop.training.hotload.named import Whole
from groundhop.training.hotload.refit import RefitResult


def task(name: str) -> Task:
    return Task(id=name, question="q", answer="a", kind="text", aliases=(), bucket="medium", passed=4, judged=8)


class Blank:
    """Stands for a server where log-probabilities do not matter."""

    version = "v0"

    def log_probs(self, ids: list[int]) -> list[float]:
        return [-1.0] * len(ids)


@dataclass
class Server:
    """Takes weights as a BF16 server does, and gives log-probabilities under them."""

    folder: Path
    first: int = 0
    temperature: float = 1.0
    versions: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.bfloat16).float()
        self.weights = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}

    @property
    def version(self) -> str:
        return self.versions[-1] if self.versions else "start"

    async def refit(self, named: Iterable[tuple[str, torch.Tensor]]) -> RefitResult:
        changed = total = 0
        with torch.no_grad():
            for name, weight in named:
                rounded = tensor_of(weight).to(torch.bfloat16).float()
                changed += int((rounded != self.weights[name]).sum())
                total += rounded.numel()
                self.weights[name].copy_(rounded)
            self.model.load_state_dict(self.weights, strict=False)
            self.model.tie_weights()
        self.versions.append(f"v{self.first + len(self.versions)}")
        return RefitResult(self.version, changed, total, 2 * changed, seconds=0.0, digest="")

    @torch.no_grad()
    def log_probs(self, ids: list[int]) -> list[float]:
        logits = self.model(input_ids=torch.tensor([ids])).logits[0].float() / self.temperature
        scored = torch.log_softmax(logits, -1)[:-1].gather(-1, torch.tensor(ids[1:])[:, None])
        return [0.0, *scored.squeeze(-1).tolist()]


def tensor_of(given: torch.Tensor | Whole) -> torch.Tensor:
    """What a trainer or a site of sketches gives, as a tensor; a site gives BF16 bits."""
    if isinstance(given, torch.Tensor):
        return given
    return torch.from_numpy(given.bits.view(np.int16).copy()).view(torch.bfloat16).reshape(given.shape)


Script = Callable[[str, int, int], str]
"""(task, step, repeat) to `y` right, `n` wrong, `?` no verdict, `e` error, `t` out of turns, `x` crash."""


@dataclass
class Agent:
    """Writes tokens drawn from the seed alone: prompt, a sampled turn, tool text, a sampled answer."""

    server: Server | Blank
    script: Script
    asked: list[tuple[int, str, int]] = field(default_factory=list)

    async def __call__(self, task: Task, *, repeat: int, seed: int, step: int, policy: str) -> tuple[Rollout, Verdict]:
        self.asked.append((step, task.id, repeat))
        await asyncio.sleep(0)
        fate = self.script(task.id, step, repeat)
        if fate == "x":
            raise RuntimeError("the agent broke")
        rollout = rollout_of(
            self.server, task.id, repeat, seed, stop={"e": "error", "t": "turns"}.get(fate, "answered")
        )
        correct = {"y": True, "n": False, "t": False}.get(fate)
        return rollout, Verdict(question_id=task.id, repeat=repeat, policy=policy, correct=correct, judge="script")


def rollout_of(server: Server | Blank, name: str, repeat: int, seed: int, **changed: Any) -> Rollout:
    draw = random.Random(seed)
    parts = [(0, 6), (1, 4), (0, 5), (1, draw.randrange(2, 6))]
    mask = [flag for flag, length in parts for _ in range(length)]
    ids = [draw.randrange(3, 300) for _ in mask]
    ids[-1] = 2
    scored = server.log_probs(ids)
    return Rollout(
        **{
            "question_id": name,
            "repeat": repeat,
            "policy": "grpo",
            "seed": seed,
            "messages": (),
            "token_ids": tuple(ids),
            "prompt_length": 6,
            "mask": tuple(mask),
            "log_probs": tuple(value if flag else 0.0 for value, flag in zip(scored, mask, strict=True)),
            "spans": (
                TokenSpan(start=6, end=10, version=server.version),
                TokenSpan(start=15, end=len(ids), version=server.version),
            ),
            "calls": (ToolCall(turn=0, name="search", arguments={}, outcome="ok"),),
            "stop": "answered",
            **changed,
        }
    )

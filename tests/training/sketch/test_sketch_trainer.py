"""Sketch sync behind the real optimizer: what LoGRA applied is what the site holds."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from sketch_builders import Bfloat16, Wide, bfloat16_of
from torch import nn

from groundhop.training.logra.optimizer import Logra
from groundhop.training.logra.settings import LograSettings
from groundhop.training.sketch.sender import Sender
from groundhop.training.sketch.site import Site

TARGETS = ("up_proj.weight", "down_proj.weight")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(320)
        self.up_proj = nn.Linear(320, 400, bias=False)
        self.down_proj = nn.Linear(400, 320, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.relu(self.up_proj(self.norm(values))))


@pytest.mark.parametrize("quantise", ["int8", "int16"])
def test_what_the_optimizer_applied_whole_or_in_part_is_what_the_site_holds(
    tmp_path: Path, quantise: Literal["int8", "int16"]
) -> None:
    torch.manual_seed(0)
    layer = Layer()
    settings = LograSettings(
        rank=4,
        learning_rate=0.05,
        weight_decay=0.01,
        targets=("up_proj", "down_proj"),
        quantise=quantise,
        others="adamw",
    )
    optimizer = Logra(layer, settings)
    named = list(layer.named_parameters())
    base = Bfloat16({n: bfloat16_of(w) for n, w in named}, {n: tuple(w.shape) for n, w in named})
    masters = Wide(named)
    sender = Sender(named, base, TARGETS)
    site = Site.create(tmp_path, base, TARGETS, masters)
    for number in range(4):
        layer(torch.randn(16, 320)).square().sum().backward()
        optimizer.propose()
        optimizer.apply(1.0 if number % 2 else 0.4)
        optimizer.zero_grad()
        sender.add(optimizer.last_update)
        sent = sender.send(layer.named_parameters())
        applied = site.apply(sent.content, sender.delta)
        assert (set(sent.sketched), applied.repaired) == (set(TARGETS), ())
        held = {name: whole.bits for name, whole in site.named()}
        assert all(np.array_equal(held[name], bfloat16_of(weight)) for name, weight in layer.named_parameters())

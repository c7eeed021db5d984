"""Small models and batches for LoGRA's tests, and the dense gradient to compare a sketch with."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from groundhop.training.logra.capture import Sketches, Target
from groundhop.training.logra.optimizer import Logra
from groundhop.training.logra.settings import LograSettings


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down_proj(torch.tanh(self.up_proj(self.norm(x))))
        return out


class Small(nn.Module):
    """Tokens to logits, with a tied head."""

    def __init__(self, *, vocabulary: int = 11, width: int = 6, inner: int = 9, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, inner) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.checkpointing = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        out: Tensor = self.head(x)
        return out


def small(seed: int = 0, **changed: int) -> Small:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Small(**changed)


def batch(seed: int, rows: int = 4, tokens: int = 5) -> Tensor:
    return torch.randint(0, 11, (rows, tokens + 1), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def logra(model: nn.Module, **changed: Any) -> Logra:
    settings = {"rank": 4, "targets": ("up_proj", "down_proj"), "learning_rate": 1e-2, **changed}
    return Logra(model, LograSettings(**settings))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> list[float]:
    losses = []
    for seed in seeds:
        loss = loss_of(model, batch(seed))
        loss.backward()
        optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses


def dense_gradients(ids: list[Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Gradients of a fresh `small(seed)`, summed over batches."""
    model = small(seed)
    for one in ids:
        loss_of(model, one).backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def projection(target: Target, sketches: Sketches) -> Tensor:
    """A of shape (rank, columns), in float64."""
    return target.signs.double() * sketches.rank**-0.5


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())

"""Policies small enough to check by hand, probes for them, and steps in every form."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from groundhop.training.kl.direction import DenseDirection, Direction, LowRank, LowRankDirection
from groundhop.training.kl.probe import Probe

WORDS = 40


class Table(nn.Module):
    """The logits after a token are the row of a table; `through` is applied to each token's state first."""

    def __init__(self, words: int = 11, through: nn.Module | None = None) -> None:
        super().__init__()
        self.through = through if through is not None else nn.Identity()
        self.rows = nn.Linear(words, words, bias=False)
        with torch.no_grad():
            self.rows.weight.copy_(torch.randn(words, words, generator=torch.Generator().manual_seed(1)))

    def get_output_embeddings(self) -> nn.Module:
        return self.rows

    def forward(self, input_ids: Tensor, attention_mask: Tensor, use_cache: bool) -> Any:
        states = functional.one_hot(input_ids, self.rows.in_features).to(self.rows.weight.dtype)
        return SimpleNamespace(logits=self.rows(self.through(states)))


class Lossy(nn.Module):
    """A layer that cuts derivatives off."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).detach()


class Doubling(torch.autograd.Function):
    """A kernel without a forward-mode rule."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


class Ruleless(Lossy):
    def forward(self, x: Tensor) -> Tensor:
        return Doubling.apply(x * self.weight)


def llama(*, words: int = WORDS, hidden: int = 16, weight_size: float = 0.3) -> Any:
    """Two layers with tied embeddings, and weights large enough to have opinions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=words,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=weight_size,
        attention_dropout=0.5,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return LlamaForCausalLM(config)


def probe(words: int = WORDS, rows: int = 2, tokens: int = 9, seed: int = 0) -> Probe:
    """Responses of which every second token was generated; the last row is two tokens shorter."""
    ids = torch.randint(0, words, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    attention = torch.ones_like(ids)
    attention[-1, -2:] = 0
    targets = (torch.arange(tokens) % 2 == 1).repeat(rows, 1) & attention.bool()
    return Probe(ids, attention, targets)


def noise(like: Mapping[str, Tensor], size: float = 0.01, seed: int = 5) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        name: size * torch.randn(weight.shape, generator=random, dtype=weight.dtype) for name, weight in like.items()
    }


def low_rank_parts(model: nn.Module, size: float = 0.01, rank: int = 3, seed: int = 6) -> dict[str, LowRank]:
    """Steps of ±1 projections for every linear layer but the head, as LoGRA makes them."""
    random = torch.Generator().manual_seed(seed)
    parts = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            factor = size * torch.randn(module.out_features, rank, generator=random, dtype=module.weight.dtype)
            signs = torch.randint(0, 2, (rank, module.in_features), generator=random, dtype=torch.int8) * 2 - 1
            parts[name] = LowRank(factor=factor, projection=signs)
    return parts


def in_full(parts: Mapping[str, LowRank]) -> dict[str, Tensor]:
    return {f"{name}.weight": part.factor @ part.projection.to(part.factor.dtype) for name, part in parts.items()}


def logits_at(model: nn.Module, probe: Probe) -> Tensor:
    """Logits that predict the generated tokens, the plain way, in evaluation mode."""
    was = model.training
    model.eval()
    logits = model(input_ids=probe.input_ids, attention_mask=probe.attention_mask, use_cache=False).logits
    model.train(was)
    return logits[:, :-1][probe.targets[:, 1:]].detach()


def backward(model: nn.Module, batch: Probe) -> None:
    """A gradient: of the negative log-likelihood of the generated tokens."""
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    at = batch.targets[:, 1:]
    functional.cross_entropy(logits[:, :-1][at], batch.input_ids[:, 1:][at]).backward()


def weights_of(model: nn.Module) -> dict[str, bytes]:
    return {name: weight.detach().numpy().tobytes() for name, weight in model.named_parameters()}


class LowRankSteps(torch.optim.Optimizer):
    """Proposes the same low-rank step each time."""

    def __init__(self, model: nn.Module, parts: Mapping[str, LowRank]) -> None:
        self._model, self._direction = model, LowRankDirection(parts)
        super().__init__(model.parameters(), {"lr": 1.0})

    def propose(self) -> Direction:
        return self._direction

    @torch.no_grad()
    def apply(self, alpha: float) -> None:
        for weight, step in self._direction.dense(self._model):
            weight.sub_(step, alpha=alpha)

    def abandon(self) -> None:
        pass


def dense_for(model: nn.Module, size: float = 0.01) -> DenseDirection:
    return DenseDirection(noise(dict(model.named_parameters()), size))

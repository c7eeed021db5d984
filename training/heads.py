"""Project to the vocabulary only where it is needed: with 49,152 words the last layer costs as much as many others."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def projected_only_at(model: nn.Module, wanted: Tensor) -> Iterator[None]:
    """While the block runs, `model(...)` gives logits of shape (wanted.sum(), vocabulary) for those positions only.

    `wanted` is boolean of shape (batch, tokens). The choice is made at the door of the output projection, so what a
    model does to its logits afterwards (scaling, soft caps) stays its own.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]

    def choose(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (arguments[0][wanted], *arguments[1:])

    hook = head.register_forward_pre_hook(choose)
    try:
        yield
    finally:
        hook.remove()


def log_probs_at(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor, targets: Tensor, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy (nats, without gradient) of each token where `targets` is true, in row order.

    `targets` is boolean like `input_ids` and marks tokens to be predicted; column 0 cannot be one. Both results are
    float32 of shape (targets.sum(),); logits are divided by `temperature` first, as the sampler did.
    """
    predicting = torch.zeros_like(targets)
    predicting[:, :-1] = targets[:, 1:]
    with projected_only_at(inner(model), predicting):
        logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    normaliser = torch.logsumexp(scaled, dim=-1)
    chosen = scaled.gather(-1, input_ids[:, 1:][targets[:, 1:]].unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        detached = scaled.detach() - normaliser.detach().unsqueeze(-1)
        entropy = -(detached.exp() * detached).sum(-1)
    return chosen - normaliser, entropy


def inner(model: nn.Module) -> nn.Module:
    """The model inside a data-parallel or compile wrapper."""
    while not hasattr(model, "get_output_embeddings"):
        model = model.module  # type: ignore[assignment]
    return model

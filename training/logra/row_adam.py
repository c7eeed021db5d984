"""RowAdam: one second moment for each row of a sketch, no first moment. Pure arithmetic, in both public variants.

A sketch is S = G Aᵀ of shape (rows, rank), where A is `signs / sqrt(rank)`; formulas in docs/logra.md. Moments are indexed by output row,
so they stay valid when A is drawn again.
"""

import torch
from torch import Tensor

_TINY = torch.finfo(torch.float32).tiny


def gram_norm_squared(sketch: Tensor, signs: Tensor) -> Tensor:
    """||S A||_F² as a float64 scalar, by a Gram matrix of (rank, rank): S A itself is never formed.

    `sketch` is float32 (rows, rank), `signs` ±1 of any type (rank, columns).
    """
    wide = signs.to(sketch.dtype)
    products = (sketch.T @ sketch) * (wide @ wide.T)
    return products.sum(dtype=torch.float64).clamp_min(0) / len(signs)


def row_squares(before: Tensor, sketch: Tensor, beta2: float) -> Tensor:
    """The next second moments, float32 (rows,): a running mean of each row's mean square."""
    return beta2 * before + (1 - beta2) * sketch.square().mean(dim=1)


def root_of(squares: Tensor, beta2: float, updates: int) -> Tensor:
    """Root of the second moments (rows,), freed from their start at 0; `updates` counts this one."""
    return (squares / (1 - beta2**updates)).sqrt()


def divide_(sketch: Tensor, root: Tensor, eps: float) -> Tensor:
    """Variant "plain", in place: D = S / (root + eps). Zero rows stay zero for any eps > 0."""
    return sketch.div_((root + eps).unsqueeze(1))


def rescale_(sketch: Tensor, root: Tensor, eps: float) -> Tensor:
    """Variant "scaled", in place: rows with large moments are damped, the layer's norm stays what it was.

    `eps` is a share of the mean root. A zero sketch gives a zero direction.
    """
    divisor = root + (eps * root.mean()).clamp_min(_TINY)
    scale = divisor.min() / divisor
    scale = scale / scale.square().mean().sqrt()
    norm = torch.linalg.vector_norm(sketch)
    sketch.mul_(scale.unsqueeze(1))
    return sketch.mul_(norm / torch.linalg.vector_norm(sketch).clamp_min(_TINY))

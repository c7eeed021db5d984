"""RowAdam's arithmetic by hand and against formulas written out in float64 (T-L2, T-L4)."""

import pytest
import torch
from torch import Tensor

from groundhop.training.logra import row_adam


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def signs(rank: int, columns: int) -> Tensor:
    return (random(rank, columns, seed=9) > 0).to(torch.int8) * 2 - 1


def test_the_gram_norm_is_that_of_the_product() -> None:
    sketch, drawn = random(7, 4), signs(4, 33)
    product = sketch.double() @ drawn.double() / 2
    assert row_adam.gram_norm_squared(sketch, drawn).item() == pytest.approx(product.square().sum().item(), rel=1e-6)


def test_the_second_moment_is_a_running_mean_of_the_rows_mean_squares() -> None:
    found = row_adam.row_squares(torch.tensor([1.0, 8.0]), torch.tensor([[3.0, 1.0], [0.0, 0.0]]), 0.75)
    assert found.tolist() == [0.75 * 1 + 0.25 * 5, 6.0]


def test_the_first_root_is_the_rows_root_mean_square() -> None:
    squares = row_adam.row_squares(torch.zeros(1), torch.tensor([[3.0, 1.0]]), 0.95)
    assert row_adam.root_of(squares, 0.95, 1).item() == pytest.approx(5**0.5)


def test_plain_divides_each_row_by_its_root() -> None:
    found = row_adam.divide_(torch.tensor([[2.0, -4.0], [3.0, 0.0]]), torch.tensor([1.5, 2.0]), 0.5)
    assert found.tolist() == [[1.0, -2.0], [1.2000000476837158, 0.0]]


def test_scaled_follows_the_formula_and_keeps_the_layers_norm() -> None:
    sketch, root, eps = random(5, 3), random(5, seed=1).abs(), 1e-3
    s, r = sketch.double(), root.double()
    divisor = r + eps * r.mean()
    scale = divisor.min() / divisor
    wanted = (scale / scale.square().mean().sqrt()).unsqueeze(1) * s
    wanted *= s.norm() / wanted.norm()
    found = row_adam.rescale_(sketch.clone(), root, eps).double()
    assert torch.allclose(found, wanted, rtol=1e-5, atol=0)
    assert found.norm().item() == pytest.approx(s.norm().item(), rel=1e-6)


def test_scaled_damps_the_row_with_the_larger_moment() -> None:
    found = row_adam.rescale_(torch.ones(2, 2), torch.tensor([1.0, 4.0]), 0.0)
    assert (found[0, 0] / found[1, 0]).item() == pytest.approx(4.0)


@pytest.mark.parametrize("turn", [row_adam.divide_, row_adam.rescale_])
@pytest.mark.parametrize("root", [0.0, 1.0])
def test_a_zero_sketch_gives_a_zero_direction(turn: object, root: float) -> None:
    assert torch.equal(turn(torch.zeros(3, 2), torch.full((3,), root), 1e-8), torch.zeros(3, 2))  # type: ignore[operator]

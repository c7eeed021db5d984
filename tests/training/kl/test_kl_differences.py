"""Finite differences agree with the derivative, or say that they cannot be trusted."""

import pytest
import torch
from small_policies import Lossy, Table, dense_for, llama, low_rank_parts, probe, weights_of
from torch import Tensor, nn

from groundhop.errors import InputError, StepError
from groundhop.training.kl.differences import moved, predict_by_differences
from groundhop.training.kl.direction import DenseDirection, LowRankDirection
from groundhop.training.kl.predict import predict


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0])
def test_differences_equal_the_derivative_at_every_size_of_step(size: float) -> None:
    model, batch = llama(), probe()
    direction, kept = LowRankDirection(low_rank_parts(model, size)), list[Tensor]()
    by_jvp = predict(model, direction, [batch], temperature=0.8, kept=kept)
    assert predict_by_differences(model, direction, [batch], temperature=0.8) == pytest.approx(by_jvp, rel=0.01)


def test_differences_need_no_derivative_and_keep_the_logits() -> None:
    model, kept = Table(through=Lossy(11)), list[Tensor]()
    found = predict_by_differences(model, DenseDirection({"through.weight": torch.ones(11)}), [probe(11)], kept=kept)
    assert found > 0 and [len(one) for one in kept] == [4, 3]


def test_weights_come_back_bit_for_bit_also_after_an_exception() -> None:
    model = llama()
    with torch.no_grad():
        model.model.norm.weight[:2] = torch.tensor([-0.0, 1e-30])
    before, direction = weights_of(model), dense_for(model)
    predict_by_differences(model, direction, [probe()])
    with pytest.raises(KeyboardInterrupt), moved(model, direction, 3.0):
        assert weights_of(model) != before
        raise KeyboardInterrupt
    assert weights_of(model) == before


class Stairs(nn.Module):
    """Nothing but jumps: no distance tells a slope."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 30).round() / 30


class StairTable(Table):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(11, 11, bias=False)
        self.rows.weight.data.zero_().add_(torch.linspace(0, 1, 121).view(11, 11))
        self.rows.register_forward_hook(lambda _, __, output: Stairs()(output))


def test_two_distances_that_disagree_are_an_error() -> None:
    table = StairTable()
    before = weights_of(table)
    with pytest.raises(StepError, match="disagree"):
        predict_by_differences(table, DenseDirection({"rows.weight": torch.eye(11)}), [probe(11)])
    assert weights_of(table) == before


def test_a_step_without_influence_is_zero() -> None:
    table = Table()
    assert predict_by_differences(table, DenseDirection({"rows.weight": torch.ones(11, 11)}), [probe(11)]) < 1e-9


def test_weights_in_bfloat16_are_refused() -> None:
    table = Table().bfloat16()
    with pytest.raises(InputError, match="float32"):
        predict_by_differences(table, dense_for(table), [probe(11)])


def test_a_step_that_is_not_a_number_predicts_no_number() -> None:
    table = Table()
    step = torch.full((11, 11), torch.nan)
    assert predict_by_differences(table, DenseDirection({"rows.weight": step}), [probe(11)]) != 0

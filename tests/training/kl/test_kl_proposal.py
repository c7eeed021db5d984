"""Any optimizer can propose: a whole step is its own step, none is no step, and half of one is half."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_policies import Table, backward, probe, weights_of
from torch import nn

from groundhop.errors import InputError, StepError
from groundhop.training.kl.proposal import DenseProposer

OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda parameters: torch.optim.AdamW(parameters, lr=0.03, weight_decay=0.1),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.03, amsgrad=True, foreach=True),
    lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9),
]


def bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(part) for key, part in value.items()}
    return [bits(part) for part in value] if isinstance(value, list) else value


def model_with_gradient(seed: int = 0) -> Table:
    torch.manual_seed(9)
    model = Table(through=nn.Linear(11, 11))
    backward(model, probe(11, seed=seed))
    return model


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_whole_step_is_the_plain_optimizers_bit_for_bit(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    plain, split = model_with_gradient(), model_with_gradient()
    stepped, inner = make(plain.parameters()), make(split.parameters())
    proposer = DenseProposer(inner, split)
    for seed in range(3):
        for model in (plain, split):
            model.zero_grad()
            backward(model, probe(11, seed=seed))
        stepped.step()
        proposer.propose()
        proposer.apply(1.0)
    assert weights_of(split) == weights_of(plain)
    assert bits(inner.state_dict()) == bits(stepped.state_dict())


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 2])
def test_an_abandoned_step_leaves_weights_and_state(make: Callable[[Any], torch.optim.Optimizer], steps: int) -> None:
    model = model_with_gradient()
    optimizer = make(model.parameters())
    for _ in range(steps):
        optimizer.step()
    before = weights_of(model), bits(optimizer.state_dict())
    proposer = DenseProposer(optimizer, model)
    proposer.propose()
    assert weights_of(model) == before[0] and bits(optimizer.state_dict()) != before[1]
    proposer.abandon()
    assert (weights_of(model), bits(optimizer.state_dict())) == before


@pytest.mark.parametrize("alpha", [0.0, 0.25, 3.0])
def test_a_share_of_the_step_is_that_share(alpha: float) -> None:
    model, whole = model_with_gradient(), model_with_gradient()
    start = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    torch.optim.AdamW(whole.parameters(), lr=0.03).step()
    proposer = DenseProposer(torch.optim.AdamW(model.parameters(), lr=0.03), model)
    proposer.propose()
    proposer.apply(alpha)
    for (name, weight), (_, after) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        assert torch.allclose(weight, start[name] + alpha * (after - start[name]), rtol=0, atol=1e-6)


def test_the_direction_is_what_the_step_takes_off() -> None:
    model, whole = model_with_gradient(), model_with_gradient()
    torch.optim.SGD(whole.parameters(), lr=0.5).step()
    direction = DenseProposer(torch.optim.SGD(model.parameters(), lr=0.5), model).propose()
    for weight, step in direction.dense(model):
        assert weight.grad is not None
        assert torch.allclose(step, 0.5 * weight.grad, atol=1e-6)


def test_parameters_without_a_gradient_stay_out() -> None:
    model = model_with_gradient()
    model.rows.weight.grad = None
    proposer = DenseProposer(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5), model)
    assert all(weight is not model.rows.weight for weight, _ in proposer.propose().dense(model))


class Failing(torch.optim.AdamW):
    """Breaks down after it has moved the weights."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        raise RuntimeError("broke down")


def test_an_optimizer_that_fails_leaves_weights_and_state() -> None:
    model = model_with_gradient()
    optimizer = Failing(model.parameters(), lr=0.1)
    before = weights_of(model), bits(optimizer.state_dict())
    with pytest.raises(RuntimeError, match="broke down"):
        DenseProposer(optimizer, model).propose()
    assert (weights_of(model), bits(optimizer.state_dict())) == before


@pytest.mark.parametrize("alpha", [float("nan"), float("inf"), -0.1])
def test_a_share_that_is_none_is_refused(alpha: float) -> None:
    model = model_with_gradient()
    before = weights_of(model)
    proposer = DenseProposer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    proposer.propose()
    with pytest.raises(StepError):
        proposer.apply(alpha)
    assert weights_of(model) == before


def test_calls_out_of_order_are_refused() -> None:
    model = model_with_gradient()
    proposer = DenseProposer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(StepError, match="nothing is proposed"):
        proposer.apply(1.0)
    proposer.propose()
    with pytest.raises(StepError, match="proposed already"):
        proposer.propose()


def test_a_parameter_of_another_model_is_refused() -> None:
    model = model_with_gradient()
    with pytest.raises(InputError, match=r"\(11, 11\)"):
        DenseProposer(torch.optim.SGD([model.rows.weight], lr=0.1), nn.Linear(3, 3)).propose()

"""What ends a run and what costs it one step."""

from typing import Any

import pytest
import torch
from torch import nn

from groundhop.errors import NotFiniteError, StepError
from groundhop.training.kl.budget import Budget
from groundhop.training.optimizers import SparingControlled


def controlled(error: Exception) -> tuple[nn.Linear, SparingControlled]:
    def predict(*_: Any, **__: Any) -> float:
        raise error

    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    steps = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = SparingControlled(steps, model, Budget(1e-3, 1e-3, 1), predict=predict)
    optimizer.probe = lambda: ()
    return model, optimizer


def test_a_step_that_is_not_finite_is_left_out() -> None:
    model, optimizer = controlled(NotFiniteError("nan"))
    before = model.weight.detach().clone()
    optimizer.step()
    assert torch.equal(model.weight, before) and model.weight.grad is None


def test_a_model_whose_steps_can_never_be_predicted_stops_the_run() -> None:
    _, optimizer = controlled(StepError("the JVP is lost"))
    with pytest.raises(StepError, match="JVP is lost"):
        optimizer.step()

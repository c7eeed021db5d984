"""Every step keeps to its budget, and one that cannot be predicted is not taken."""

import copy
import io
from typing import Any

import pytest
import torch
from small_policies import LowRankSteps, Table, backward, llama, logits_at, low_rank_parts, probe, weights_of
from torch.optim.lr_scheduler import LambdaLR

from groundhop.errors import InputError, StepError
from groundhop.training.kl.budget import Budget
from groundhop.training.kl.controlled import Controlled
from groundhop.training.kl.differences import predict_by_differences
from groundhop.training.kl.predict import divergences


def controlled(model: Any, budget: float = 1e-4, rate: float = 1e-3, **keywords: Any) -> Controlled:
    optimizer = Controlled(
        torch.optim.AdamW(model.parameters(), lr=rate), model, Budget(budget, budget, 1), measure=True, **keywords
    )
    optimizer.probe = lambda: [probe()]
    return optimizer


@pytest.mark.parametrize("budget", [1e-6, 1e-5, 1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("form", ["adamw", "low rank"])
def test_realised_kl_is_within_5_percent_of_the_budget(form: str, budget: float) -> None:
    model, batch = llama(words=640, hidden=64, weight_size=0.1).eval(), probe(640, rows=8, tokens=24)
    backward(model, batch)
    steps: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if form == "low rank":
        steps = LowRankSteps(model, low_rank_parts(model))
    optimizer = Controlled(steps, model, Budget(budget, budget, 1), measure=True, alpha_max=1e9)
    optimizer.probe = lambda: [batch]
    optimizer.step()
    last = optimizer.last
    assert last is not None and last.realised is not None
    assert last.predicted * last.alpha**2 == pytest.approx(budget, rel=1e-9)
    assert last.realised == pytest.approx(budget, rel=0.05)


@pytest.mark.parametrize("form", ["adamw", "low rank"])
def test_where_the_prediction_is_off_the_step_is_tried_and_scaled_again(form: str) -> None:
    # Small weights: at a KL of 0.01 the second order is off by far more than 5 %.
    realised_by: dict[bool, float] = {}
    for measure in (False, True):
        model, batch = llama(words=640, hidden=64, weight_size=0.02).eval(), probe(640, rows=8, tokens=24)
        backward(model, batch)
        steps: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if form == "low rank":
            steps = LowRankSteps(model, low_rank_parts(model, size=0.1))
        optimizer = Controlled(steps, model, Budget(1e-2, 1e-2, 1), measure=measure, alpha_max=1e9)
        optimizer.probe = lambda batch=batch: [batch]  # type: ignore[misc]
        before = logits_at(model, batch)
        optimizer.step()
        count = len(before)
        realised_by[measure] = float(divergences(before, logits_at(model, batch), 1.0)) / count
        assert optimizer.last is not None
        found = optimizer.last.realised
        assert found is None if not measure else found == pytest.approx(realised_by[True], rel=1e-3)
    assert abs(realised_by[False] / 1e-2 - 1) > 0.05
    assert realised_by[True] == pytest.approx(1e-2, rel=0.05)


def test_an_update_over_its_budget_is_scaled_and_one_within_it_is_taken_whole_bit_for_bit() -> None:
    plain, small, large = llama(), llama(), llama()
    for model in (plain, small, large):
        model.eval()
        backward(model, probe())
    torch.optim.AdamW(plain.parameters(), lr=1e-2).step()
    tight, wide = controlled(small, 1e-6, rate=1e-2), controlled(large, 1e6, rate=1e-2)
    tight.step()
    wide.step()
    assert weights_of(large) == weights_of(plain)
    assert tight.last is not None and wide.last is not None and tight.last.realised is not None
    assert tight.last.predicted == wide.last.predicted > 1e-6 * 1.05
    assert tight.last.realised < 1e-6 * 1.05 and tight.last.alpha < 1.0 == wide.last.alpha


def snapshot(model: Any, optimizer: Controlled) -> Any:
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    return weights_of(model), saved.getvalue()


def break_gradient(model: Any, _: Controlled) -> None:
    model.model.norm.weight.grad[3] = torch.nan


def break_probe(_: Any, optimizer: Controlled) -> None:
    optimizer.probe = None


def break_forward(model: Any, _: Controlled) -> None:
    model.model.norm.register_forward_hook(lambda _, __, output: output.detach())


@pytest.mark.parametrize(
    ("harm", "error"), [(break_gradient, StepError), (break_probe, InputError), (break_forward, StepError)]
)
def test_k5_k7_a_step_that_cannot_be_predicted_changes_nothing(harm: Any, error: type[Exception]) -> None:
    model = llama()
    optimizer = controlled(model)
    backward(model, probe())
    optimizer.step()
    backward(model, probe(seed=1))
    before = snapshot(model, optimizer)
    harm(model, optimizer)
    with pytest.raises(error):
        optimizer.step()
    assert snapshot(model, optimizer) == before


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    def make(model: Any) -> tuple[Controlled, LambdaLR]:
        optimizer = Controlled(torch.optim.AdamW(model.parameters(), lr=1e-2), model, Budget(1e-4, 1e-6, 5))
        optimizer.probe = lambda: [probe()]
        return optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def train(model: Any, optimizer: Controlled, schedule: LambdaLR, seeds: range) -> None:
        for seed in seeds:
            model.zero_grad()
            backward(model, probe(seed=seed))
            optimizer.step()
            schedule.step()
            optimizer.budget.observe(1e-7 * seed)

    model = llama().eval()
    optimizer, schedule = make(model)
    train(model, optimizer, schedule, range(2))
    again = copy.deepcopy(model)
    saved = io.BytesIO()
    torch.save([optimizer.state_dict(), schedule.state_dict()], saved)
    train(model, optimizer, schedule, range(2, 4))

    resumed, its_schedule = make(again)
    saved.seek(0)
    states = torch.load(saved, weights_only=True)
    resumed.load_state_dict(states[0])
    its_schedule.load_state_dict(states[1])
    train(again, resumed, its_schedule, range(2, 4))
    assert weights_of(again) == weights_of(model)
    assert resumed.last == optimizer.last and resumed.budget.current == optimizer.budget.current


def test_a_schedule_and_accelerate_see_the_optimizer_inside() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    model = llama()
    optimizer = controlled(model)
    schedule = LambdaLR(optimizer, lambda step: 1.0 if step == 0 else 0.5)
    backward(model, probe())
    try:
        outer = Accelerator(cpu=True).prepare(optimizer)
        outer.step()
        outer.zero_grad()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    schedule.step()
    assert optimizer.wrapped.param_groups[0]["lr"] == 5e-4 == outer.param_groups[0]["lr"]
    assert len(optimizer.wrapped.state) == len(optimizer.state) == len(list(model.parameters()))
    assert all(weight.grad is None for weight in model.parameters())


def test_a_step_without_a_gradient_is_not_probed() -> None:
    model = Table()
    optimizer = Controlled(torch.optim.AdamW(model.parameters()), model, Budget(1e-4, 1e-4, 1))
    before = weights_of(model)
    optimizer.step()
    assert weights_of(model) == before
    assert optimizer.last is not None and (optimizer.last.predicted, optimizer.last.realised) == (0.0, None)


def test_each_step_spends_one_update_of_the_schedule() -> None:
    model = Table()
    optimizer = Controlled(torch.optim.SGD(model.parameters(), lr=10.0), model, Budget(1e-4, 1e-6, 1))
    optimizer.probe = lambda: [probe(11)]
    spent = []
    for _ in range(2):
        backward(model, probe(11))
        optimizer.step()
        assert optimizer.last is not None
        spent.append(optimizer.last.predicted * optimizer.last.alpha**2)
    assert spent == pytest.approx([1e-4, 1e-6], rel=1e-9)


def test_finite_differences_can_take_the_derivatives_place() -> None:
    by_jvp, by_differences = llama().eval(), llama().eval()
    optimizers = [controlled(by_jvp, 1e-6), controlled(by_differences, 1e-6, predict=predict_by_differences)]
    for model, optimizer in zip((by_jvp, by_differences), optimizers, strict=True):
        backward(model, probe())
        optimizer.step()
    first, second = (optimizer.last for optimizer in optimizers)
    assert first is not None and second is not None
    assert second.alpha == pytest.approx(first.alpha, rel=0.01) and second.realised is not None


def test_a_closure_is_run_once_with_gradients() -> None:
    model = Table()
    optimizer = Controlled(torch.optim.SGD(model.parameters(), lr=0.1), model, Budget(1e-4, 1e-4, 1))
    optimizer.probe = lambda: [probe(11)]
    seen = []

    def closure() -> float:
        optimizer.zero_grad()
        backward(model, probe(11))
        seen.append(1)
        return 0.5

    assert optimizer.step(closure) == 0.5
    assert seen == [1] and optimizer.last is not None and optimizer.last.predicted > 0

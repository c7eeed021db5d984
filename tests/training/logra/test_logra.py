"""The optimizer: how far it moves (T-L5), what survives a failure (T-L4), resume (T-L6), clipping, integers, schedules, a toy task (T-L12)."""

import copy
import math
from typing import Any

import pytest
import torch
from sketched import Small, batch, dense_gradients, logra, loss_of, projection, same, small, train, weights_of
from torch import Tensor

from groundhop.errors import ConfigError, StepError
from groundhop.training.logra.optimizer import Logra
from groundhop.training.logra.settings import LograSettings
from groundhop.training.logra.signs import projection_seed, sign_matrix
from groundhop.training.sketch.quantise import apply_exact


def ready(**changed: Any) -> tuple[Small, Logra]:
    """A model with a gradient collected, after one step."""
    model = small()
    optimizer = logra(model, **{"others": "adamw", **changed})
    train(model, optimizer, range(1))
    loss_of(model, batch(1)).backward()
    return model, optimizer


def state_of(optimizer: Logra) -> dict[str, Any]:
    return copy.deepcopy({**optimizer.state_dict(), "seeds": optimizer.sketches.seeds})


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def target_norm(model: Small, before: dict[str, Tensor] | None = None) -> float:
    after = weights_of(model)
    names = [name for name in after if "proj.weight" in name]
    return math.sqrt(sum((after[n] - (before[n] if before else 0)).double().square().sum().item() for n in names))


@pytest.mark.parametrize("quantise", ["none", "int16", "int8"])
def test_scaled_moves_the_targets_by_the_rate_times_their_norm(quantise: str) -> None:
    model, optimizer = ready(learning_rate=3e-3, quantise=quantise)
    before, norm = weights_of(model), target_norm(model)
    optimizer.step()
    wanted = {"none": 1e-4, "int16": 1e-4, "int8": 1e-2}[quantise]
    assert target_norm(model, before) / norm == pytest.approx(3e-3, rel=wanted)


def test_plain_follows_the_formula_over_two_steps() -> None:
    model = small()
    optimizer = logra(model, variant="plain", learning_rate=0.02, weight_decay=0.1, beta2=0.9, max_norm=None)
    target = optimizer.sketches.targets[0]
    weight, squares = target.weight.detach().double().clone(), 0.0
    for update in (1, 2):
        loss_of(model, batch(update)).backward()
        sketch, a = target.sketch.double().clone(), projection(target, optimizer.sketches)
        squares = 0.9 * squares + 0.1 * sketch.square().mean(1, keepdim=True)
        root = (squares / (1 - 0.9**update)).sqrt()
        weight = (1 - 0.02 * 0.1) * weight - 0.02 * (sketch / (root + 1e-8)) @ a
        optimizer.step()
    assert torch.allclose(target.weight.double(), weight, rtol=1e-5, atol=1e-7)


def test_the_norm_and_the_clip_are_those_of_sketched_and_dense_gradients_together() -> None:
    model = small()
    optimizer = logra(model, others="adamw", max_norm=0.01)
    loss_of(model, batch(1)).backward()
    dense, square = dense_gradients([batch(1)]), 0.0
    targets = {target.name: projection(target, optimizer.sketches) for target in optimizer.sketches.targets}
    for name, gradient in dense.items():
        a = targets.get(name)
        square += (gradient.double() @ a.T @ a if a is not None else gradient.double()).square().sum().item()
    optimizer.step()
    clipped = model.embed.weight.grad
    assert clipped is not None
    assert optimizer.last_norm == pytest.approx(math.sqrt(square), rel=1e-5)
    assert torch.allclose(clipped, dense["embed.weight"] * (0.01 / math.sqrt(square)), rtol=1e-4, atol=1e-9)


def test_moments_are_those_of_the_clipped_sketches() -> None:
    squares = {}
    for max_norm in (None, 0.01):
        model = small()
        optimizer = logra(model, max_norm=max_norm)
        train(model, optimizer, range(1))
        squares[max_norm] = optimizer.param_groups[0]["row_squares"]
    assert torch.allclose(squares[0.01], squares[None] * (0.01 / optimizer.last_norm) ** 2, rtol=1e-5, atol=0)


@pytest.mark.parametrize("where", ["sketch", "others"])
def test_a_gradient_that_is_not_finite_raises_and_changes_nothing(where: str) -> None:
    model, optimizer = ready()
    before, state = weights_of(model), state_of(optimizer)
    if where == "sketch":
        optimizer.sketches.flat[3] = math.nan
    else:
        model.embed.weight.grad[0, 0] = math.inf  # type: ignore[index]
    with pytest.raises(StepError, match="norm is"):
        optimizer.step()
    assert same(weights_of(model), before)
    assert equal(state_of(optimizer), state)


def test_after_a_refused_step_the_next_one_is_as_if_nothing_had_been() -> None:
    model, optimizer = ready()
    twin, other = ready()
    optimizer.sketches.flat[3] = math.nan
    with pytest.raises(StepError):
        optimizer.step()
    for one in (model, twin):
        one.zero_grad()
    other.zero_grad()
    train(model, optimizer, range(5, 7))
    train(twin, other, range(5, 7))
    assert same(weights_of(model), weights_of(twin))


@pytest.mark.parametrize("variant", ["scaled", "plain"])
def test_a_step_without_gradients_leaves_weights_and_state_alone(variant: str) -> None:
    model = small()
    optimizer = logra(model, variant=variant, others="adamw", weight_decay=0.1)
    train(model, optimizer, range(2))
    before, state = weights_of(model), state_of(optimizer)
    optimizer.step()
    assert same(weights_of(model), before)
    assert equal(state_of(optimizer), state)


@pytest.mark.parametrize("quantise", ["none", "int8"])
@pytest.mark.parametrize("refresh", [0, 1, 3])
def test_a_resumed_run_equals_one_that_was_not_interrupted_bit_for_bit(refresh: int, quantise: str) -> None:
    settings = {"others": "adamw", "refresh": refresh, "quantise": quantise}
    model = small()
    optimizer = logra(model, **settings)
    train(model, optimizer, range(4))
    saved, weights = state_of(optimizer), copy.deepcopy(model.state_dict())
    train(model, optimizer, range(4, 8))
    other = small(seed=5)
    resumed = logra(other, **settings)
    train(other, resumed, range(2))
    other.load_state_dict(weights)
    resumed.load_state_dict(saved)
    train(other, resumed, range(4, 8))
    assert same(weights_of(other), weights_of(model))
    assert equal(state_of(resumed), state_of(optimizer))


def test_a_saved_state_does_not_change_with_later_steps() -> None:
    _, optimizer = ready()
    saved = optimizer.state_dict()["param_groups"][0]
    kept = copy.deepcopy(saved)
    optimizer.step()
    assert equal(saved, kept)


@pytest.mark.parametrize(
    ("changed", "says"),
    [({"rank": 8}, "rank 4, not 8"), ({"seed": 1}, "seed 42, not 1"), ({"targets": ("up_proj",)}, "targets")],
)
def test_a_state_made_with_other_settings_is_refused(changed: dict[str, Any], says: str) -> None:
    _, optimizer = ready()
    saved = optimizer.state_dict()
    with pytest.raises(ConfigError, match=says):
        logra(small(), **{"others": "adamw", **changed}).load_state_dict(saved)


@pytest.mark.parametrize(("refresh", "expected"), [(0, [0, 0, 0, 0, 0]), (1, [0, 1, 2, 3, 4]), (2, [0, 0, 2, 2, 4])])
def test_projections_are_drawn_again_as_often_as_set_and_never_between_collecting_and_stepping(
    refresh: int, expected: list[int]
) -> None:
    model = small()
    optimizer = logra(model, refresh=refresh)
    target = optimizer.sketches.targets[0]
    for update in expected:
        wanted = sign_matrix(projection_seed(42, update, target.name), 4, target.columns)
        assert torch.equal(target.signs, torch.from_numpy(wanted))
        loss_of(model, batch(1)).backward()
        assert torch.equal(target.signs, torch.from_numpy(wanted))
        optimizer.step()


def test_frozen_others_stay_as_they_are_and_all_targets_move() -> None:
    model = small()
    optimizer = logra(model, others="frozen")
    before = weights_of(model)
    train(model, optimizer, range(3))
    assert {n for n, w in weights_of(model).items() if torch.equal(w, before[n])} == {
        name for name in before if "proj.weight" not in name
    }


def test_others_by_adamw_equal_torchs_adamw() -> None:
    model, twin = small(), small()
    settings = {"others": "adamw", "learning_rate": 0.0, "others_learning_rate": 1e-2, "others_weight_decay": 0.1}
    optimizer = logra(model, **settings, max_norm=None)
    matrix, vectors = [twin.embed.weight], [w for n, w in twin.named_parameters() if w.dim() == 1]
    groups = [{"params": matrix, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    train(model, optimizer, range(4))
    train(twin, torch.optim.AdamW(groups, lr=1e-2), range(4))
    assert same(weights_of(model), weights_of(twin))


def test_a_schedule_reaches_targets_and_others() -> None:
    model, optimizer = ready(learning_rate=1e-2, others_learning_rate=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    before, norm = weights_of(model), target_norm(model)
    assert {group["lr"] for group in optimizer.param_groups} == {5e-3, 5e-4}
    optimizer.step()
    schedule.step()
    assert target_norm(model, before) / norm == pytest.approx(5e-3, rel=1e-4)


@pytest.mark.parametrize("quantise", ["int8", "int16"])
def test_what_is_left_for_the_sender_repeats_the_weights_bit_for_bit(quantise: str) -> None:
    model, optimizer = ready(quantise=quantise, weight_decay=0.3)
    replayed = {name: weight for name, weight in weights_of(model).items() if "proj.weight" in name}
    optimizer.step()
    assert optimizer.last_update.keys() == replayed.keys()
    for name, update in optimizer.last_update.items():
        signs = torch.from_numpy(sign_matrix(update.seed, update.rank, update.columns))
        apply_exact(replayed[name], update.quantised, signs, update.decay)
    assert same({name: weights_of(model)[name] for name in replayed}, replayed)


def test_a_step_that_was_not_taken_leaves_nothing_for_the_sender() -> None:
    _, optimizer = ready(quantise="int16")
    optimizer.step()
    optimizer.sketches.flat[3] = math.nan
    with pytest.raises(StepError):
        optimizer.step()
    assert optimizer.last_update == {}


@pytest.mark.parametrize("quantise", ["none", "int16"])
def test_a_whole_proposal_applied_is_the_plain_step_bit_for_bit(quantise: str) -> None:
    model, optimizer = ready(quantise=quantise)
    twin, other = ready(quantise=quantise)
    before = weights_of(model)
    optimizer.propose()
    assert same(weights_of(model), before)
    optimizer.apply(1.0)
    other.step()
    assert same(weights_of(model), weights_of(twin))
    assert equal(state_of(optimizer), state_of(other))


@pytest.mark.parametrize("quantise", ["none", "int16"])
def test_half_a_proposal_moves_every_weight_half_as_far_decay_included(quantise: str) -> None:
    settings = {"quantise": quantise, "weight_decay": 5.0, "learning_rate": 0.1, "others_learning_rate": 0.1}
    model, optimizer = ready(**settings)
    twin, other = ready(**settings)
    before = weights_of(model)
    optimizer.propose()
    optimizer.apply(0.5)
    other.step()
    whole = weights_of(twin)
    for name, weight in weights_of(model).items():
        assert torch.allclose(2 * (weight - before[name]), whole[name] - before[name], rtol=1e-3, atol=2e-5), name


def test_an_abandoned_proposal_leaves_everything_as_it_was() -> None:
    model, optimizer = ready()
    before, state = weights_of(model), state_of(optimizer)
    optimizer.propose()
    optimizer.abandon()
    assert same(weights_of(model), before)
    assert equal(state_of(optimizer), state)


def test_between_proposal_and_application_nothing_else_is_allowed() -> None:
    model, optimizer = ready()
    optimizer.propose()
    for forbidden in (optimizer.state_dict, optimizer.propose, optimizer.step, loss_of(model, batch(1)).backward):
        with pytest.raises(StepError):
            forbidden()
    for alpha in (math.nan, -1.0):
        with pytest.raises(StepError, match="share of the step"):
            optimizer.apply(alpha)
    optimizer.apply(1.0)
    with pytest.raises(StepError, match="nothing was proposed"):
        optimizer.apply(1.0)


def test_with_rank_as_large_as_the_columns_it_learns_a_toy_task_as_dense_row_scaling_does() -> None:
    sketched, dense = [], []
    for seed in range(3):
        model, twin = small(seed), small(seed)
        frozen = logra(model, variant="plain", rank=9, learning_rate=0.01, beta2=0.9, max_norm=None)
        sketched.append(train(model, frozen, [0] * 60)[-1])  # type: ignore[arg-type]
        weights = [weight for name, weight in twin.named_parameters() if "proj.weight" in name]
        dense.append(train(twin, DenseRows(weights), [0] * 60)[-1])  # type: ignore[arg-type]
    start = loss_of(small(), batch(0)).item()
    assert max(dense) < 0.75 * start
    assert sum(sketched) / 3 == pytest.approx(sum(dense) / 3, rel=0.1)


class DenseRows(torch.optim.Optimizer):
    """W <- W - lr G / (root of the running mean of each row's mean square): what a sketch of full rank stands for."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__(weights, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            state["t"] = state.get("t", 0) + 1
            state["v"] = 0.9 * state.get("v", 0) + 0.1 * weight.grad.square().mean(1, keepdim=True)
            weight -= 0.01 * weight.grad / ((state["v"] / (1 - 0.9 ** state["t"])).sqrt() + 1e-8)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 0},
        {"variant": "fast"},
        {"beta2": 1.0},
        {"targets": ()},
        {"max_norm": 0.0},
        {"refresh": -1},
        {"quantise": "int4"},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="LoGRA"):
        LograSettings(**wrong)

"""Sketches equal the dense gradient's projection however the backward pass runs (T-L1), are unbiased (T-L3), named alike (T-L8)."""

from collections.abc import Callable

import pytest
import torch
from sketched import Small, batch, dense_gradients, logra, loss_of, projection, small, weights_of
from torch import Tensor, nn

from groundhop.errors import ConfigError, StepError
from groundhop.training.logra.capture import Sketches, canonical_name, find_targets
from groundhop.training.logra.optimizer import Logra
from groundhop.training.logra.signs import projection_seed

TARGETS = ("up_proj", "down_proj")


def worst(optimizer: Logra, dense: dict[str, Tensor]) -> float:
    """The largest relative error of a sketch."""
    errors = []
    for target in optimizer.sketches.targets:
        wanted = dense[target.name].double() @ projection(target, optimizer.sketches).T
        errors.append(((target.sketch.double() - wanted).norm() / wanted.norm()).item())
    return max(errors)


def collect(model: Small, ids: list[Tensor]) -> None:
    for one in ids:
        loss_of(model, one).backward()


@pytest.mark.parametrize("capture", ["activation", "gradient"])
@pytest.mark.parametrize("others", ["frozen", "adamw"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_sketch_is_the_dense_gradient_times_the_projection_over_accumulated_batches(
    capture: str, others: str, checkpointing: bool
) -> None:
    model = small()
    model.checkpointing = checkpointing
    optimizer, ids = logra(model, capture=capture, others=others), [batch(seed) for seed in range(3)]
    collect(model, ids)
    assert worst(optimizer, dense_gradients(ids)) < 1e-6


@pytest.mark.parametrize("capture", ["activation", "gradient"])
def test_a_repeated_backward_pass_counts_twice(capture: str) -> None:
    model = small()
    optimizer = logra(model, capture=capture)
    loss = loss_of(model, batch(1))
    loss.backward(retain_graph=True)
    loss.backward()
    assert worst(optimizer, dense_gradients([batch(1), batch(1)])) < 1e-6


def test_under_bf16_autocast_a_sketch_is_as_good_as_bf16_gradients_are() -> None:
    model = small()
    optimizer = logra(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model, batch(1))
    loss.backward()
    assert 1e-5 < worst(optimizer, dense_gradients([batch(1)])) < 0.03


@pytest.mark.parametrize("capture", ["activation", "gradient"])
def test_target_weights_never_keep_a_gradient_and_the_others_get_theirs(capture: str) -> None:
    model = small()
    logra(model, capture=capture, others="adamw")
    collect(model, [batch(1)])
    has = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert has == {name for name in weights_of(model) if "proj.weight" not in name}


def test_the_forward_pass_does_not_change_by_a_bit() -> None:
    before = small()(batch(1))
    model = small()
    logra(model)
    assert torch.equal(model(batch(1)), before)


def test_a_pass_without_gradients_collects_nothing() -> None:
    model = small()
    optimizer = logra(model)
    with torch.no_grad():
        model(batch(1))
    model(batch(2))
    assert not optimizer.sketches.flat.any()


def test_projected_gradients_average_to_the_gradient() -> None:
    model = small(layers=1)
    dense = {name: weight.grad for name, weight in _backward(small(layers=1)).named_parameters()}
    sketches = Sketches(model, ("up_proj",), 4, "activation")
    (target,) = sketches.targets
    total, draws = torch.zeros(target.rows, target.columns, dtype=torch.float64), 2000
    for draw in range(draws):
        sketches.draw({target.name: projection_seed(1, draw, target.name)})
        _backward(model)
        total += target.sketch.double() @ projection(target, sketches)
    wanted = dense[target.name]
    assert wanted is not None
    # The relative variance of one draw is about (columns - 1) / rank = 1.25.
    assert ((total / draws - wanted).norm() / wanted.norm()).item() < 3 * (1.25 / draws) ** 0.5


def _backward(model: Small) -> Small:
    loss_of(model, batch(1)).backward()
    return model


def test_a_weight_that_two_modules_share_collects_from_both() -> None:
    def shared() -> Small:
        model = small()
        model.layers[1].up_proj.weight = model.layers[0].up_proj.weight  # type: ignore[union-attr]
        return model

    plain = _backward(shared())
    dense = {name: weight.grad for name, weight in plain.named_parameters() if weight.grad is not None}
    model = shared()
    optimizer = logra(model)
    _backward(model)
    assert len(optimizer.sketches.targets) == 3
    assert worst(optimizer, dense) < 1e-6


def test_a_backward_pass_through_an_earlier_steps_forward_pass_is_refused() -> None:
    model = small()
    optimizer = logra(model)
    loss = loss_of(model, batch(1))
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(StepError, match="earlier step"):
        loss.backward()


def test_a_closed_capture_leaves_the_model_alone() -> None:
    model = small()
    optimizer = logra(model, others="adamw")
    optimizer.close()
    _backward(model)
    assert not optimizer.sketches.flat.any()


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.up_proj",
        "module.layers.0.up_proj",
        "_orig_mod.layers._fsdp_wrapped_module.0._checkpoint_wrapped_module.up_proj",
    ],
)
def test_names_lose_their_wrappers(name: str) -> None:
    assert canonical_name(name) == "layers.0.up_proj"


def test_a_wrapped_model_has_the_same_target_names() -> None:
    wrapped = nn.ModuleDict({"module": small()})
    assert [t.name for t in find_targets(wrapped, TARGETS, "activation")] == [
        t.name for t in find_targets(small(), TARGETS, "activation")
    ]


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def with_doubled() -> Small:
    model = small()
    model.layers[0].up_proj = Doubled(6, 9)  # type: ignore[union-attr]
    return model


@pytest.mark.parametrize(
    ("make", "targets", "says"),
    [
        (small, ("q_proj",), "no module of the model is named"),
        (small, ("norm",), "float32 weight with two axes"),
        (lambda: small().bfloat16(), TARGETS, "float32 weight with two axes, got torch.bfloat16"),
        (with_doubled, TARGETS, "Doubled is no plain nn.Linear"),
        (small, ("head",), "shared with embed"),
    ],
)
def test_a_target_that_cannot_be_captured_is_refused(
    make: Callable[[], Small], targets: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        find_targets(make(), targets, "activation")


def test_gradient_capture_takes_any_module_and_shared_weights() -> None:
    model = with_doubled()
    twin = with_doubled()
    twin.load_state_dict(model.state_dict())
    dense = {name: weight.grad for name, weight in _backward(twin).named_parameters() if weight.grad is not None}
    optimizer = logra(model, capture="gradient", targets=(*TARGETS, "head"))
    _backward(model)
    dense["head.weight"] = dense["embed.weight"]
    assert worst(optimizer, dense) < 1e-6


def test_gradient_capture_notices_that_a_weight_was_replaced() -> None:
    model = small()
    optimizer = logra(model, capture="gradient")
    model.layers[0].up_proj.weight = nn.Parameter(torch.ones(9, 6))  # type: ignore[union-attr]
    _backward(model)
    with pytest.raises(ConfigError, match="need LoGRA after fully_shard"):
        optimizer.step()


def test_float16_is_refused_because_its_loss_scale_would_be_taken_for_gradient() -> None:
    model = small()
    logra(model)
    with pytest.raises(ConfigError, match="loss scale"), torch.autocast("cpu", dtype=torch.float16):
        model(batch(1)[:, :-1])


def test_frozen_weights_are_trained_by_gradient_capture_too() -> None:
    model = small().requires_grad_(False)
    optimizer = logra(model, capture="gradient")
    _backward(model)
    assert worst(optimizer, dense_gradients([batch(1)])) < 1e-6

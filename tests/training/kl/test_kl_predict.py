"""Predicted KL against exact KL and against torch's own JVP; nothing that was masked counts; the model is left as it was."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from small_policies import (
    WORDS,
    Lossy,
    Ruleless,
    Table,
    dense_for,
    in_full,
    llama,
    logits_at,
    low_rank_parts,
    noise,
    probe,
    weights_of,
)
from torch import Tensor, nn

from groundhop.errors import InputError, StepError
from groundhop.training.kl.differences import moved
from groundhop.training.kl.direction import DenseDirection, JointDirection, LowRank, LowRankDirection
from groundhop.training.kl.predict import divergences, half_variances, predict, realised
from groundhop.training.kl.probe import Probe


def half_variance_by_hand(logits: Tensor, slopes: Tensor) -> float:
    p = logits.double().softmax(-1)
    return float(((p * slopes.double() ** 2).sum(-1) - (p * slopes.double()).sum(-1) ** 2).mean() / 2)


def table_and_step() -> tuple[Table, Tensor]:
    table = Table()
    return table, noise({"rows.weight": table.rows.weight}, 1.0)["rows.weight"]


def test_k1_exact_kl_of_a_table_has_slope_2_and_the_predicted_height() -> None:
    table, step = table_and_step()
    probes, kept = [probe(11)], list[Tensor]()
    predicted = predict(table, DenseDirection({"rows.weight": step}), probes, kept=kept)
    start, exact = table.rows.weight.detach().clone(), []
    for alpha in (1e-3, 1e-2, 1e-1):
        with torch.no_grad():
            table.rows.weight.copy_(start - alpha * step)
        exact.append(realised(table, probes, kept) / alpha**2)
    assert exact == pytest.approx([predicted] * 3, rel=0.05)
    assert exact[:2] == pytest.approx([predicted] * 2, rel=5e-3)


def test_k1_prediction_equals_the_variance_worked_out_by_hand() -> None:
    table, step = table_and_step()
    batch = probe(11)
    before = batch.input_ids[:, :-1][batch.targets[:, 1:]]
    by_hand = half_variance_by_hand(table.rows.weight.detach().T[before], step.T[before])
    assert predict(table, DenseDirection({"rows.weight": step}), [batch]) == pytest.approx(by_hand, rel=1e-5)


def test_k2_a_temperature_divides_logits_and_steps_alike() -> None:
    table, step = table_and_step()
    hot = predict(table, DenseDirection({"rows.weight": step}), [probe(11)], temperature=1.7)
    with torch.no_grad():
        table.rows.weight.div_(1.7)
    assert hot == pytest.approx(predict(table, DenseDirection({"rows.weight": step / 1.7}), [probe(11)]), rel=1e-5)


def test_k3_a_constant_added_to_logits_or_to_their_step_changes_nothing() -> None:
    table, step = table_and_step()
    plain = predict(table, DenseDirection({"rows.weight": step}), [probe(11)])
    with torch.no_grad():
        table.rows.weight.add_(3.0)
    assert predict(table, DenseDirection({"rows.weight": step - 2.0}), [probe(11)]) == pytest.approx(plain, rel=1e-5)
    assert predict(table, DenseDirection({"rows.weight": torch.full_like(step, 2.0)}), [probe(11)]) < 1e-12


def test_k4_only_what_predicts_a_generated_token_counts() -> None:
    table, step = table_and_step()
    batch = probe(11)
    used = torch.zeros_like(batch.targets)
    used[:, :-1] = batch.targets[:, 1:]
    other = Probe(torch.where(used, batch.input_ids, 0), batch.attention_mask, batch.targets)
    with torch.no_grad():
        table.rows.weight[:, 0] = 0.0
    direction = DenseDirection({"rows.weight": step})
    assert predict(table, direction, [batch]) == predict(table, direction, [other])
    silent = Probe(batch.input_ids, batch.attention_mask, torch.zeros_like(batch.targets))
    assert predict(table, direction, [batch, silent]) == predict(table, direction, [batch])


def test_k4_padding_and_tokens_after_the_last_target_do_not_reach_a_llama() -> None:
    model, batch = llama(), probe()
    changed = batch.input_ids.clone()
    changed[0, -1], changed[1, -2:] = 7, 9
    other = Probe(changed, batch.attention_mask, batch.targets)
    direction = DenseDirection({"model.norm.weight": noise(dict(model.named_parameters()))["model.norm.weight"]})
    assert predict(model, direction, [other]) == pytest.approx(predict(model, direction, [batch]), rel=1e-6)


def test_chunks_of_positions_do_not_change_the_sum() -> None:
    random = torch.Generator().manual_seed(2)
    logits, slopes = (torch.randn(150, 13, generator=random) for _ in range(2))
    by_hand = half_variance_by_hand(logits, slopes) * 150
    assert float(half_variances(logits, slopes, 1.0)) == pytest.approx(by_hand, rel=1e-9)


def test_words_that_are_impossible_before_and_after_add_nothing() -> None:
    before, after = torch.tensor([[1.0, 2.0, -torch.inf]]), torch.tensor([[0.0, 3.0, -torch.inf]])
    p, q = before.double().softmax(-1)[0, :2], after.double().softmax(-1)[0, :2]
    assert float(divergences(before, after, 1.0)) == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-12)


def jvp_of(model: Any, batch: Probe, steps: dict[str, Tensor]) -> Tensor:
    """Derivative of the logits by torch.func.jvp, with every weight a plain function argument."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model.eval()
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    tangents = {name: -steps.get(name, torch.zeros_like(weight)) for name, weight in weights.items()}

    def logits(values: dict[str, Tensor]) -> Tensor:
        keywords = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "use_cache": False}
        found: Tensor = torch.func.functional_call(model, values, kwargs=keywords).logits
        return found[:, :-1][batch.targets[:, 1:]]

    with sdpa_kernel(SDPBackend.MATH):
        return torch.func.jvp(logits, (weights,), (tangents,))[1].detach()


@pytest.mark.parametrize("form", ["low", "dense", "joint"])
def test_every_form_of_a_step_predicts_what_torchs_own_jvp_gives(form: str) -> None:
    model, batch = llama(), probe()
    parts = low_rank_parts(model)
    others = noise({n: w for n, w in model.named_parameters() if n not in in_full(parts)})
    low, dense = LowRankDirection(parts), DenseDirection(others)
    direction = {"low": low, "dense": dense, "joint": JointDirection(low, dense)}[form]
    steps = {**(in_full(parts) if form != "dense" else {}), **(others if form != "low" else {})}
    found = predict(model, direction, [batch])
    assert found == pytest.approx(half_variance_by_hand(logits_at(model, batch), jvp_of(model, batch, steps)), rel=1e-4)


def test_a_low_rank_step_of_a_tied_head_moves_the_embedding_too() -> None:
    model, batch = llama(), probe()
    random = torch.Generator().manual_seed(4)
    part = LowRank(0.01 * torch.randn(WORDS, 2, generator=random), torch.randn(2, 16, generator=random))
    full = DenseDirection({"lm_head.weight": part.factor @ part.projection})
    plain = predict(model, full, [batch])
    assert predict(model, LowRankDirection({"lm_head": part}), [batch]) == pytest.approx(plain, rel=1e-5)
    head_only = half_variance_by_hand(
        logits_at(model, batch), head_inputs(model, batch) @ (part.factor @ part.projection).T
    )
    assert abs(plain - head_only) > 0.05 * plain


def head_inputs(model: Any, batch: Probe) -> Tensor:
    with torch.no_grad():
        states = model.eval().model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
    return states[:, :-1][batch.targets[:, 1:]]


def test_tied_modules_named_together_are_moved_once() -> None:
    torch.manual_seed(0)
    first = nn.Linear(11, 11)
    model = Table(through=nn.Sequential(first, nn.ReLU(), nn.Linear(11, 11)))
    model.through[2].weight = first.weight
    part = LowRank(torch.arange(11.0)[:, None], torch.ones(1, 11, dtype=torch.int8))
    by_both_names = predict(model, LowRankDirection({"through.0": part, "through.2": part}), [probe(11)])
    full = DenseDirection({"through.0.weight": part.factor @ torch.ones(1, 11)})
    assert by_both_names == pytest.approx(predict(model, full, [probe(11)]), rel=1e-5)
    other = LowRank(part.factor * 2, part.projection)
    with pytest.raises(InputError, match="shares its weight"):
        predict(model, LowRankDirection({"through.0": part, "through.2": other}), [probe(11)])


class Attending(nn.Module):
    """Calls torch's attention itself, not by way of a model's configuration."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]


def test_no_fused_attention_is_used_while_probing() -> None:
    model, seen = llama(), list[str]()
    hook = model.model.norm.register_forward_hook(lambda *_: seen.append(model.config._attn_implementation))
    predict(model, LowRankDirection(low_rank_parts(model)), [probe(rows=1)])
    hook.remove()
    assert seen == ["eager"]
    torch.manual_seed(0)
    table = Table(through=nn.Sequential(nn.Linear(11, 11), Attending()))
    assert predict(table, DenseDirection({"through.0.weight": torch.eye(11)}), [probe(11)]) > 0


def test_autocast_around_the_model_or_inside_of_it_changes_no_prediction() -> None:
    model, batch = llama(), probe()
    direction = LowRankDirection(low_rank_parts(model))
    plain = predict(model, direction, [batch])
    with torch.autocast("cpu", torch.bfloat16):
        assert predict(model, direction, [batch]) == plain
    with prepared(model):
        rounded, before = model.forward, list[Tensor]()
        assert predict(model, direction, [batch], kept=before) == plain
        assert realised(model, [batch], before) == 0.0
        assert model.forward is rounded


@contextmanager
def prepared(model: Any) -> Iterator[None]:
    """As the Trainer hands a model to accelerate under BF16."""
    try:
        yield Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def state_of(model: Any) -> Any:
    flags = [(one.training, getattr(one, "gradient_checkpointing", None)) for one in model.modules()]
    identities = [id(weight) for weight in model.parameters()]
    hooks = sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules())
    return weights_of(model), identities, flags, model.config._attn_implementation, hooks


@pytest.mark.parametrize("fails", [False, True])
def test_k7_weights_mode_and_attention_are_the_same_afterwards_also_after_an_exception(fails: bool) -> None:
    model, batch = llama(), probe()
    model.train()
    model.gradient_checkpointing_enable()
    model.model.layers[0].eval()
    model.model.layers[1].mlp.requires_grad_(False)
    before = state_of(model)
    direction = JointDirection(
        LowRankDirection({"model.layers.0.mlp.up_proj": low_rank_parts(model)["model.layers.0.mlp.up_proj"]}),
        DenseDirection({"lm_head.weight": torch.ones(WORDS, 16).cumsum(0) * 1e-3}),
    )
    if fails:
        stop = model.model.norm.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            predict(model, direction, [batch])
        stop.remove()
    else:
        predict(model, direction, [batch])
    assert before == state_of(model)
    assert before[3] != "eager" and before[2][0] == (True, None)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("layer", "reason"), [(Lossy(11), "no derivative comes out"), (Ruleless(11), "forward mode AD")]
)
def test_a_layer_that_loses_the_derivative_is_named(layer: nn.Module, reason: str) -> None:
    model = Table(through=nn.Sequential(nn.Linear(11, 11), layer))
    direction = DenseDirection({"through.0.weight": torch.ones(11, 11)})
    before = weights_of(model)
    with pytest.raises(StepError, match=rf"JVP is lost in module 'through.1': .*{reason}"):
        predict(model, direction, [probe(11)])
    assert weights_of(model) == before


def test_a_step_that_is_not_a_number_predicts_no_number() -> None:
    table, step = table_and_step()
    step[0, 0] = torch.nan
    assert predict(table, DenseDirection({"rows.weight": step}), [probe(11)]) != pytest.approx(0, abs=1e300)


def test_without_a_generated_token_there_is_no_prediction() -> None:
    table, step = table_and_step()
    batch = probe(11)
    silent = Probe(batch.input_ids, batch.attention_mask, torch.zeros_like(batch.targets))
    with pytest.raises(InputError, match="no generated token"):
        predict(table, DenseDirection({"rows.weight": step}), [silent])


def test_a_first_column_that_nothing_predicts_is_refused() -> None:
    ids = torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(InputError, match="column 0"):
        Probe(ids, ids, torch.tensor([[True, False, False]]))


@pytest.mark.parametrize(
    ("direction", "message"),
    [
        (DenseDirection({"nowhere": torch.ones(2)}), "'nowhere' of shape .2,., got none"),
        (DenseDirection({"rows.weight": torch.ones(2)}), "got .11, 11."),
        (LowRankDirection({"rows": LowRank(torch.ones(11, 2), torch.ones(2, 10))}), r"shape \(11, 10\)"),
        (LowRankDirection({"nowhere": LowRank(torch.ones(11, 2), torch.ones(2, 11))}), "'nowhere', got none"),
        (
            JointDirection(
                LowRankDirection({"rows": LowRank(torch.ones(11, 2), torch.ones(2, 11))}),
                DenseDirection({"rows.weight": torch.ones(11, 11)}),
            ),
            "a low-rank step and a full one",
        ),
    ],
)
def test_a_step_for_a_weight_that_is_not_there_is_refused(direction: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        predict(Table(), direction, [probe(11)])


def test_a_direction_of_zeros_is_zero_and_one_of_nans_is_not() -> None:
    model = Table()
    zero = LowRankDirection({"rows": LowRank(torch.zeros(11, 2), torch.ones(2, 11))})
    assert zero.is_zero and JointDirection(zero, DenseDirection({})).is_zero
    assert not JointDirection(zero, DenseDirection({"rows.weight": torch.full((11, 11), torch.nan)})).is_zero
    assert not dense_for(model).is_zero


RANK = """
import sys, torch, torch.distributed as dist
rank, file, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
sys.path.insert(0, folder)
from small_policies import Table, dense_for, probe
from groundhop.errors import GroundhopError
from groundhop.training.kl.predict import predict, realised
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
table, kept = Table(), []
probes = [probe(11, rows=2, seed=rank)] if rank else [probe(11, rows=1, seed=5), probe(11, rows=1, seed=6)]
print(predict(table, dense_for(table), probes, kept=kept))
table.rows.weight.data += 0.01 * torch.eye(11)
print(realised(table, probes, kept))
try:
    print(predict(table, dense_for(table), [] if rank else [None]))
except AttributeError:
    print("failed here")
from torch import nn
from torch.distributed.fsdp import fully_shard
from groundhop.errors import InputError
from groundhop.training.kl.direction import DenseDirection, LowRank, LowRankDirection
torch.manual_seed(0)
table = Table(through=nn.Linear(11, 11))
step = LowRank(torch.arange(11.0)[:, None], torch.ones(1, 11, dtype=torch.int8))
print(predict(table, LowRankDirection({"through": step}), [probe(11)]))
fully_shard(table.through)
fully_shard(table)
print(predict(table, LowRankDirection({"through": step}), [probe(11)]))
try:
    predict(table, DenseDirection({"through.weight": torch.ones(11, 11)}), [probe(11)])
except InputError as error:
    print(error)
"""


def test_k6_two_processes_predict_and_measure_what_one_does_also_with_sharded_weights(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "meet"), str(Path(__file__).parent)], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=500)[0].split("\n") for rank in ranks]
    table, kept = Table(), list[Tensor]()
    probes = [probe(11, rows=1, seed=5), probe(11, rows=1, seed=6), probe(11, rows=2, seed=1)]
    alone = predict(table, dense_for(table), probes, kept=kept)
    table.rows.weight.data += 0.01 * torch.eye(11)
    for first, second, *_ in said:
        assert float(first) == pytest.approx(alone, rel=1e-12)
        assert float(second) == pytest.approx(realised(table, probes, kept), rel=1e-12)
    # A process that fails tells the other one, which would wait for ever.
    assert (said[0][2], said[1][2]) == ("failed here", "nan")
    # Row shards of FSDP2 take low-rank steps, and no full ones.
    for _, _, _, whole, sharded, refused, *_ in said:
        assert float(sharded) == pytest.approx(float(whole), rel=1e-6)
        assert "DTensor" in refused


@pytest.mark.parametrize("form", ["low rank", "dense", "joint"])
def test_a_shifted_model_computes_as_if_the_step_were_taken_and_is_itself_again(form: str) -> None:
    model, batch = llama().eval(), probe()
    parts = low_rank_parts(model)
    full = {"model.embed_tokens.weight": noise(dict(model.named_parameters()))["model.embed_tokens.weight"]}
    low, dense = LowRankDirection(parts), DenseDirection(full)
    direction = {"low rank": low, "dense": dense, "joint": JointDirection(low, dense)}[form]
    before, plain = state_of(model), logits_at(model, batch)
    with direction.shift(model, 0.7):
        shifted = logits_at(model, batch)
    assert state_of(model) == before
    with moved(model, direction, 0.7):
        expected = logits_at(model, batch)
    torch.testing.assert_close(shifted, expected, rtol=1e-5, atol=1e-5)
    assert float((shifted - plain).abs().max()) > 1e-2

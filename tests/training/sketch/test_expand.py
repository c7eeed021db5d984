"""numpy's side of a step against torch's: the same bits, in any order of summation, for any numbers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sketch_builders import Trainer

from groundhop.errors import InputError
from groundhop.training.logra.signs import sign_matrix, sign_tensor
from groundhop.training.sketch.expand import Step, bfloat16, check_step, digest_signs, expand, rounded, widened
from groundhop.training.sketch.quantise import apply_exact, quantise
from groundhop.training.sketch.sender import step_of


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.array_equal(one.view(np.uint32), other.view(np.uint32)))


def shuffled(master: np.ndarray, step: Step, order: np.random.Generator) -> np.ndarray:
    """The step with the product's terms in another order, and its rows and columns cut into other pieces."""
    signs = sign_matrix(step.seed, step.rank, master.shape[1]).astype(np.float32)
    terms = order.permutation(step.rank)
    total = np.zeros(master.shape, np.float32)
    for piece in np.array_split(terms, order.integers(1, step.rank + 1)):
        for columns in np.array_split(np.arange(master.shape[1]), order.integers(1, 9)):
            total[:, columns] += step.integers[:, piece].astype(np.float32) @ signs[piece][:, columns]
    after = master * np.float32(step.decay) if step.decay != 1.0 else master.copy()
    return after - total * np.exp2(step.exponents.astype(np.float32))[:, None]


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("decay", [1.0, float(np.float32(0.9997))])
def test_t_l9_twenty_steps_give_the_trainers_bits_with_other_threads_and_chunks(bits: int, decay: float) -> None:
    trainer = Trainer(bits=bits, rank=64, decay=decay)
    order = np.random.default_rng(7)
    masters = {name: trainer.weights[name].numpy().copy() for name in ("layer.0.weight", "layer.1.weight")}
    others = dict(masters)
    threads = torch.get_num_threads()
    try:
        for number in range(20):
            torch.set_num_threads(1 + number % 2)
            for name, update in trainer.step().items():
                masters[name] = expand(masters[name], step_of(update))
                others[name] = shuffled(others[name], step_of(update), order)
    finally:
        torch.set_num_threads(threads)
    for name, master in masters.items():
        assert same(master, trainer.weights[name].numpy())
        assert same(others[name], master)
        assert np.array_equal(rounded(master, "BF16"), trainer.canonical()[name])


def hostile(rows: int, columns: int) -> torch.Tensor:
    """Weights of every size: subnormal, huge, infinite, zeros of both signs."""
    raw = np.random.default_rng(3).integers(0, 1 << 32, rows * columns, dtype=np.uint32).view(np.float32)
    raw = np.where(np.isnan(raw), np.float32(-0.0), raw)
    raw[:6] = [np.inf, -np.inf, 1e-45, -1e-45, 3.4e38, 0.0]
    return torch.from_numpy(raw.reshape(rows, columns))


@pytest.mark.parametrize("bits", [8, 16])
def test_hostile_weights_and_rows_of_every_size_give_torchs_bits(bits: int) -> None:
    weight = hostile(40, 50)
    master = weight.numpy().copy()
    factor = torch.randn(40, 8, generator=torch.Generator().manual_seed(2))
    quantised = quantise(factor * torch.exp2(torch.arange(-140.0, 100.0, 6.0)).unsqueeze(1), bits)  # type: ignore[arg-type]
    step = Step(9, 0.5, quantised.integers.numpy(), quantised.exponents.numpy(), b"")
    apply_exact(weight, quantised, sign_tensor(9, 8, 50, "cpu"), 0.5)
    assert same(expand(master, step), weight.numpy())


def test_rounding_to_bfloat16_is_torchs_for_all_that_is_a_number() -> None:
    wide = np.random.default_rng(4).integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    edges = np.arange(1 << 16, dtype=np.uint32) << 16
    wide = np.concatenate([wide, edges, edges | 0x7FFF, edges | 0x8000, edges | 0x8001])
    number = ~np.isnan(wide.view(np.float32))
    wanted = torch.from_numpy(wide.view(np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)
    got = bfloat16(wide)
    assert np.array_equal(got[number], wanted[number])
    assert bool((got[~number] == 0x7FC0).all())


def test_a_master_from_bfloat16_rounds_back_to_it() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    bits = bits[(bits & 0x7FFF) <= 0x7F80]
    assert np.array_equal(rounded(widened(bits, "BF16", (1, bits.size)), "BF16"), bits)


def test_signs_of_either_side_have_one_digest() -> None:
    assert digest_signs(sign_matrix(11, 7, 30)) == digest_signs(sign_tensor(11, 7, 30, "cpu").numpy())
    assert digest_signs(sign_matrix(11, 7, 30)) != digest_signs(sign_matrix(12, 7, 30))


def plain(**changes: object) -> Step:
    step = Step(1, 1.0, np.ones((3, 2), np.int16), np.zeros(3, np.int16), b"")
    return replace(step, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (plain(exponents=np.full(3, 101, np.int16)), "exponents"),
        (plain(exponents=np.full(3, -127, np.int16)), "exponents"),
        (plain(exponents=np.zeros(2, np.int16)), "3 rows"),
        (plain(integers=np.full((3, 512), -32768, np.int16)), "2\\^24"),
        (plain(decay=0.1), "float32 decay"),
        (plain(decay=float("nan")), "float32 decay"),
    ],
)
def test_a_step_that_could_round_is_refused(step: Step, message: str) -> None:
    check_step(plain(), (3, 4), "w")
    with pytest.raises(InputError, match=message):
        check_step(step, (3, 4), "w")

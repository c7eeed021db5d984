"""Factors as integers: how near they are, that their products are exact, and that settings cannot change that."""

import pytest
import torch

from groundhop.errors import InputError
from groundhop.training.logra.signs import sign_tensor
from groundhop.training.sketch.quantise import Quantised, apply_exact, most_integer, quantise

BITS = (8, 16)


def factor(rows: int, rank: int, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes, one of zeros, one that lies half way above the largest integer."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-100, 80, (rows, 1), generator=generator).float())
    made = torch.randn(rows, rank, generator=generator) * sizes
    made[0] = 0.0
    made[1] = 127.5 * 2.0**-9
    return made


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rank", [1, 8, 64, 700])
def test_rows_are_rounded_to_the_finest_power_of_two_at_which_they_fit(bits: int, rank: int) -> None:
    given = factor(40, rank).double()
    got = quantise(given.float(), bits)
    steps, most = torch.exp2(got.exponents.double()), most_integer(bits, rank)
    assert int(got.integers.abs().max()) <= most
    assert bool(((got.factor().double() - given).abs().amax(dim=1) <= steps / 2).all())
    filled = given.abs().amax(dim=1) > 0
    assert bool(((given.abs().amax(dim=1) / (steps / 2)).round() > most)[filled].all())


@pytest.mark.parametrize(("bits", "least", "most"), [(8, 0.004, 0.02), (16, 1e-5, 1e-4)])
def test_the_error_of_a_gaussian_factor_is_that_of_its_bits(bits: int, least: float, most: float) -> None:
    given = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    error = (quantise(given, bits).factor() - given).norm() / given.norm()
    assert least < float(error) < most


@pytest.mark.parametrize("bits", BITS)
def test_tiny_rows_lose_precision_and_not_their_bound(bits: int) -> None:
    got = quantise(torch.tensor([[2.0**-126, 2.0**-140]]), bits)
    assert (got.integers.tolist(), got.exponents.tolist()) == ([[1, 0]], [-126])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 3e38])
def test_what_cannot_be_an_integer_times_a_power_is_refused(bits: int, wrong: float) -> None:
    with pytest.raises(InputError, match="finite"):
        quantise(torch.tensor([[1.0, wrong]]), bits)


@pytest.mark.parametrize("bits", BITS)
def test_a_shards_rows_come_out_as_the_whole_factors_do(bits: int) -> None:
    given = factor(20, 8)
    whole, part = quantise(given, bits), quantise(given[7:13], bits)
    assert torch.equal(whole.integers[7:13], part.integers)
    assert torch.equal(whole.exponents[7:13], part.exponents)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_the_product_is_exact_whatever_precision_is_set(bits: int, precision: str) -> None:
    got, signs = quantise(factor(33, 256), bits), sign_tensor(5, 256, 70, "cpu")
    wanted = (got.integers.double() @ signs.double()) * torch.exp2(got.exponents.double()).unsqueeze(1)
    weight = torch.zeros(33, 70)
    torch.set_float32_matmul_precision(precision)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            apply_exact(weight, got, signs)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(weight.double(), -wanted)


def test_sums_that_float32_cannot_hold_are_refused() -> None:
    integers = torch.full((1, 513), 32767, dtype=torch.int16)
    with pytest.raises(InputError, match="2\\^24"):
        apply_exact(
            torch.zeros(1, 4), Quantised(integers, torch.zeros(1, dtype=torch.int16)), sign_tensor(1, 513, 4, "cpu")
        )


@pytest.mark.parametrize("rank", [513, 5000])
def test_a_high_rank_takes_smaller_integers(rank: int) -> None:
    got = quantise(torch.ones(2, rank), 16)
    assert int(got.integers.to(torch.int32).abs().sum(dim=1).max()) < 1 << 24


def test_another_shape_or_type_is_refused() -> None:
    got, signs = quantise(torch.ones(3, 2), 8), sign_tensor(1, 2, 4, "cpu")
    for weight in (torch.zeros(3, 5), torch.zeros(2, 4), torch.zeros(3, 4, dtype=torch.bfloat16)):
        with pytest.raises(InputError, match="float32 weight"):
            apply_exact(weight, got, signs)

"""A trainer's tensors: names, shapes, types and tied heads."""

from typing import Any

import numpy as np
import pytest
from memory_fleet import HeldWeights

from groundhop.errors import InputError
from groundhop.training.hotload.bits import TensorSpec
from groundhop.training.hotload.named import EMBEDDING, TIED_HEAD, Given, cast, matched

torch = pytest.importorskip("torch")


def base(*names: str, tied: bool = True) -> HeldWeights:
    specs = {name: TensorSpec(name=name, dtype="BF16", shape=(3,)) for name in names}
    arrays = {name: np.array([1, 2, 3], np.uint16) for name in names}
    if not tied:
        arrays[TIED_HEAD] += np.uint16(1)
    return HeldWeights(arrays, specs)


def tensor(*values: float) -> Any:
    return torch.tensor(values, dtype=torch.bfloat16)


def names_of(given: dict[str, Any], weights: HeldWeights) -> dict[str, list[int]]:
    return {spec.name: bits.tolist() for spec, bits in matched(given.items(), weights)}


ONES = [0x3F80] * 3


def test_each_tensor_comes_once_in_the_trainers_order() -> None:
    got = names_of({"b": tensor(1, 1, 1), "a": tensor(1, 1, 1)}, base("a", "b"))
    assert list(got.items()) == [("b", ONES), ("a", ONES)]


def test_a_tensor_given_twice_is_refused() -> None:
    with pytest.raises(InputError, match="gave a twice"):
        list(matched([("a", tensor(1, 1, 1))] * 2, base("a")))


def test_a_tensor_that_is_missing_is_refused() -> None:
    with pytest.raises(InputError, match=r"did not give 1 .* first b"):
        list(matched([("a", tensor(1, 1, 1))], base("a", "b")))


def test_a_tensor_too_many_is_refused() -> None:
    with pytest.raises(InputError, match="has c, which the checkpoint has not"):
        list(matched([("c", tensor(1, 1, 1))], base("a")))


def test_another_shape_of_the_same_size_is_refused() -> None:
    with pytest.raises(InputError, match=r"need the shape \[3\], the trainer gave \[3, 1\]"):
        list(matched([("a", tensor(1, 1, 1).reshape(3, 1))], base("a")))


def test_integers_are_not_cast_to_floats() -> None:
    with pytest.raises(InputError, match="need BF16, the trainer gave I64"):
        list(matched([("a", torch.ones(3, dtype=torch.int64))], base("a")))


def test_a_head_that_the_checkpoint_leaves_out_may_be_given_where_it_equals_the_embedding() -> None:
    both = {TIED_HEAD: tensor(1, 1, 1), EMBEDDING: tensor(1, 1, 1)}
    assert names_of(both, base(EMBEDDING)) == {EMBEDDING: ONES}


def test_a_head_that_drifted_from_the_embedding_is_refused() -> None:
    with pytest.raises(InputError, match="it differs from"):
        names_of({TIED_HEAD: tensor(1, 1, 2), EMBEDDING: tensor(1, 1, 1)}, base(EMBEDDING))


def test_a_tied_head_that_the_trainer_leaves_out_follows_the_embedding() -> None:
    assert names_of({EMBEDDING: tensor(1, 1, 1)}, base(EMBEDDING, TIED_HEAD)) == {EMBEDDING: ONES, TIED_HEAD: ONES}


def test_a_head_of_its_own_must_be_given() -> None:
    with pytest.raises(InputError, match=f"first {TIED_HEAD}"):
        names_of({EMBEDDING: tensor(1, 1, 1)}, base(EMBEDDING, TIED_HEAD, tied=False))


def test_one_storage_under_two_names_is_two_tensors_of_the_first_version() -> None:
    weight = tensor(1, 1, 1)
    given = Given([(EMBEDDING, weight), (TIED_HEAD, weight)])
    assert [given.bits(name).tolist() for name in given.specs] == [ONES, ONES]


def test_float32_is_rounded_as_torch_rounds() -> None:
    masters = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    spec = TensorSpec(name="w", dtype="BF16", shape=(1000,))
    assert np.array_equal(cast(masters, spec), masters.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16))


def test_numpy_masters_are_rounded_the_same() -> None:
    masters = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    spec = TensorSpec(name="w", dtype="F16", shape=(1000,))
    assert np.array_equal(cast(masters.numpy(), spec), cast(masters, spec))


def test_views_are_read_in_the_order_of_their_elements() -> None:
    weight = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    given = Given([("t", weight.t()), ("columns", weight[:, 1:3]), ("rows", weight[::2])])
    values = {name: given.bits(name).view(np.float32).tolist() for name in given.specs}
    assert values == {
        "t": [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11],
        "columns": [1, 2, 5, 6, 9, 10],
        "rows": [0, 1, 2, 3, 8, 9, 10, 11],
    }


def test_nan_payloads_and_negative_zero_stay() -> None:
    bits = np.array([0x8000, 0x7FC1, 0xFFFF, 0x0001], np.uint16)
    given = Given([("w", torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16))])
    assert given.bits("w").tolist() == bits.tolist()

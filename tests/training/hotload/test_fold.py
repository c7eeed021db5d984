import numpy as np
import pytest
from codec_builders import Held, adam_like, noise, scrambled, step
from hypothesis import given, settings
from hypothesis import strategies as st

from groundhop.errors import ChecksumError, InputError
from groundhop.training.hotload.delta import Delta, Encoding, apply_delta
from groundhop.training.hotload.fold import fold

XORS: tuple[Encoding, ...] = ("xor", "overwrite", "dense")
ADDS: tuple[Encoding, ...] = ("add", "overwrite", "dense")


def chain(encodings: tuple[Encoding, ...], size: int = 700) -> tuple[list[np.ndarray], list[Delta]]:
    states = [noise(np.uint16, size)]
    for number in range(len(encodings)):
        states.append(scrambled(states[-1], 0.1, seed=number))
    return states, [step(a, b, e) for a, b, e in zip(states, states[1:], encodings, strict=False)]


@given(
    encodings=st.lists(st.sampled_from(XORS), min_size=1, max_size=4)
    | st.lists(st.sampled_from(ADDS), min_size=1, max_size=4),
    size=st.sampled_from([1, 64, 700]),
)
@settings(max_examples=30, deadline=None)
def test_a_fold_gives_what_its_deltas_give_one_by_one(encodings: list[Encoding], size: int) -> None:
    states, deltas = chain(tuple(encodings), size)
    weights = Held({"w": states[0].copy()})
    apply_delta(fold(deltas), weights)
    assert weights.bits("w").tobytes() == states[-1].tobytes()


def test_a_fold_with_the_base_takes_context_deltas_too() -> None:
    first, second = adam_like(5000, 1e-6)
    third = scrambled(second, 0.01)
    deltas = [step(first, second, "context"), step(second, third, "add")]
    weights = Held({"w": first.copy()})
    apply_delta(fold(deltas, Held({"w": first})), weights)
    assert weights.bits("w").tobytes() == third.tobytes()
    with pytest.raises(InputError, match="old bits"):
        fold(deltas)


def test_a_fold_is_smaller_than_its_deltas() -> None:
    states, deltas = chain(("xor",) * 4)
    assert fold(deltas).entries[0].changed < sum(delta.entries[0].changed for delta in deltas)
    assert fold(deltas).entries[0].changed == int((states[0] != states[-1]).sum())


def test_there_and_back_folds_to_nothing() -> None:
    old = noise(np.uint16, 300)
    new = scrambled(old, 0.2)
    assert fold([step(old, new, "add"), step(new, old, "add")]).entries == ()


def test_xor_and_add_on_one_element_do_not_fold() -> None:
    old = np.zeros(10, np.uint16)
    new, last = old + np.uint16(1), old + np.uint16(3)
    with pytest.raises(InputError, match="xor and add"):
        fold([step(old, new, "xor"), step(new, last, "add")])


def test_deltas_that_do_not_follow_on_each_other_do_not_fold() -> None:
    states, deltas = chain(("xor", "xor", "xor"))
    with pytest.raises(InputError, match="does not build on"):
        fold([deltas[0], deltas[2]])
    with pytest.raises(ChecksumError):
        fold(deltas, Held({"w": states[1]}))
    with pytest.raises(InputError):
        fold([])

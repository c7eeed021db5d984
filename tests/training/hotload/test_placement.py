"""The exact index map, against views of `arange`."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from groundhop.training.hotload.receiver.placement import Row, make_row  # noqa: E402


@st.composite
def boxes(draw: Any) -> tuple[Any, Any]:
    """A transposed and narrowed view of a contiguous tensor, and a place of its shape in another one."""
    axes = draw(st.integers(1, 4))
    shape = draw(st.lists(st.integers(1, 7), min_size=axes, max_size=axes))
    source = torch.arange(int(np.prod(shape))).reshape(shape)
    wide = [size + draw(st.integers(0, 3)) for size in shape]
    place = torch.arange(int(np.prod(wide))).reshape(wide)
    for axis, size in enumerate(shape):
        length = draw(st.integers(1, size))
        source = source.narrow(axis, draw(st.integers(0, size - length)), length)
        place = place.narrow(axis, draw(st.integers(0, wide[axis] - length)), length)
    turned = draw(st.permutations(range(axes)))
    return source.permute(turned), place.permute(turned)


def row_of(source: Any, place: Any, units: int = 1) -> Row:
    row = make_row(
        0,
        tuple(source.shape),
        (source.storage_offset(), tuple(source.stride())),
        (place.storage_offset(), tuple(place.stride())),
        "BF16",
        units,
    )
    assert row is not None
    return row


@given(boxes(), st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_every_position_finds_its_place_and_no_other_does(box: tuple[Any, Any], random: Any) -> None:
    source, place = box
    total = source.untyped_storage().nbytes() // 8
    wanted = dict(zip(source.reshape(-1).tolist(), place.reshape(-1).tolist(), strict=True))
    positions = torch.tensor(sorted(random.sample(range(total), random.randint(1, total))))
    moved = row_of(source, place).find(positions)
    found = dict(zip(positions[moved.chosen].tolist(), moved.places.tolist(), strict=True))
    assert found == {position: wanted[position] for position in positions.tolist() if position in wanted}


@given(boxes())
@settings(max_examples=60, deadline=None)
def test_a_row_reads_its_elements_in_canonical_order(box: tuple[Any, Any]) -> None:
    source, place = box
    row = row_of(source, place)
    flat = torch.zeros(place.untyped_storage().nbytes() // 8, dtype=torch.int64)
    torch.as_strided(flat, place.shape, place.stride(), place.storage_offset()).copy_(source)
    assert row.read(flat).tolist() == row.positions(0, row.size).tolist() == sorted(source.reshape(-1).tolist())


@given(boxes(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_run_finds_what_its_positions_find(box: tuple[Any, Any], data: Any) -> None:
    row = row_of(*box)
    total = box[0].untyped_storage().nbytes() // 8
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start, total))
    flat = torch.arange(10_000)
    one, other = row.find_run(start, stop, "cpu"), row.find(torch.arange(start, stop))
    everything = torch.arange(start, stop)
    assert flat[one.places].tolist() == flat[other.places].tolist()
    assert everything[one.chosen].tolist() == everything[other.chosen].tolist()


def test_a_shard_whose_width_does_not_divide_the_row_keeps_every_change() -> None:
    """The shortcut (rel // stride) % size drops changes here (`placement.md` 1.4)."""
    whole = torch.arange(7 * 10).reshape(7, 10)
    shard = whole.narrow(1, 6, 4)
    moved = row_of(shard, torch.zeros(7, 4)).find(torch.arange(70))
    assert moved.places.tolist() == list(range(28))


def test_units_of_a_wide_element_move_together() -> None:
    """An F64 or I64 tensor is seen as bytes."""
    source = torch.arange(6, dtype=torch.int64).reshape(2, 3)
    row = row_of(source[:, 1:], torch.zeros(2, 2), units=8)
    moved = row.find(torch.arange(48))
    assert (moved.chosen.tolist(), moved.places.tolist()) == ([*range(8, 24), *range(32, 48)], list(range(32)))


@pytest.mark.parametrize("strides", [(0,), (1, 1), (2, 3)])
def test_a_block_that_names_an_element_twice_has_no_row(strides: tuple[int, ...]) -> None:
    sizes = (3,) if len(strides) == 1 else (4, 3)
    assert make_row(0, sizes, (0, strides), (0, (3, 1)[-len(sizes) :]), "BF16") is None


def test_contiguous_blocks_become_one_run() -> None:
    assert row_of(torch.zeros(4, 5, 6), torch.zeros(8, 5, 6)[2:6]).straight

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groundhop.pipeline.splits import Splits
from groundhop.records import Hop


def hop(seed: str, target: str) -> Hop:
    return Hop(
        seed=seed, target=target, anchor="a", anchor_start=0, anchor_end=1, sentence_start=0, sentence_end=9,
        seed_percentile=0.5, target_percentile=0.5,
    )  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 25), st.integers(0, 25)), max_size=120), st.floats(0, 1))
def test_no_page_serves_both_splits(edges: list[tuple[int, int]], share: float) -> None:
    splits = Splits(share)
    pages: dict[str, set[str]] = {"train": set(), "heldout": set()}
    for a, b in edges:
        one = hop(f"p{a}", f"p{b}")
        split = splits.propose(one)
        if split is not None:
            splits.take(one, split)
            pages[split] |= {one.seed, one.target}
    assert not pages["train"] & pages["heldout"]


def test_pages_draw_their_hops_along_and_a_hop_between_the_sides_is_lost() -> None:
    splits = Splits(0.5)
    splits.take(hop("a", "b"), "train")
    splits.take(hop("c", "d"), "heldout")
    assert splits.propose(hop("a", "d")) is None
    assert splits.propose(hop("a", "x")) == "train"
    assert splits.propose(hop("x", "c")) == "heldout"


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.25, 25), (0.5, 50), (1.0, 100)])
def test_new_pages_go_where_questions_are_missing(share: float, expected: int) -> None:
    splits = Splits(share)
    for number in range(100):
        one = hop(f"s{number}", f"t{number}")
        split = splits.propose(one)
        assert split is not None
        splits.take(one, split)
    assert splits.kept["heldout"] == expected


def test_a_share_is_made_up_for_after_one_side_grew() -> None:
    splits = Splits(0.5)
    for number in range(10):
        splits.take(hop("hub", f"t{number}"), "train")
    assert [splits.propose(hop(f"x{number}", f"y{number}")) for number in range(3)] == ["heldout"] * 3


def test_a_full_split_is_not_opened_while_the_other_has_room() -> None:
    splits = Splits(0.5)
    assert splits.propose(hop("a", "b"), full=["heldout"]) == "train"
    assert splits.propose(hop("a", "b"), full=["train"]) == "heldout"
    assert splits.propose(hop("a", "b"), full=["train", "heldout"]) == "heldout"

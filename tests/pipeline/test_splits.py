from hypothesis import given
from hypothesis import strategies as st

from groundhop.pipeline.splits import Splits, split_of
from groundhop.records import Hop


def hop(seed: str, target: str) -> Hop:
    return Hop(
        seed=seed, target=target, anchor="a", anchor_start=0, anchor_end=1, sentence_start=0, sentence_end=9,
        seed_percentile=0.5, target_percentile=0.5,
    )  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 25), st.integers(0, 25)), max_size=120), st.integers(0, 5), st.floats(0, 1))
def test_no_page_serves_both_splits(edges: list[tuple[int, int]], seed: int, share: float) -> None:
    splits = Splits(seed, share)
    pages: dict[str, set[str]] = {"train": set(), "heldout": set()}
    for a, b in edges:
        one = hop(f"p{a}", f"p{b}")
        split = splits.propose(one)
        if split is not None:
            splits.take(one, split)
            pages[split] |= {one.seed, one.target}
    assert not pages["train"] & pages["heldout"]


def test_a_refused_hop_joins_two_sides_and_a_question_never_taken_binds_nothing() -> None:
    splits = Splits(0, 0.5)
    splits.take(hop("a", "b"), "train")
    splits.take(hop("c", "d"), "heldout")
    assert splits.propose(hop("a", "d")) is None
    assert splits.propose(hop("a", "x")) == "train"
    assert splits.propose(hop("x", "c")) == "heldout"


def test_the_share_of_heldout_pages_is_kept_and_depends_on_the_seed() -> None:
    keys = [f"a.example/{number}" for number in range(4000)]
    first = [split_of(key, 0, 0.3) for key in keys]
    assert 0.27 < first.count("heldout") / 4000 < 0.33
    assert first != [split_of(key, 1, 0.3) for key in keys]
    assert {split_of(key, 0, 0.0) for key in keys} == {"train"}
    assert {split_of(key, 0, 1.0) for key in keys} == {"heldout"}

import pytest

from groundhop.pipeline.band import node_rows, percentiles
from groundhop.pipeline.ranks import Ranks


def ranks(pagerank: list[float], harmonic: list[float], out_degree: list[int]) -> Ranks:
    nodes = tuple("abcdefghij"[: len(pagerank)])
    return Ranks(nodes, (1,) * len(nodes), tuple(out_degree), tuple(pagerank), tuple(harmonic))


def rows(pagerank: list[float], harmonic: list[float], out_degree: list[int], **roles: str) -> dict[str, object]:
    given = ranks(pagerank, harmonic, out_degree)
    all_roles = dict.fromkeys(given.nodes, "content") | roles
    made = node_rows(given, dict.fromkeys(given.nodes, "h"), all_roles, (0.25, 0.75), 0.6)
    return {row.key: row for row in made}


def test_percentiles_count_pages_not_scores() -> None:
    assert percentiles("abcde", [1000.0, 3.0, 2.0, 1.5, 1.4], [True] * 5) == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_pages_without_links_move_nobody_elses_percentile() -> None:
    got = percentiles("abcde", [9.0, 5.0, 8.0, 4.0, 1.0], [True, True, False, True, False])
    assert got == [0.0, 0.5, 0.5, 1.0, 1.0]


def test_ties_fall_by_name_so_that_they_are_stable() -> None:
    assert percentiles("cab", [1.0, 1.0, 1.0], [True] * 3) == [1.0, 0.0, 0.5]


def test_the_band_holds_its_ends_and_nothing_beyond() -> None:
    got = rows([5, 4, 3, 2, 1], [5, 4, 3, 2, 1], [1] * 5)
    assert [key for key, row in got.items() if row.in_band] == ["b", "c", "d"]


def test_boilerplate_and_pages_without_links_are_never_in_the_band() -> None:
    got = rows([5, 4, 3, 2, 1], [5, 4, 3, 2, 1], [1, 1, 1, 0, 1], b="about")
    assert got["b"].role == "about" and not got["b"].in_band
    assert not got["d"].in_band and got["d"].role == "content"


def test_high_pagerank_far_from_everyone_is_spam() -> None:
    got = rows([5, 4, 3, 2, 1], [0.1, 0.5, 0.4, 0.3, 0.2], [1] * 5)
    assert got["a"].role == "spam"
    assert got["a"].disagreement == pytest.approx(1.0)
    assert got["b"].role == "content"

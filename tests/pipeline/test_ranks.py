import random

import networkx as nx
import pytest

from groundhop.pipeline.ranks import build_graph, harmonic, rank


def random_edges(nodes: int, edges: int, seed: int) -> list[tuple[str, str]]:
    draw = random.Random(seed)
    return [(f"p{draw.randrange(nodes)}", f"p{draw.randrange(nodes)}") for _ in range(edges)]


def test_a_page_without_links_keeps_no_rank_for_itself() -> None:
    ranks = rank(build_graph("ABC", [("A", "B"), ("B", "C")]))
    assert ranks.pagerank == pytest.approx((0.1844168, 0.3411710, 0.4744122), abs=1e-6)


def test_repeated_links_count_once_and_self_links_not_at_all() -> None:
    ranks = rank(build_graph("ABC", [("A", "B"), ("A", "B"), ("A", "C"), ("C", "C")]))
    assert (ranks.in_degree, ranks.out_degree) == ((0, 1, 1), (2, 0, 0))


def test_links_to_pages_outside_the_corpus_change_nothing() -> None:
    inside = [("A", "B"), ("B", "C")]
    assert rank(build_graph("ABC", [*inside, ("A", "X"), ("Y", "C")])) == rank(build_graph("ABC", inside))


@pytest.mark.parametrize("seed", range(5))
def test_ranks_agree_with_networkx(seed: int) -> None:
    edges = random_edges(nodes=60, edges=150, seed=seed)
    nodes = [f"p{number}" for number in range(60)]
    reference: nx.DiGraph = nx.DiGraph()
    reference.add_nodes_from(nodes)
    reference.add_edges_from((a, b) for a, b in edges if a != b)
    ranks = rank(build_graph(nodes, edges))
    expected = nx.pagerank(reference, alpha=0.85, tol=1e-12, max_iter=1000)
    near = nx.harmonic_centrality(reference)
    assert sum(ranks.pagerank) == pytest.approx(1.0)
    assert dict(zip(ranks.nodes, ranks.pagerank, strict=True)) == pytest.approx(expected, abs=1e-8)
    assert dict(zip(ranks.nodes, ranks.harmonic, strict=True)) == pytest.approx({k: v / 59 for k, v in near.items()})


def test_the_order_of_nodes_and_edges_changes_no_bit() -> None:
    edges = random_edges(nodes=80, edges=300, seed=7)
    nodes = [f"p{number}" for number in range(80)]
    assert rank(build_graph(nodes, edges)) == rank(build_graph(nodes[::-1], edges[::-1]))


def test_sampled_harmonic_centrality_is_near_the_exact_one_and_repeats() -> None:
    graph = build_graph([f"p{number}" for number in range(200)], random_edges(nodes=200, edges=900, seed=1))
    exact = harmonic(graph)
    sampled = harmonic(graph, seed=3, exact_nodes=10, pivots=150)
    assert sampled == harmonic(graph, seed=3, exact_nodes=10, pivots=150)
    assert max(abs(a - b) for a, b in zip(exact, sampled, strict=True)) < 0.05


def test_a_sample_of_all_nodes_is_exact_up_to_the_count_of_others() -> None:
    graph = build_graph([f"p{number}" for number in range(50)], random_edges(nodes=50, edges=200, seed=2))
    assert harmonic(graph, exact_nodes=10, pivots=50) == pytest.approx([value * 49 / 50 for value in harmonic(graph)])


def test_no_pages_are_no_error() -> None:
    assert rank(build_graph([], [])).pagerank == ()

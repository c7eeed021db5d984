"""Rank the nodes of a directed link graph: PageRank and harmonic centrality.

A graph here is simple: parallel edges count once and self-links not at all, in degrees and in ranks
alike, so that a page cannot lift itself by repeating a link.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import igraph
import numpy as np
from scipy import sparse

DAMPING = 0.85
POLISHING_STEPS = 80
EXACT_NODES = 20_000
"""Up to so many nodes harmonic centrality is exact (a search from each node); above, it is estimated."""
PIVOTS = 512


@dataclass(frozen=True, slots=True)
class Ranks:
    """Degrees and centralities, one value a node, in the order of `nodes`."""

    nodes: tuple[str, ...]
    in_degree: tuple[int, ...]
    out_degree: tuple[int, ...]
    pagerank: tuple[float, ...]
    """Sums to 1; a node without out-links passes its rank to all nodes evenly."""
    harmonic: tuple[float, ...]
    """Mean of 1/distance from every other node, 0 where no path leads here; within 0..1."""


def build_graph(nodes: Sequence[str], edges: Iterable[tuple[str, str]]) -> igraph.Graph:
    """Simple directed graph over `nodes`; edges to or from anything else are left out.

    Nodes and edges are sorted first, so that results do not depend on the order in which pages came.
    """
    names = sorted(set(nodes))
    index = {name: number for number, name in enumerate(names)}
    pairs = {(index[a], index[b]) for a, b in edges if a != b and a in index and b in index}
    graph = igraph.Graph(n=len(names), edges=sorted(pairs), directed=True)
    graph.vs["name"] = names
    return graph


def rank(graph: igraph.Graph, seed: int = 0) -> Ranks:
    """Rank all nodes. PageRank: Page et al. 1999, damping 0.85; harmonic: Boldi and Vigna 2014, over incoming paths."""
    if graph.vcount() == 0:
        return Ranks((), (), (), (), ())
    return Ranks(
        nodes=tuple(graph.vs["name"]),
        in_degree=tuple(graph.indegree()),
        out_degree=tuple(graph.outdegree()),
        pagerank=tuple(_rounded(value) for value in pagerank(graph)),
        harmonic=tuple(_rounded(value) for value in harmonic(graph, seed)),
    )


def pagerank(graph: igraph.Graph) -> list[float]:
    """PageRank with damping 0.85, the rank of pages without links spread over all; sums to 1.

    PRPACK adds up in the order in which its threads finish, so its digits from the eleventh on differ from run to run.
    Power iterations on one thread take it to one and the same fixed point.
    """
    count = graph.vcount()
    values = np.asarray(graph.pagerank(damping=DAMPING, implementation="prpack"))
    out = np.asarray(graph.outdegree(), dtype=np.float64)
    edges = np.asarray(graph.get_edgelist(), dtype=np.int64).reshape(-1, 2)
    weights = 1.0 / out[edges[:, 0]]
    step = sparse.csr_matrix((weights, (edges[:, 1], edges[:, 0])), shape=(count, count))
    for _ in range(POLISHING_STEPS):
        spread = (DAMPING * float(values[out == 0].sum()) + 1.0 - DAMPING) / count
        values = DAMPING * (step @ values) + spread
    return [float(value) for value in values]


def _rounded(value: float) -> float:
    return float(f"{value:.9g}")


def harmonic(
    graph: igraph.Graph, seed: int = 0, exact_nodes: int = EXACT_NODES, pivots: int = PIVOTS
) -> tuple[float, ...]:
    """Harmonic centrality over incoming paths, divided by n - 1.

    Above `exact_nodes` nodes it is estimated from `pivots` start nodes drawn evenly with `seed`
    (Eppstein and Wang 2004): unbiased, its error falls with the root of `pivots`.
    """
    count: int = graph.vcount()
    if count < 2:
        return (0.0,) * count
    if count <= exact_nodes:
        exact: list[float] = graph.harmonic_centrality(mode="in", normalized=True)
        return tuple(exact)
    sources = sorted(random.Random(seed).sample(range(count), min(pivots, count)))
    total = np.zeros(count)
    for source in sources:
        distance = np.asarray(graph.distances(source=[source], mode="out")[0], dtype=np.float64)
        distance[source] = np.inf
        total += 1.0 / distance
    return tuple(float(value) for value in total / len(sources))

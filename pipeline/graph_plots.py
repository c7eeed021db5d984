"""Draw the link graph: its ranks with the band, and a piece of it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groundhop.pipeline.plots import INK, svg

BAND, OUTSIDE, DROPPED, HOP, LINK = "#009e73", "#56b4e9", "#c4c4c4", "#d55e00", "#c9c9c9"
"""The report's legend names these."""


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """A piece of the link graph to draw. Node names are URL keys."""

    labels: Mapping[str, str]
    """Every node with its title."""
    edges: Sequence[tuple[str, str]]
    band: frozenset[str]
    dropped: frozenset[str]
    hops: frozenset[tuple[str, str]]
    """Edges that questions were built on."""
    named: Sequence[str]
    """Nodes that get a number, from 1; their titles stand beside the picture."""


def ranks(values: Sequence[float], band: tuple[float, float], seeds: Sequence[float]) -> str:
    """Draw rank scores, most popular first, with the band shaded and a tick for each seed page.

    `values`: scores of the pages that have links, any order. `seeds`: percentiles of pages that questions start from.
    """

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        ordered = sorted(values, reverse=True)
        places = [100 * (number + 0.5) / len(ordered) for number in range(len(ordered))]
        axes.axvspan(100 * band[0], 100 * band[1], color=BAND, alpha=0.13, lw=0)
        axes.plot(places, ordered, color=INK, lw=1.8)
        axes.set_yscale("log")
        axes.set_xlim(0, 100)
        low, high = axes.get_ylim()
        axes.plot([100 * seed for seed in seeds], [low * 1.06] * len(seeds), "|", color=HOP, ms=9, alpha=0.55)
        axes.set_ylim(low, high)
        middle = 50 * (band[0] + band[1])
        axes.text(middle, high * 0.8, "band", color=BAND, ha="center", va="top", fontsize=10)
        axes.set_xlabel("pages by popularity, percentile (0 = most popular); ticks: seed pages")
        axes.set_ylabel("PageRank")
        axes.grid(axis="y", color="#ececec")

    return svg(draw, 6.6, 2.9)


def neighbourhood(piece: Neighbourhood) -> str:
    """Draw a piece of the link graph: band pages filled green, dropped pages grey, question hops orange."""
    import networkx as nx

    graph = nx.DiGraph()
    graph.add_nodes_from(sorted(piece.labels))
    graph.add_edges_from(sorted(piece.edges))
    undirected = graph.to_undirected()
    places = nx.spring_layout(undirected, seed=7, k=1.9 / math.sqrt(max(1, len(graph))), iterations=150)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        nodes = list(graph.nodes)
        colours = [_node_colour(node, piece) for node in nodes]
        sizes = [max(150 if node in piece.named else 30, 14 * min(14, graph.in_degree(node))) for node in nodes]
        plain = [edge for edge in graph.edges if edge not in piece.hops]
        hops = [edge for edge in graph.edges if edge in piece.hops]
        shared = {"ax": axes, "node_size": sizes, "nodelist": nodes, "arrowsize": 7}
        nx.draw_networkx_edges(graph, places, edgelist=plain, edge_color=LINK, width=0.7, **shared)
        nx.draw_networkx_edges(graph, places, edgelist=hops, edge_color=HOP, width=1.6, **shared)
        nx.draw_networkx_nodes(
            graph,
            places,
            ax=axes,
            nodelist=nodes,
            node_size=sizes,
            node_color=colours,
            edgecolors="white",
            linewidths=0.8,
        )
        _number_nodes(axes, piece, places)
        axes.margins(0.09)
        axes.axis("off")

    return svg(draw, 7.4, 6.2)


def _node_colour(node: str, piece: Neighbourhood) -> str:
    if node in piece.dropped:
        return DROPPED
    return BAND if node in piece.band else OUTSIDE


def _number_nodes(axes: Any, piece: Neighbourhood, places: Mapping[str, Any]) -> None:
    for number, node in enumerate(piece.named, start=1):
        axes.annotate(str(number), places[node], ha="center", va="center", fontsize=7.5, color="white", weight="bold")

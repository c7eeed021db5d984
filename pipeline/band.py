"""Choose the middle band of popularity: percentiles of rank among the pages that have links."""

from bisect import bisect_left
from collections.abc import Sequence

from msgspec import Struct

from groundhop.pipeline.ranks import Ranks


class NodeRow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One page of the graph: its ranks, what it is for, and whether questions start from it."""

    key: str
    host: str
    in_degree: int
    out_degree: int
    """Distinct other pages of the corpus, linked from main text."""
    pagerank: float
    harmonic: float
    percentile: float
    """Of PageRank among pages that have links: 0 = most popular, 1 = least. A page without links
    gets the place it would take among them."""
    harmonic_percentile: float
    """The same of harmonic centrality."""
    disagreement: float
    """harmonic_percentile - percentile: near 1 where PageRank is high and few pages are near, as in link farms."""
    role: str
    """`content`, or why the page is dropped: home, about, contact, legal, login, list, navigation, thin,
    spam, duplicate, host_cap."""
    in_band: bool
    """Whether the page is content, has links, and lies in the band."""


def percentiles(nodes: Sequence[str], values: Sequence[float], has_links: Sequence[bool]) -> list[float]:
    """Rank percentile of each node among those with links, 0 = highest value; ties fall by node name.

    Positions, not values, are divided: scores are so skewed that a band of scores would be a sliver of pages.
    """
    order = sorted(
        ((-value, node) for node, value, linked in zip(nodes, values, has_links, strict=True) if linked),
    )
    last = max(len(order) - 1, 1)
    return [min(bisect_left(order, (-value, node)) / last, 1.0) for node, value in zip(nodes, values, strict=True)]


def node_rows(
    ranks: Ranks, hosts: dict[str, str], roles: dict[str, str], band: tuple[float, float], max_rank_gap: float
) -> list[NodeRow]:
    """Rows in the order of `ranks.nodes`. Content with a disagreement above `max_rank_gap` becomes `spam`."""
    has_links = [degree > 0 for degree in ranks.out_degree]
    # Rounding keeps ties ties where the solver's last bits differ between machines.
    by_pagerank = percentiles(ranks.nodes, [round(value, 12) for value in ranks.pagerank], has_links)
    by_harmonic = percentiles(ranks.nodes, [round(value, 12) for value in ranks.harmonic], has_links)
    rows = []
    for number, key in enumerate(ranks.nodes):
        percentile, other = by_pagerank[number], by_harmonic[number]
        role = roles[key]
        if role == "content" and other - percentile > max_rank_gap:
            role = "spam"
        rows.append(
            NodeRow(
                key=key,
                host=hosts[key],
                in_degree=ranks.in_degree[number],
                out_degree=ranks.out_degree[number],
                pagerank=ranks.pagerank[number],
                harmonic=ranks.harmonic[number],
                percentile=percentile,
                harmonic_percentile=other,
                disagreement=other - percentile,
                role=role,
                in_band=role == "content" and has_links[number] and band[0] <= percentile <= band[1],
            )
        )
    return rows

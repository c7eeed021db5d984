"""Turn pages into a ranked link graph, choose the band of middling popularity, and list the hops from it."""

import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import networkx as nx
from msgspec import Struct

from groundhop import jsonl
from groundhop.config import GraphConfig
from groundhop.pipeline.band import NodeRow, node_rows
from groundhop.pipeline.hops import find_hops
from groundhop.pipeline.ranks import Ranks, build_graph, rank
from groundhop.pipeline.roles import role_by_content, role_by_url
from groundhop.progress import progress
from groundhop.records import Page
from groundhop.runs import StageFolder

logger = logging.getLogger(__name__)

NAVIGATION_SHARE = 0.5
"""A page that more than so many of its host's pages link to, in or outside main text, is navigation."""
NAVIGATION_HOST_PAGES = 100
"""Hosts with fewer pages say nothing about navigation."""


class HostRow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One host of the host graph. Links between pages of one host are self-links here and do not count."""

    host: str
    pages: int
    in_degree: int
    out_degree: int
    pagerank: float
    harmonic: float


@dataclass(slots=True)
class Facts:
    """What one pass over the pages keeps: small enough for millions of pages, no texts."""

    hosts: dict[str, str] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    edges: list[tuple[str, str]] = field(default_factory=list)
    linkers: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By host and key: how many pages of that host link to that page, in or outside main text."""
    texts: dict[bytes, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Keys of pages by hash of their main text."""


def collect(pages: Iterable[Page], config: GraphConfig) -> Facts:
    """Read pages once: hosts, roles, edges of main-text links."""
    facts = Facts()
    for page in pages:
        facts.hosts[page.key] = page.host
        role = role_by_url(page.url)
        facts.roles[page.key] = (
            role if role != "content" else role_by_content(page, config.min_words, config.max_link_share)
        )
        facts.edges += ((page.key, key) for key in sorted({x.key for x in page.links if x.main and x.key != page.key}))
        facts.linkers.update((page.host, key) for key in {x.key for x in page.links if x.key != page.key})
        facts.texts[hashlib.sha256(" ".join(page.text.split()).encode()).digest()].append(page.key)
    return facts


def settle_roles(facts: Facts, max_pages_per_host: int) -> dict[str, str]:
    """Roles that only the whole corpus shows: navigation, duplicates (the first key stays), pages over a host's cap."""
    roles = dict(facts.roles)
    sizes = Counter(facts.hosts.values())
    for keys in facts.texts.values():
        for key in sorted(keys)[1:]:
            roles[key] = "duplicate" if roles[key] == "content" else roles[key]
    seen: Counter[str] = Counter()
    for key in sorted(roles):
        host = facts.hosts[key]
        if roles[key] != "content":
            continue
        if sizes[host] >= NAVIGATION_HOST_PAGES and facts.linkers[host, key] > NAVIGATION_SHARE * sizes[host]:
            roles[key] = "navigation"
            continue
        seen[host] += 1
        if seen[host] > max_pages_per_host:
            roles[key] = "host_cap"
    return roles


def host_rows(hosts: dict[str, str], edges: Sequence[tuple[str, str]], seed: int) -> list[HostRow]:
    """The host graph: hosts are linked when any of their pages are."""
    sizes = Counter(hosts.values())
    pairs = {(hosts[a], hosts[b]) for a, b in edges if a in hosts and b in hosts}
    ranks = rank(build_graph(sorted(sizes), pairs), seed)
    columns = zip(ranks.nodes, ranks.in_degree, ranks.out_degree, ranks.pagerank, ranks.harmonic, strict=True)
    return [
        HostRow(host=host, pages=sizes[host], in_degree=ins, out_degree=outs, pagerank=score, harmonic=near)
        for host, ins, outs, score, near in columns
    ]


def neighbourhood(
    rows: Sequence[NodeRow], edges: Iterable[tuple[str, str]], centre: str, radius: int = 1, most: int = 60
) -> nx.DiGraph:
    """The pages at most `radius` links from `centre` either way, `most` of them by PageRank, as a networkx graph.

    Nodes carry `role`, `percentile`, `in_band`, `pagerank`. Raises: KeyError when `centre` is no page of the graph.
    """
    by_key = {row.key: row for row in rows}
    whole: nx.DiGraph = nx.DiGraph()
    whole.add_nodes_from(by_key)
    whole.add_edges_from((a, b) for a, b in edges if a != b and a in by_key and b in by_key)
    if centre not in by_key:
        raise KeyError(centre)
    near = nx.ego_graph(whole, centre, radius=radius, undirected=True).nodes
    kept = sorted(near, key=lambda key: (key != centre, -by_key[key].pagerank, key))[:most]
    part: nx.DiGraph = whole.subgraph(kept).copy()
    for key in part.nodes:
        row = by_key[key]
        part.nodes[key].update(role=row.role, percentile=row.percentile, in_band=row.in_band, pagerank=row.pagerank)
    return part


def read_edges(folder: Path) -> list[tuple[str, str]]:
    """The edges that `run` wrote, between pages of the corpus."""
    return list(jsonl.read(folder / "edges.jsonl.zst", tuple[str, str]))


def run(*, config: GraphConfig, pages: Path, folder: StageFolder, seed: int) -> None:
    """Write `pages.jsonl` (NodeRow), `hosts.jsonl`, `edges.jsonl.zst` and `hops.jsonl` (Hop) into `folder`."""
    if folder.done:
        return
    with progress("graph", None) as shown:
        facts = collect(_watched(jsonl.read(pages, Page), shown.advance), config)
    roles = settle_roles(facts, config.max_pages_per_host)
    ranks = rank(build_graph(sorted(facts.hosts), facts.edges), seed)
    rows = node_rows(ranks, facts.hosts, roles, config.band, config.max_rank_gap)
    by_key = {row.key: row for row in rows}
    hops, dropped = find_hops(jsonl.read(pages, Page), by_key)
    inside = sorted({(a, b) for a, b in facts.edges if a in by_key and b in by_key})
    jsonl.write(folder.path / "pages.jsonl", rows)
    jsonl.write(folder.path / "hosts.jsonl", host_rows(facts.hosts, facts.edges, seed))
    jsonl.write(folder.path / "edges.jsonl.zst", inside)
    jsonl.write(folder.path / "hops.jsonl", hops)
    folder.fail_all((row.key, row.role, _why(row)) for row in rows if row.role != "content")
    folder.finish(_summary(rows, ranks, inside, len(set(facts.edges)), len(hops), dropped, config))


def _summary(
    rows: Sequence[NodeRow],
    ranks: Ranks,
    inside: Sequence[tuple[str, str]],
    links: int,
    hops: int,
    dropped: Counter[str],
    config: GraphConfig,
) -> dict[str, object]:
    content = [row for row in rows if row.role == "content"]
    low, high = config.band
    return {
        "pages": len(rows),
        "hosts": len({row.host for row in rows}),
        "links": len(inside),
        "links_outside": links - len(inside),
        "dangling": sum(degree == 0 for degree in ranks.out_degree),
        "dropped": dict(sorted(Counter(row.role for row in rows if row.role != "content").items())),
        "above_band": sum(row.out_degree > 0 and row.percentile < low for row in content),
        "below_band": sum(row.out_degree > 0 and row.percentile > high for row in content),
        "in_band": sum(row.in_band for row in rows),
        "hops": hops,
        "links_without_hop": dict(sorted(dropped.items())),
    }


def _why(row: NodeRow) -> str:
    return (
        f"percentile {row.percentile:.3f}, harmonic {row.harmonic_percentile:.3f}, "
        f"links in {row.in_degree}, out {row.out_degree}"
    )


def _watched(pages: Iterator[Page], advance: Callable[[], None]) -> Iterator[Page]:
    for page in pages:
        yield page
        advance()

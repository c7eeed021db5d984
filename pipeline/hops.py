"""Find hops: main-text links in real sentences, from a seed page in the band to a page that may hold a fact."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from groundhop.pipeline.band import NodeRow
from groundhop.pipeline.sentences import is_prose, sentence_at, sentences_around, words_of
from groundhop.records import Hop, Link, Page

MAX_SENTENCE_SHARE = 0.6
"""An anchor over a greater share of its sentence leaves no words that describe the target."""


def hop_id(hop: Hop) -> str:
    """Name of a hop that stays the same between runs: 16 hex digits."""
    text = f"{hop.seed}\n{hop.target}\n{hop.anchor_start}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hops_of(page: Page, rows: Mapping[str, NodeRow], dropped: Counter[str]) -> Iterator[Hop]:
    """Hops from `page`, at most one a target: the first link whose sentence reads well. Others are counted in `dropped`."""
    links = [link for link in page.links if link.main and link.start is not None and link.end is not None]
    taken: set[str] = set()
    spans = sentences_around(
        page.text, (link.start or 0 for link in links if _refusal(page, link, rows, taken) is None)
    )
    for link in sorted(links, key=lambda link: (link.start, link.key)):
        reason = _refusal(page, link, rows, taken)
        span = sentence_at(spans, link.start or 0, link.end or 0) if reason is None else None
        if reason is None and span is None:
            reason = "no_sentence"
        elif reason is None and span is not None and not _describes(page.text[span.start : span.end], link.anchor):
            reason = "not_prose"
        if reason is not None or span is None:
            dropped[reason or "no_sentence"] += 1
            continue
        taken.add(link.key)
        yield Hop(
            seed=page.key,
            target=link.key,
            anchor=link.anchor,
            anchor_start=link.start or 0,
            anchor_end=link.end or 0,
            sentence_start=span.start,
            sentence_end=span.end,
            seed_percentile=rows[page.key].percentile,
            target_percentile=rows[link.key].percentile,
        )


def find_hops(pages: Iterable[Page], rows: Mapping[str, NodeRow]) -> tuple[list[Hop], Counter[str]]:
    """All hops of the pages in the band, sorted by seed and place, and counts of the links that are none."""
    dropped: Counter[str] = Counter()
    hops: list[Hop] = []
    for page in pages:
        if rows[page.key].in_band:
            hops += hops_of(page, rows, dropped)
    hops.sort(key=lambda hop: (hop.seed, hop.anchor_start, hop.target))
    return hops, dropped


def _refusal(page: Page, link: Link, rows: Mapping[str, NodeRow], taken: set[str]) -> str | None:
    if link.key == page.key:
        return "self_link"
    if link.key not in rows:
        return "outside_corpus"
    if link.key in taken:
        return "repeated_link"
    if link.nofollow:
        return "nofollow"
    return None if rows[link.key].role == "content" else f"target_{rows[link.key].role}"


def _describes(sentence: str, anchor: str) -> bool:
    words, covered = words_of(sentence), words_of(anchor)
    return is_prose(sentence) and bool(anchor.strip()) and len(covered) <= MAX_SENTENCE_SHARE * len(words)

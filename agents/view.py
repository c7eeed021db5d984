"""What the model sees of search results and pages: short, harmless, and never with half an address."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from groundhop.agents.passages import Cut, Span, best_first, counts_of, cut, scores, sentences
from groundhop.agents.providers import Found, PageText
from groundhop.agents.untrusted import one_line

CUT = "[cut]"
"""Stands where text was cut to the budget."""

_PIECE = re.compile(r"\S+\s*")
_LEAST_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Sight:
    """How much is shown, in tokens of the policy's tokenizer."""

    count: Callable[[str], int]
    defang: Callable[[str], str]
    snippet_tokens: int
    search_tokens: int
    visit_tokens: int
    passage_words: int


def fit(text: str, tokens: int, count: Callable[[str], int]) -> str:
    """Cut `text` at white space to at most `tokens` tokens, the visible mark included; "" if not even that fits."""
    if count(text) <= tokens:
        return text
    ends = [match.end() for match in _PIECE.finditer(text)]
    low, high = 0, len(ends)
    while low < high:
        middle = (low + high + 1) // 2
        if count(_cut_at(text, ends[middle - 1])) <= tokens:
            low = middle
        else:
            high = middle - 1
    if low:
        return _cut_at(text, ends[low - 1])
    return CUT if count(CUT) <= tokens else ""


def show_results(found: Sequence[tuple[str, Found]], sight: Sight) -> str:
    """Number the pages among the results (query that found it, result): title, address, each passage's best sentences.

    What does not fit goes from the end: pages that would be left without a snippet are not listed.
    """
    pages: dict[str, list[tuple[str, Found]]] = {}
    for query, result in found:
        pages.setdefault(result.url, []).append((query, result))
    heads = [
        sight.defang(f"[{n}] {one_line(own[0][1].title)}\n{one_line(url)}")
        for n, (url, own) in enumerate(pages.items(), 1)
    ]
    left = sight.search_tokens - 2 * sight.count(CUT)
    sizes = [sight.count(head + "\n\n") for head in heads]
    fitting = 1
    while fitting < len(heads) and sum(sizes[: fitting + 1]) + (fitting + 1) * _LEAST_TOKENS * 2 <= left:
        fitting += 1
    left -= sum(sizes[:fitting])
    shown = [own for _, own in zip(range(fitting), pages.values(), strict=False)]
    snippets = _snippets(shown, left, sight)
    text = "\n\n".join("\n".join([head, *own]) for head, own in zip(heads, snippets, strict=False))
    return fit(text + (f"\n\n{CUT}" if fitting < len(heads) else ""), sight.search_tokens, sight.count)


def _snippets(shown: Sequence[Sequence[tuple[str, Found]]], left: int, sight: Sight) -> list[list[str]]:
    """Share `left` tokens evenly among the passages that are still to come, first passages of all pages first."""
    snippets: list[list[str]] = [[] for _ in shown]
    turns = [(depth, n) for n, own in enumerate(shown) for depth in range(len(own))]
    for done, (depth, n) in enumerate(sorted(turns)):
        query, result = shown[n][depth]
        share = max(min(left, 2 * _LEAST_TOKENS), left // (len(turns) - done))
        snippet = best_sentences(
            sight.defang(" … ".join(result.snippets)), query, min(sight.snippet_tokens, share), sight.count
        )
        if snippet:
            snippets[n].append(snippet)
            left -= sight.count(snippet + "\n")
    return snippets


def best_sentences(text: str, query: str, tokens: int, count: Callable[[str], int]) -> str:
    """The run of sentences around the best one for `query` that fits; `…` marks what was left out."""
    text = one_line(text)
    if tokens < _LEAST_TOKENS:
        return ""
    if count(text) <= tokens:
        return text
    spans = sentences(text)
    first = last = best_first(scores(counts_of(text, spans), query))[0]
    if count(_run(text, spans, first, last)) > tokens:
        return fit(_run(text, spans, first, last), tokens, count)
    grown = True
    while grown:
        grown = False
        for a, b in ((first, last + 1), (first - 1, last)):
            if a >= 0 and b < len(spans) and count(_run(text, spans, a, b)) <= tokens:
                first, last, grown = a, b, True
                break
    return _run(text, spans, first, last)


def show_page(page: PageText, find: str, sight: Sight) -> str:
    """The passages of `page` that fit `find` best, in the page's order, links written as [anchor](address).

    Without `find`, or where nothing fits, the beginning.
    """
    whole = cut(page.text, max(20, sight.passage_words // 2))
    spans = whole.spans
    order, note = _order(whole, find)
    title = sight.defang(one_line(page.title)) + (f"\n{note}" if note else "")
    left = sight.visit_tokens - sight.count(title + "\n") - 2 * sight.count(CUT)
    shown: dict[int, str] = {}
    linked: set[str] = set()
    for index in order:
        body = sight.defang(_with_links(page, spans[index], linked))
        size = sight.count(body) + 2
        if size > left:
            body = fit(body, left, sight.count) if left >= _LEAST_TOKENS else ""
            if body and body != CUT:
                shown[index] = body
            break
        shown[index] = body
        left -= size
    text = f"{title}\n{_in_order(shown, len(spans))}"
    return text if sight.count(text) <= sight.visit_tokens else fit(text, sight.visit_tokens, sight.count)


def _order(whole: Cut, find: str) -> tuple[list[int], str]:
    natural = list(range(len(whole.spans)))
    if not find.strip():
        return natural, ""
    got = scores(whole.counts, find)
    order = [i for i in best_first(got) if got[i] > 0]
    return (order, "") if order else (natural, "(nothing here fits `find`; the page begins:)")


def _in_order(shown: dict[int, str], total: int) -> str:
    pieces: list[str] = []
    before = -1
    for index in sorted(shown):
        if index != before + 1:
            pieces.append("…")
        pieces.append(shown[index])
        before = index
    if shown and before != total - 1 and not pieces[-1].endswith(CUT):
        pieces.append("…")
    return "\n".join(pieces)


def _with_links(page: PageText, span: Span, linked: set[str]) -> str:
    """The span's text; each address is written once a view, which saves tokens."""
    pieces: list[str] = []
    position = span.start
    for link in sorted(page.links, key=lambda link: (link.start, link.end)):
        if link.start < position or link.end > span.end or link.end <= link.start or link.url in linked:
            continue
        anchor = page.text[link.start : link.end].strip()
        if not anchor:
            continue
        linked.add(link.url)
        pieces += [page.text[position : link.start], f"[{anchor}]({_address(link.url)})"]
        position = link.end
    return "".join([*pieces, page.text[position : span.end]])


def _address(url: str) -> str:
    """An address without characters that would end it in `[anchor](address)`; it names the same page."""
    return url.replace("(", "%28").replace(")", "%29").replace(" ", "%20")


def _run(text: str, spans: Sequence[Span], first: int, last: int) -> str:
    before = "… " if first > 0 else ""
    after = " …" if last < len(spans) - 1 else ""
    return before + text[spans[first].start : spans[last].end] + after


def _cut_at(text: str, end: int) -> str:
    kept = text[:end].rstrip()
    # A bracket that opened and did not close would be half a link.
    opened = kept.rfind("[")
    if opened > kept.rfind("]") and len(kept) - opened < 200:
        kept = kept[:opened].rstrip()
    return f"{kept} {CUT}".strip()

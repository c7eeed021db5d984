"""Admit a draft only when it takes the hop: measured on the project's own index, through the agent's own tools."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from groundhop.agents.leaks import ngrams, normalised
from groundhop.pipeline.cues import SentenceCache, holders, word_sets
from groundhop.pipeline.decontam import normalised_words
from groundhop.pipeline.facts import Form, same_form
from groundhop.pipeline.sentences import Span, sentences
from groundhop.pipeline.writer import Draft, Refusal
from groundhop.records import Admission, Hop, Page, PathStep

FIND_WORDS = 8
"""Words of the quotation that are looked for on the seed page; more would be copied for nothing."""
LOOKALIKES = 10
"""Hits in which other pages with the same linking words, or the same cues, are looked for."""

_LINK = re.compile(r"\[([^\[\]]*)\]\(([^()\s]*(?:\([^()\s]*\)[^()\s]*)*)\)")


Path = tuple[PathStep, PathStep, PathStep]


@dataclass(frozen=True, slots=True)
class Admitted:
    """Why a draft may stay."""

    admission: Admission
    path: Path
    forbidden: tuple[str, ...]


class Passage(Protocol):
    """A hit of the index."""

    @property
    def key(self) -> str: ...  # noqa: D102
    @property
    def text(self) -> str: ...  # noqa: D102
    @property
    def start(self) -> int: ...  # noqa: D102
    @property
    def end(self) -> int: ...  # noqa: D102


class Index(Protocol):
    """What admission asks of a search index."""

    def search(self, query: str, top: int) -> Sequence[Passage]:
        """The `top` best passages."""
        ...


class Tools(Protocol):
    """What admission asks of the agent's toolbox."""

    async def call(self, name: str, arguments: dict[str, Any], forbidden: Sequence[str] = ()) -> Any:
        """A result with the `text` that a model would see."""
        ...


@dataclass(slots=True)
class Admitter:
    """Checks drafts."""

    index: Index
    tools: Tools
    page_of: Callable[[str], Page | None]
    top: int
    sentences: SentenceCache = field(default_factory=SentenceCache)
    _words: dict[str, str] = field(default_factory=dict)
    _found: dict[tuple[str, int], Sequence[Passage]] = field(default_factory=dict)

    async def admit(self, draft: Draft, hop: Hop, seed: Page, target: Page) -> Admitted | Refusal:
        """What was measured and the path that was walked, or the first reason against the draft. Cheap checks come first."""
        refusal = (
            self._check_seed(draft, seed)
            or self._check_fact(draft, target)
            or self._check_siblings(draft, hop, seed, target)
        )
        if refusal is not None:
            return refusal
        rank = self._own_words_rank(draft, target)
        if rank is not None:
            return Refusal(reason="one_hop", detail=f"rank {rank}")
        refusal = self._check_link(draft, seed)
        if refusal is not None:
            return refusal
        forbidden = forbidden_of(draft, seed, target)
        missing = ""
        for query in draft.queries:
            path = construction_path(draft, query, hop, seed)
            missing = await self._walk(draft, path, target, forbidden)
            if not missing:
                admission = Admission(
                    own_words_rank=None,
                    path_reaches=True,
                    answer_on_seed=False,
                    same_cues_elsewhere=self._elsewhere(draft, target),
                )
                return Admitted(admission, path, forbidden)
        return Refusal(reason="path_fails", detail=missing)

    def _check_seed(self, draft: Draft, seed: Page) -> Refusal | None:
        """The answer must not stand on the seed page, nor in the question: either would save the second hop."""
        if holds_answer(draft, spaced(draft.question)):
            return Refusal(reason="answer_in_question", detail=draft.answer)
        if holds_answer(draft, self._words_of(seed)):
            return Refusal(reason="answer_on_seed", detail=draft.answer)
        return None

    def _words_of(self, page: Page) -> str:
        if page.key not in self._words:
            if len(self._words) >= 2000:
                self._words.clear()
            self._words[page.key] = spaced(f"{page.title}\n{page.text}")
        return self._words[page.key]

    def _check_fact(self, draft: Draft, target: Page) -> Refusal | None:
        """Exactly one sentence of the target may hold the cues, and one fact of the form in it."""
        if not draft.cues or not draft.form:
            return None
        spans, sets = self.sentences.of(target)
        held = holders(draft.cues, sets)
        facts = sum(_facts(draft, target.text, spans[number]) for number in held)
        return None if len(held) == 1 and facts == 1 else Refusal(reason="ambiguous", detail=f"{facts} facts")

    def _check_siblings(self, draft: Draft, hop: Hop, seed: Page, target: Page) -> Refusal | None:
        """No other page linked from the linking sentence may answer the question as well."""
        if not draft.cues or not draft.form:
            return None
        for link in seed.links:
            inside = link.start is not None and hop.sentence_start <= link.start < hop.sentence_end
            other = self.page_of(link.key) if inside and link.key not in (target.key, seed.key) else None
            if other is None:
                continue
            spans, sets = self.sentences.of(other)
            if any(_facts(draft, other.text, spans[number]) for number in holders(draft.cues, sets)):
                return Refusal(reason="ambiguous", detail=f"also on {other.key}")
        return None

    def _own_words_rank(self, draft: Draft, target: Page) -> int | None:
        """Rank at which one search brings the evidence: with its cues alone, its quotation alone or the whole question."""
        for query in (" ".join(draft.cues), *draft.queries, draft.question):
            for rank, hit in enumerate(self._search(query, self.top) if query else (), start=1):
                if hit.key == target.key and hit.start < draft.answer_end and hit.end > draft.answer_start:
                    return rank
        return None

    def _check_link(self, draft: Draft, seed: Page) -> Refusal | None:
        """The quoted words may stand once on the seed page and on no other page."""
        if not draft.pieces:
            return None
        if _occurrences(draft.pieces, self._words_of(seed)) != 1:
            return Refusal(reason="ambiguous_link", detail="not once on its page")
        for hit in self._search(" ".join(draft.pieces), LOOKALIKES):
            if hit.key != seed.key and _occurrences(draft.pieces, spaced(hit.text)):
                return Refusal(reason="ambiguous_link", detail=hit.key)
        return None

    async def _walk(self, draft: Draft, path: Path, target: Page, forbidden: Sequence[str]) -> str:
        """Take the construction path; what was missing on it, or nothing."""
        search, first, second = path
        shown = (await self.tools.call(search.tool, search.arguments, forbidden)).text
        if first.arguments["url"] not in shown.split():
            return "search does not bring the seed page"
        shown = (await self.tools.call(first.tool, first.arguments, forbidden)).text
        if second.arguments["url"] not in (found[2] for found in _LINK.finditer(shown)):
            return "the seed's view does not show the link"
        if draft.pieces and not _occurrences(draft.pieces, spaced(_LINK.sub(r"\1", shown))):
            return "the seed's view does not show the quoted words"
        shown = (await self.tools.call(second.tool, second.arguments, forbidden)).text
        evidence = _plain(target.text[draft.evidence_start : draft.evidence_end])
        return "" if evidence in _plain(_LINK.sub(r"\1", shown)) else "the target's view does not show the evidence"

    def _search(self, query: str, top: int) -> Sequence[Passage]:
        # The drafts of one hop share their quotation, so the same few searches come again and again.
        if (query, top) not in self._found:
            if len(self._found) >= 256:
                self._found.clear()
            self._found[query, top] = self.index.search(query, top)
        return self._found[query, top]

    def _elsewhere(self, draft: Draft, target: Page) -> int:
        pages = {}
        for hit in self._search(" ".join(draft.cues), LOOKALIKES) if draft.cues and draft.form else ():
            if hit.key != target.key:
                spans = sentences(hit.text)
                held = holders(draft.cues, word_sets(hit.text, spans))
                pages[hit.key] = any(_facts(draft, hit.text, spans[number]) for number in held)
        return sum(pages.values())


def construction_path(draft: Draft, query: str, hop: Hop, seed: Page) -> Path:
    """Search the quoted words, look for the link on the seed page, look for the fact on the page behind it.

    The last address is the link's, spelt as a page view shows it.
    """
    link = next(link for link in seed.links if link.key == hop.target and link.start == hop.anchor_start)
    return (
        PathStep(tool="search", arguments={"queries": [query]}),
        PathStep(tool="visit", arguments={"url": seed.url, "find": " ".join(query.split()[:FIND_WORDS])}),
        PathStep(tool="visit", arguments={"url": shown_address(link.url), "find": " ".join(draft.cues)}),
    )


def forbidden_of(draft: Draft, seed: Page, target: Page) -> tuple[str, ...]:
    """Word runs of the question that would give it away: all that its own two pages do not hold.

    The quoted linking sentence stands on the seed page, which the agent must be allowed to read.
    """
    own = [f" {normalised(f'{page.title} {page.text}')} " for page in (seed, target)]
    return tuple(gram for gram in ngrams(draft.question) if not any(f" {gram} " in text for text in own))


def holds_answer(draft: Draft, words: str) -> bool:
    """Whether any accepted form of the answer stands in `words` (of `spaced`)."""
    return any(spaced(form) in words for form in (draft.answer, *draft.aliases))


def spaced(text: str) -> str:
    """Normalised words between single spaces, one at each end, so that `in` compares whole words."""
    return f" {' '.join(normalised_words(text))} "


def _facts(draft: Draft, text: str, span: Span) -> int:
    form: Form = draft.form  # type: ignore[assignment]
    return same_form(text, span, form, draft.noun)


def _occurrences(pieces: Sequence[str], text: str) -> int:
    """How often the pieces follow each other in normalised `text` with only a few words between them."""
    gap = r"\W+(?:\w+\W+){0,12}?"
    runs = [r"\W+".join(map(re.escape, normalised_words(piece))) for piece in pieces]
    pattern = gap.join(run for run in runs if run)
    return len(re.findall(rf"\b{pattern}\b", text)) if pattern else 0


def shown_address(url: str) -> str:
    """An address as page views write it in `[anchor](address)`."""
    return url.replace("(", "%28").replace(")", "%29").replace(" ", "%20")


def _plain(text: str) -> str:
    return " ".join(text.split())

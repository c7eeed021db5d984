"""Choose the few words of a fact's sentence that a question may show: enough to find it on its page, too common to search by."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import NamedTuple

from groundhop.pipeline.sentences import Span, fold, sentences, words_of
from groundhop.records import Page

STOP_WORDS = frozenset(
    """a about above after again against all also although always am among an and any are around as at away back be became
    because become been before being below between both but by came can could did do does done down during each either else
    even ever every few first for found from gave get give given go had has have having he her here hers him his how however
    i if in into is it its itself just known last later least less like made make many may me might more most much must my near
    neither never new next no nor not now of off often on once one only onto or other our out over own per put rather same
    said say see set several shall she should since so some still such take than that the their them then there these they
    this those though three through thus to too two under until up upon us use used using very was way we well were what
    when where whether which while who whom whose why will with within without would yet you your""".split()  # noqa: SIM905
)
_CALENDAR = frozenset(
    [
        "january",
        "february",
        "march",
        "april",
        "may",
        "june",
        "july",
        "august",
        "september",
        "october",
        "november",
        "december",
        "monday",
        "tuesday",
        "wednesday",
        "thursday",
        "friday",
        "saturday",
        "sunday",
    ]
)
_CANDIDATES = 9
_LEAST_LETTERS = 4
_LEAST_RARITY = 0.7
"""Words on half of all pages or more tell a reader nothing."""


BOILERPLATE_PAGES = 10
BOILERPLATE_SHARE = 0.1


class Vocabulary:
    """In how many pages each word stands, and which lines a host repeats."""

    def __init__(self) -> None:
        self.pages = 0
        self._counts: Counter[str] = Counter()
        self._lines: Counter[tuple[str, int]] = Counter()
        self._hosts: Counter[str] = Counter()

    def add(self, page: Page) -> None:
        """Count one page."""
        self.pages += 1
        self._counts.update(set(words_of(page.text)))
        self._hosts[page.host] += 1
        self._lines.update({(page.host, _template(line)) for line in page.text.split("\n") if line.strip()})

    def is_boilerplate(self, page: Page, start: int) -> bool:
        """Whether the line around `start` stands on many pages of its host, but for numbers and dates."""
        line = page.text[page.text.rfind("\n", 0, start) + 1 :].split("\n", 1)[0]
        count = self._lines[page.host, _template(line)]
        return count >= BOILERPLATE_PAGES and count >= BOILERPLATE_SHARE * self._hosts[page.host]

    def rarity(self, word: str) -> float:
        """Inverse document frequency of `word` (folded): 0 where every page holds it."""
        return math.log((1 + self.pages) / (1 + self._counts[word]))


def cue_groups(
    words: Sequence[str],
    barred: Iterable[str],
    others: Sequence[frozenset[str]],
    vocabulary: Vocabulary,
    most: int,
    groups: int = 8,
) -> list[tuple[str, ...]]:
    """Up to `groups` groups of 2 to `most` words of a sentence that stand together in none of the page's `others`.

    The most telling group (rarest words) comes first and the rest are spread evenly down to the commonest: a
    checker takes the first that no single search finds. Words of a group keep the sentence's order and spelling.
    """
    refused = set(barred)
    spelling = {fold(word): word for word in reversed(words)}
    usable = [
        word
        for word in dict.fromkeys(map(fold, words))
        if len(word) >= _LEAST_LETTERS and word not in STOP_WORDS and word not in refused and word.isalpha()
    ]
    weight = {word: vocabulary.rarity(word) for word in usable}
    telling = [word for word in usable if weight[word] >= _LEAST_RARITY]
    commonest = sorted(telling, key=lambda word: (weight[word], word))[:_CANDIDATES]
    found = sorted(
        (-sum(weight[word] for word in group), tuple(spelling[word] for word in usable if word in group))
        for size in range(min(2, most), most + 1)
        for group in combinations(commonest, size)
        if not any(other.issuperset(group) for other in others)
    )
    if len(found) <= groups:
        return [group for _, group in found]
    return [found[round(number * (len(found) - 1) / (groups - 1))][1] for number in range(groups)]


def _template(line: str) -> int:
    words = (word for word in words_of(line) if word not in _CALENDAR)
    # A short digest keeps the table small; a rare collision drops one fact.
    return int.from_bytes(hashlib.blake2b(" ".join(words).encode(), digest_size=8).digest(), "big")


def holders(cues: Iterable[str], sentence_words: Sequence[frozenset[str]]) -> list[int]:
    """Numbers of the sentences that hold all cues."""
    wanted = frozenset(map(fold, cues))
    return [number for number, words in enumerate(sentence_words) if wanted <= words]


class Cut(NamedTuple):
    """A page's sentences, and the folded words of each."""

    spans: list[Span]
    words: list[frozenset[str]]


class SentenceCache:
    """Cuts pages into sentences, each once while it stays among the last `most` pages."""

    def __init__(self, most: int = 2000) -> None:
        self._most = most
        self._cut: dict[str, Cut] = {}

    def of(self, page: Page) -> Cut:
        """The sentences of `page`."""
        if page.key not in self._cut:
            if len(self._cut) >= self._most:
                del self._cut[next(iter(self._cut))]
            spans = sentences(page.text)
            self._cut[page.key] = Cut(spans, word_sets(page.text, spans))
        return self._cut[page.key]


def word_sets(text: str, spans: Sequence[Span]) -> list[frozenset[str]]:
    """The folded words of each sentence."""
    return [frozenset(words_of(text[start:end])) for start, end in spans]

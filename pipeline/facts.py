"""Find short, checkable facts in sentences: a full date, a year, a number with its noun, a full name."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from groundhop.pipeline.sentences import Span, is_prose
from groundhop.records import AnswerKind

Form = Literal["date", "year", "number", "percent", "name"]
"""What is asked for. A year is a `date` to the judge, a percentage a `number`."""

KIND_OF: dict[Form, AnswerKind] = {
    "date": "date",
    "year": "date",
    "number": "number",
    "percent": "number",
    "name": "name",
}

MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip

_MONTH = "|".join(MONTHS)
_DATE = re.compile(
    rf"\b(?:(?P<m1>{_MONTH})\s+(?P<d1>\d{{1,2}})(?:st|nd|rd|th)?,?\s+(?P<y1>[12]\d{{3}})"
    rf"|(?P<d2>\d{{1,2}})(?:st|nd|rd|th)?\s+(?P<m2>{_MONTH}),?\s+(?P<y2>[12]\d{{3}})"
    r"|(?P<y3>[12]\d{3})-(?P<m3>[01]\d)-(?P<d3>[0-3]\d))\b"
)
_DAY = re.compile(rf"\b(?:(?:{_MONTH})\s+\d{{1,2}}(?!\d)|\d{{1,2}}(?:st|nd|rd|th)?\s+(?:of\s+)?(?:{_MONTH})\b)")
_CITATION = re.compile(
    r"\b(?:archived|retrieved|accessed|last (?:updated|modified|edited|reviewed)|issued from)\b", re.IGNORECASE
)
"""Dates in references and footers are of the page's making, not of its subject."""
_YEAR = re.compile(r"(?<![\w$£€.,/#:-])(?:1[5-9]\d\d|20[0-4]\d)(?![\w%]|[.,/:]\d|[-–—/]\d)")
_YEAR_BEFORE = re.compile(
    rf"(?:\b(?:in|since|until|till|by|during|of|from|after|before|early|late|mid|year|around|about|{_MONTH})|\()\s*$",
    re.IGNORECASE,
)
_NUMBER = re.compile(
    r"(?<![\w$£€.,/#:-])(?P<n>\d{1,3}(?:,\d{3})+|\d{1,9})(?:\s(?P<scale>million|billion|thousand))?\s+(?P<noun>[a-z]{3,}s)\b(?!-)"
)
_PERCENT = re.compile(r"(?<![\w$£€.,/#:-])(?P<n>\d{1,3}(?:\.\d+)?)(?:\s?%|\spercent\b|\sper cent\b)")
_CAPITAL_BEFORE = re.compile(
    r"(?<!^)\b[A-Z][\w.]*\s+$|\b(?:section|number|page|chapter|version|paragraph|article|model|resolution|law|act|order|rule|figure|table|step|"
    r"phase|level|item|volume|issue|bill|amendment|title|part|room|route|flight|highway|class|type|[Nn]o\.)\s+$"
)
_DIGITS = re.compile(r"\d")
_NAME = re.compile(
    r"(?<![\w.’'-])[A-Z][a-zà-ÿ]{2,}(?:\s+(?:(?:de|van|von|of|the|al)\s+)?(?:[A-Z]\.\s+)?[A-Z][a-zà-ÿ]{2,}){1,3}(?![\w’'-])"
)
# Plural-looking words after a number that are no countable noun.
_NOT_NOUNS = frozenset(
    """was his has this its thus perhaps towards across plus less versus always times contains describes defines says adds
    provides specifies makes allows uses requires introduces replaces lists states gives calls sets shows becomes proposes
    does goes covers includes begins ends needs means takes turns comes looks seems remains applies extends works
    addresses discusses explains recommends deprecates changes removes details outlines""".split()  # noqa: SIM905
)
_MONTH_NUMBER = {name.casefold(): number for number, name in enumerate(MONTHS, start=1)}


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact, by offsets in the page's text."""

    form: Form
    answer: str
    aliases: tuple[str, ...]
    noun: str
    """What a number counts; empty for other forms."""
    start: int
    end: int
    sentence: Span

    @property
    def kind(self) -> AnswerKind:
        """Kind of the answer, for the judge."""
        return KIND_OF[self.form]


def facts_in(text: str, sentence: Span, forms: Sequence[Form], longest: int = 40) -> list[Fact]:
    """Facts of these forms in one sentence of prose. A form that the sentence holds twice gives none: it would be ambiguous."""
    words = text[sentence.start : sentence.end]
    if not ("name" in forms or _DIGITS.search(words)) or not is_prose(words, most=longest) or _CITATION.search(words):
        return []
    found = [
        *_dates(words, sentence),
        *_numbers(words, sentence),
        *_percents(words, sentence),
        *_names(words, sentence),
    ]
    return sorted((fact for fact in found if fact.form in forms), key=lambda fact: fact.start)


def same_form(text: str, sentence: Span, form: Form, noun: str = "") -> int:
    """How many facts of this form (and this noun) a sentence holds, prose or not."""
    words = text[sentence.start : sentence.end]
    match form:
        case "date":
            return max(len(list(_DATE.finditer(words))), len(_DAY.findall(words)))
        case "year":
            return len(re.findall(r"(?<!\d)[12]\d{3}(?!\d)", words))
        case "number":
            return sum(found["noun"] == noun for found in _NUMBER.finditer(words))
        case "percent":
            return len(list(_PERCENT.finditer(words)))
        case "name":
            return len(list(_NAME.finditer(words)))


def _dates(words: str, sentence: Span) -> Iterator[Fact]:
    dates = list(_DATE.finditer(words))
    years = re.findall(r"(?<!\d)[12]\d{3}(?!\d)", words)
    if len(dates) == 1 and len(years) == 1 and len(_DAY.findall(words)) <= 1:
        yield from _full_date(dates[0], sentence)
    elif not dates and len(years) == 1:
        for found in _YEAR.finditer(words):
            if _YEAR_BEFORE.search(words[: found.start()]):
                yield _fact("year", found.group(), (), "", found, sentence)


def _full_date(found: re.Match[str], sentence: Span) -> Iterator[Fact]:
    year = found["y1"] or found["y2"] or found["y3"]
    day = int(found["d1"] or found["d2"] or found["d3"])
    named = found["m1"] or found["m2"]
    month = _MONTH_NUMBER[named.casefold()] if named else int(found["m3"])
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return
    name = MONTHS[month - 1]
    forms = (f"{name} {day}, {year}", f"{day} {name} {year}", f"{year}-{month:02}-{day:02}")
    answer = " ".join(found.group().split())
    yield _fact("date", answer, tuple(form for form in forms if form != answer), "", found, sentence)


def _numbers(words: str, sentence: Span) -> Iterator[Fact]:
    found = [match for match in _NUMBER.finditer(words) if match["noun"] not in _NOT_NOUNS]
    for match in found:
        number = match["n"]
        value = int(number.replace(",", ""))
        # `PEP 8016 contains`, `Article 12 says`: a number behind a capital is a name.
        if _CAPITAL_BEFORE.search(words[: match.start()]):
            continue
        # Below ten a guess is too often right; a bare year before a plural is no count.
        if value < 10 or (1500 <= value <= 2049 and "," not in number and not match["scale"]):
            continue
        if sum(other["noun"] == match["noun"] for other in found) > 1:
            continue
        yield _number(match, value, sentence)


def _number(match: re.Match[str], value: int, sentence: Span) -> Fact:
    scale = match["scale"]
    if scale:
        answer, exact = f"{match['n']} {scale}", value * {"thousand": 10**3, "million": 10**6, "billion": 10**9}[scale]
        aliases: tuple[str, ...] = (str(exact), f"{exact:,}")
    else:
        answer, aliases = match["n"], tuple(form for form in (str(value), f"{value:,}") if form != match["n"])
    end = match.end("scale") if scale else match.end("n")
    start = sentence.start + match.start("n")
    return Fact("number", answer, tuple(dict.fromkeys(aliases)), match["noun"], start, sentence.start + end, sentence)


def _percents(words: str, sentence: Span) -> Iterator[Fact]:
    found = list(_PERCENT.finditer(words))
    if len(found) == 1:
        number = found[0]["n"]
        yield _fact(
            "percent", f"{number}%", (number, f"{number} percent", f"{number} per cent"), "", found[0], sentence
        )


def _names(words: str, sentence: Span) -> Iterator[Fact]:
    found = list(_NAME.finditer(words))
    if len(found) == 1 and found[0].start() > 0 and not any(month in found[0].group() for month in MONTHS):
        yield _fact("name", " ".join(found[0].group().split()), (), "", found[0], sentence)


def _fact(form: Form, answer: str, aliases: tuple[str, ...], noun: str, found: re.Match[str], sentence: Span) -> Fact:
    return Fact(form, answer, aliases, noun, sentence.start + found.start(), sentence.start + found.end(), sentence)

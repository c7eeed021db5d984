"""Name what a page is for: content, or boilerplate head (home, about, lists), or thin or spammy tail."""

import re
from collections import Counter
from typing import Literal
from urllib.parse import unquote, urlsplit

from groundhop.pipeline.sentences import words_of
from groundhop.records import Page

Role = Literal[
    "content", "home", "about", "contact", "legal", "login", "list", "navigation", "thin", "spam", "duplicate"
]

_INDEX_FILES = re.compile(r"^(index|default|main|main_page|home|welcome)(\.[a-z]{2,5})?$", re.IGNORECASE)
_LANGUAGE = re.compile(r"^[a-z]{2}([-_][a-zA-Z]{2})?$")
_PAGE_NUMBER = re.compile(r"^(page[-_/]?)?\d{1,4}$")

# The last path segment says what one page is; a list section says what all pages below it are.
_NAMES: dict[str, Role] = {
    **dict.fromkeys(["about", "about-us", "aboutus", "who-we-are", "mission", "team", "staff"], "about"),
    **dict.fromkeys(["contact", "contact-us", "contactus", "contacts", "feedback", "support"], "contact"),
    **dict.fromkeys(
        [
            "privacy",
            "privacy-policy",
            "terms",
            "terms-of-service",
            "terms-of-use",
            "legal",
            "licence",
            "license",
            "licenses",
            "copyright",
            "imprint",
            "impressum",
            "disclaimer",
            "accessibility",
            "cookies",
        ],
        "legal",
    ),
    **dict.fromkeys(["login", "signin", "sign-in", "register", "signup", "account", "logout"], "login"),
    **dict.fromkeys(
        [
            "sitemap",
            "site-map",
            "genindex",
            "modindex",
            "py-modindex",
            "contents",
            "toc",
            "archive",
            "archives",
            "search",
            "tag",
            "tags",
            "category",
            "categories",
            "author",
            "authors",
            "topic",
            "topics",
            "all",
            "list",
            "blog",
            "news",
            "posts",
            "glossary",
            "bibliography",
            "credits",
            "revision-history",
        ],
        "list",
    ),
}
_LIST_SECTIONS = frozenset(
    {
        "tag",
        "tags",
        "category",
        "categories",
        "topic",
        "topics",
        "author",
        "authors",
        "archive",
        "archives",
        "label",
        "labels",
    }
)


def role_by_url(url: str) -> Role:
    """What the shape of an address says; `content` when it says nothing."""
    parts = urlsplit(url)
    segments = [unquote(part) for part in parts.path.split("/") if part]
    if segments and _INDEX_FILES.match(segments[-1]):
        home = segments.pop().lower().startswith("main_page")
        if home:
            return "home"
    if not segments or (len(segments) == 1 and _LANGUAGE.match(segments[0])):
        return "home" if not parts.query else "content"
    return _by_segments(segments)


def role_by_content(page: Page, min_words: int, max_link_share: float) -> Role:
    """`thin` (few words), `list` (mostly anchors) or `spam` (mostly repeated text); else `content`."""
    words = words_of(page.text)
    if len(words) < min_words:
        return "thin"
    if link_share(page) > max_link_share:
        return "list"
    return "spam" if repeated_share(words) > MAX_REPEATED else "content"


MAX_REPEATED = 0.6
"""Share of word triples that stood on the page before, above which text is machine-made repetition."""


def link_share(page: Page) -> float:
    """Share of the main text's characters that are anchors."""
    covered = sum(link.end - link.start for link in page.links if link.start is not None and link.end is not None)
    return covered / len(page.text) if page.text else 0.0


def repeated_share(words: list[str]) -> float:
    """Share of word triples that repeat an earlier triple of the same text."""
    triples = Counter(zip(words, words[1:], words[2:], strict=False))
    total = sum(triples.values())
    return 1.0 - len(triples) / total if total else 0.0


def _by_segments(segments: list[str]) -> Role:
    names = [re.sub(r"\.(html?|php|aspx?|jsp|md)$", "", part.lower()) for part in segments]
    if len(names) > 1 and _PAGE_NUMBER.match(names[-1]) and names[-2] in ({"page"} | _LIST_SECTIONS):
        return "list"
    if len(names) > 1 and any(name in _LIST_SECTIONS for name in names[:-1]) and len(names) <= 3:
        return "list"
    return _NAMES.get(names[-1], "content")

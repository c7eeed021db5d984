"""Cut a page down to its main text, and know where in it each link stands.

Before extraction each anchor's text is put between two characters that the page does not hold, the first of which
numbers the anchor. They go through the extractor like letters; taking them out again leaves offsets.
"""

import logging
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from groundhop.pipeline.links import Anchor, anchors, canonical_of, fold, is_furniture, parse_html, title_of
from groundhop.pipeline.urls import url_key
from groundhop.records import Link

logger = logging.getLogger(__name__)
logging.getLogger("trafilatura").setLevel(logging.CRITICAL)

_MARK_BLOCKS = ((0x20000, 0x2A6DF), (0x2A700, 0x2B738), (0x2B820, 0x2CEA1), (0x2CEB0, 0x2EBE0), (0x30000, 0x3134A))
"""Rare ideographs: printable, so that the extractor keeps them, and in hardly any page."""

_BLOCKS = frozenset(
    """
    address article aside blockquote body caption center dd details div dl dt fieldset figcaption figure footer form
    h1 h2 h3 h4 h5 h6 head header hr item legend li list main menu nav ol option p pre quote row section summary table
    tbody tfoot thead tr ul lb br
    """.split()  # noqa: SIM905
)
_CELLS = frozenset(("td", "th", "cell"))
_VERBATIM = frozenset(("pre", "code"))
_NEVER = frozenset(
    ("script", "style", "template", "noscript", "svg", "math", "select", "button", "title", "iframe", "object")
)
_INVISIBLE = re.compile("[\u00ad\u200b\u2060\ufeff\x00-\x08\x0b-\x1f\x7f-\x84\x86-\x9f]")
_ROW_CHARACTERS = 500
_SHORT = 200
_LONG_LINE = 700


class Extracted(NamedTuple):
    """What stays of a page."""

    title: str
    text: str
    """Plain text; headings, paragraphs, list items and table rows on lines of their own."""
    links: tuple[Link, ...]
    canonical: str | None
    metas: tuple[tuple[str, str], ...]
    """Names, in lower case, and contents of the page's meta elements."""


def extract(html: str, url: str) -> Extracted | None:
    """Title, main text and links of a page; None where there is no HTML. The same input gives the same output."""
    root = parse_html(html)
    if root is None:
        return None
    title, canonical = title_of(root), canonical_of(root, url)
    metas = tuple(
        ((m.get("name") or "").strip().lower(), m.get("content") or "") for m in root.iter("meta") if m.get("name")
    )
    found = list(anchors(root, url))
    marks = _marks_for(html, len(found))
    if marks is not None:
        _mark(found, *marks)
    marked = _main_text(root, url)
    text, spans = _unmark(marked, *marks) if marks is not None else (_tidy(marked), {})
    return Extracted(title, text, _links(found, text, spans), canonical, metas)


def _main_text(root: Any, url: str) -> str:
    """The extractor's choice, or the whole body without page furniture where that chose next to nothing."""
    from trafilatura import bare_extraction

    for element in root.iter("time"):
        # The extractor leaves this element out, and with it the date that a question may ask for.
        element.tag = "span"
    whole = _plain(root, _NEVER)
    try:
        # Recall before precision: text that is lost here can never be evidence. Fast: no second opinions, which would
        # make the outcome hang on small differences.
        document: Any = bare_extraction(
            root, url=url, fast=True, favor_recall=True, include_comments=False, as_dict=False
        )
    except Exception:
        logger.exception("no main text found in %s, its whole body is used", url)
        return whole
    chosen = "" if document is None or document.body is None else _plain(document.body, frozenset())
    return whole if _is_poor(chosen, whole) else chosen


def _is_poor(chosen: str, whole: str) -> bool:
    """Whether the extractor kept next to nothing, or ran the page's blocks together into one long line."""
    longest, longest_whole = (max(map(len, text.split("\n"))) for text in (chosen, whole))
    merged = longest > _LONG_LINE and longest > 2 * longest_whole
    return merged or (len(chosen) < _SHORT and len(chosen) < len(whole) / 2)


def _plain(root: Any, without: frozenset[str]) -> str:
    pieces: list[str] = []
    _write(root, pieces, without, verbatim=False)
    lines = (fold(_INVISIBLE.sub("", line)) for line in "".join(pieces).split("\n"))
    return "\n".join(line for line in lines if line)


def _write(element: Any, out: list[str], without: frozenset[str], verbatim: bool) -> None:
    tag = element.tag if isinstance(element.tag, str) else ""
    if not tag or tag in without or (without and (is_furniture(element) or _is_contents(element))):
        return
    if tag in ("tr", "row") and (line := _row(element, without)) is not None:
        out.append(f"\n{line}\n")
        return
    verbatim = verbatim or tag in _VERBATIM
    edge = "\n" if tag in _BLOCKS or tag in _CELLS else ""
    out.append(edge)
    if element.text:
        out.append(element.text if verbatim else element.text.replace("\n", " "))
    for child in element:
        _write(child, out, without, verbatim)
        if child.tail:
            out.append(child.tail if verbatim else child.tail.replace("\n", " "))
    out.append(edge)


def _is_contents(element: Any) -> bool:
    """Whether a list only leads to other places on the same page."""
    if element.tag not in ("ul", "ol"):
        return False
    targets = [a.get("href") or "" for a in element.iter("a")]
    return len(targets) > 2 and all(target.startswith("#") for target in targets)


def _row(element: Any, without: frozenset[str]) -> str | None:
    """A table row on one line; None for a row that lays out a page, whose cells are blocks of their own."""
    cells = [_plain(cell, without).replace("\n", " ") for cell in element if cell.tag in _CELLS]
    cells = [cell for cell in cells if cell]
    if sum(map(len, cells)) > _ROW_CHARACTERS or any(below.tag in ("tr", "row") for below in element.iterdescendants()):
        return None
    return " | ".join(cells)


def _marks_for(html: str, count: int) -> tuple[int, int] | None:
    """First number mark and end mark: a block of characters that the page neither holds nor refers to."""
    used = {ord(c) for c in set(html) if c >= "\U00020000"}
    if re.search(r"&#(?:x0*[23][0-9a-f]{4}|0*1[3-9][0-9]{4}|0*20[0-9]{4});?", html, re.IGNORECASE):
        return None
    for first, last in _MARK_BLOCKS:
        if count < last - first and not any(first <= c <= last for c in used):
            return first, last
    return None


def _mark(found: Sequence[Anchor], first: int, last: int) -> None:
    for number, anchor in enumerate(found):
        element = anchor.element
        if element.tag != "a" or not fold(element.text_content()):
            continue
        before = element.text or ""
        bare = before.lstrip()
        element.text = before[: len(before) - len(bare)] + chr(first + number) + bare
        if len(element):
            element[-1].tail = _before_space(element[-1].tail or "", chr(last))
        else:
            element.text = _before_space(element.text, chr(last))


def _before_space(text: str, mark: str) -> str:
    bare = text.rstrip()
    return bare + mark + text[len(bare) :]


def _unmark(marked: str, first: int, last: int) -> tuple[str, dict[int, tuple[int, int]]]:
    """Take the marks out. Returns the text and, by anchor number, the half-open span of its text."""
    out: list[str] = []
    spans: dict[int, tuple[int, int]] = {}
    opened: tuple[int, int] | None = None
    for character in marked:
        code = ord(character)
        if code == last:
            if opened is not None:
                spans[opened[0]] = (opened[1], len(out))
            opened = None
        elif first <= code < last:
            opened = (code - first, len(out))
        elif character == " " and (not out or out[-1].isspace()):
            continue
        else:
            if character == "\n" and out and out[-1] == " ":
                out[-1] = "\n"
            elif character != "\n" or (out and out[-1] != "\n"):
                out.append(character)
    text = "".join(out)
    return text.rstrip(), {number: _trim(text, *span) for number, span in spans.items()}


def _trim(text: str, start: int, end: int) -> tuple[int, int]:
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    return start, end


def _tidy(text: str) -> str:
    return _unmark(text, 0x110000, 0x110001)[0]


def _links(found: Sequence[Anchor], text: str, spans: dict[int, tuple[int, int]]) -> tuple[Link, ...]:
    """Main-text links with their spans, and the others once for each address and anchor."""
    links: list[Link] = []
    outside: set[tuple[str, str, bool]] = set()
    for number, anchor in enumerate(found):
        start, end = spans.get(number, (0, 0))
        words = _INVISIBLE.sub("", anchor.text)
        if end > start and not anchor.navigation and "".join(text[start:end].split()) == "".join(words.split()):
            shown = fold(text[start:end])
            links.append(
                Link(
                    url=anchor.url,
                    key=url_key(anchor.url),
                    anchor=shown,
                    main=True,
                    nofollow=anchor.nofollow,
                    start=start,
                    end=end,
                )
            )
        elif (same := (anchor.url, words, anchor.nofollow)) not in outside:
            outside.add(same)
            links.append(
                Link(url=anchor.url, key=url_key(anchor.url), anchor=fold(words), main=False, nofollow=anchor.nofollow)
            )
    return tuple(links)

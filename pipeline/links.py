"""Read a page's links out of its raw DOM, before any extraction."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lxml import html as lxml_html

from groundhop.pipeline.urls import resolve

_OUTSIDE = frozenset(("nav", "header", "footer", "aside", "menu"))
_ROLES = frozenset(("navigation", "banner", "contentinfo", "complementary", "menu", "menubar"))
_CLASSES = re.compile(
    r"(?:nav|menu|menubar|sidebar|site-?footer|site-?header|(?:nav[-_]|navbar|navbox|navheader|navfooter|navigation|breadcrumb).*)",
    re.IGNORECASE,
)
_UNSEEN = frozenset(("script", "style", "template", "noscript"))


@dataclass(frozen=True, slots=True)
class Anchor:
    """An `<a href>` of the DOM with where it leads."""

    element: Any
    """The lxml element."""
    url: str
    """Absolute, without fragment."""
    text: str
    """White space folded."""
    nofollow: bool
    navigation: bool
    """Whether it sits in the page's header, footer, navigation or aside."""


def parse_html(text: str) -> Any | None:
    """The root element, or None where there is nothing to parse. Comments and processing instructions are left out."""
    parser = lxml_html.HTMLParser(encoding="utf-8", remove_comments=True, remove_pis=True)
    try:
        # Through bytes: lxml refuses text that declares an encoding in an XML declaration.
        root = lxml_html.document_fromstring(text.replace("\x00", "").encode("utf-8", "replace"), parser=parser)
    except (ValueError, lxml_html.etree.LxmlError):
        return None
    return root if isinstance(root.tag, str) else None


def base_of(root: Any, page_url: str) -> str:
    """What relative links are resolved against: the first base element with an address, else the page."""
    for element in root.iter("base"):
        if element.get("href") is not None:
            return resolve(page_url, element.get("href")) or page_url
    return page_url


def anchors(root: Any, page_url: str) -> Iterator[Anchor]:
    """Yield links in document order, repeats included; those that lead to no web page or only into this one are left out."""
    base = base_of(root, page_url)
    for element in root.iter("a", "area"):
        href = element.get("href")
        if href is None or _is_unseen(element):
            continue
        url = resolve(base, href)
        inside = not href.strip() or href.lstrip().startswith("#")
        if url is None or (inside and url == resolve(page_url, page_url)):
            continue
        text = fold(element.text_content()) or fold(element.get("alt") or "")
        yield Anchor(element, url, text, _is_nofollow(element), _is_navigation(element))


def canonical_of(root: Any, page_url: str) -> str | None:
    """The page's first rel=canonical, absolute; recorded, not trusted."""
    for element in root.iter("link"):
        if "canonical" in (element.get("rel") or "").lower().split() and element.get("href"):
            return resolve(base_of(root, page_url), element.get("href"))
    return None


def title_of(root: Any) -> str:
    """The only `h1` where the title repeats it, else `title`, else the first heading; white space folded."""
    title = fold(_first_text(root.iter("title")))
    headings = [fold(h.text_content()) for h in root.iter("h1")]
    if len(headings) == 1 and headings[0] and headings[0] in title:
        return headings[0]
    return title or next((h for h in headings if h), "") or fold(_first_text(root.iter("h2")))


def fold(text: str) -> str:
    """Runs of white space become one space; none at the ends."""
    return " ".join(text.split())


def _first_text(elements: Iterator[Any]) -> str:
    for element in elements:
        text: str = element.text_content()
        if text.strip():
            return text
    return ""


def _is_nofollow(element: Any) -> bool:
    return "nofollow" in (element.get("rel") or "").lower().split()


def _is_unseen(element: Any) -> bool:
    return any(above.tag in _UNSEEN for above in element.iterancestors())


def _is_navigation(element: Any) -> bool:
    return any(is_furniture(above) for above in element.iterancestors())


def is_furniture(element: Any) -> bool:
    """Whether an element is the page's navigation, header, footer or aside, by tag, role or class name."""
    if element.tag in ("html", "body", "main", "article"):
        return False
    if element.tag == "header" or element.get("role") == "banner":
        # An article's own header belongs to its text; the page's does not.
        return not any(outer.tag in ("article", "main") for outer in element.iterancestors())
    if element.tag in _OUTSIDE or element.get("role") in _ROLES:
        return True
    names = f"{element.get('class') or ''} {element.get('id') or ''}".split()
    return any(_CLASSES.fullmatch(name) for name in names)

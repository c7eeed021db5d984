"""Read the links of pages out of WAT files, without the pages.

A WAT file is a WARC file of metadata records in JSON, one a page: `Envelope` / `Payload-Metadata` /
`HTTP-Response-Metadata` / `HTML-Metadata` / `Links` (https://commoncrawl.org/get-started, "WAT").
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from groundhop.pipeline.urls import resolve
from groundhop.pipeline.warc import Damaged, read_metadata

_ANCHORS = frozenset(("A@/href", "AREA@/href"))


class WatLink(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One anchor of a page."""

    url: str
    """Absolute, without fragment."""
    text: str
    """White space folded; the crawler keeps about 100 characters."""
    nofollow: bool
    """By the anchor's `rel` or the page's meta robots. WAT files before about 2018 have no `rel`: there it is False."""


class WatPage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a WAT record says of one HTML page."""

    url: str
    status: int
    title: str
    links: tuple[WatLink, ...]
    """In document order, repeats included; those into the page itself or to no web page are left out."""


class _Link(Struct):
    path: str = ""
    url: str | None = None
    rel: str = ""
    text: str = ""
    title: str = ""


class _Meta(Struct):
    name: str = ""
    content: str = ""


class _Head(Struct, rename={"base": "Base", "title": "Title", "metas": "Metas"}):
    base: str = ""
    title: str = ""
    metas: list[_Meta] = field(default_factory=list)


class _Html(Struct, rename={"head": "Head", "links": "Links"}):
    head: _Head = field(default_factory=_Head)
    links: list[_Link] = field(default_factory=list)


class _Message(Struct, rename={"status": "Status"}):
    status: str | int = ""


class _Http(Struct, rename={"html": "HTML-Metadata", "message": "Response-Message"}):
    html: _Html | None = None
    message: _Message = field(default_factory=_Message)


class _Payload(Struct, rename={"http": "HTTP-Response-Metadata"}):
    http: _Http | None = None


class _WarcHeader(Struct, rename={"kind": "WARC-Type", "url": "WARC-Target-URI"}):
    kind: str = ""
    url: str = ""


class _Envelope(Struct, rename={"warc": "WARC-Header-Metadata", "payload": "Payload-Metadata"}):
    warc: _WarcHeader
    payload: _Payload = field(default_factory=_Payload)


class _Record(Struct, rename={"envelope": "Envelope"}):
    envelope: _Envelope


def read_wat(path: Path, max_bytes: int = 50_000_000) -> Iterator[WatPage | Damaged]:
    """Yield the pages of a WAT file in its order, and what is wrong with a record: `damaged`, `truncated`, `too_large`,
    `not_html`. Records of requests and of the crawl itself are passed over. Raises: FileNotFoundError.
    """
    decoder = msgspec.json.Decoder(_Record, strict=False)
    for found in read_metadata(path, max_bytes):
        if isinstance(found, Damaged):
            yield found
        elif found.content_type.partition(";")[0].strip().lower() == "application/json":
            page = page_of(found.block, found.url, decoder)
            if page is not None:
                yield page


def page_of(block: bytes, url: str, decoder: "msgspec.json.Decoder[_Record] | None" = None) -> WatPage | Damaged | None:
    """The page of one record's JSON; None for a record of something else than a response."""
    try:
        record: Any = (decoder or msgspec.json.Decoder(_Record, strict=False)).decode(block)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return Damaged(url, "damaged", str(error))
    warc, http = record.envelope.warc, record.envelope.payload.http
    if warc.kind != "response":
        return None
    url = warc.url.strip().strip("<>") or url
    if http is None or http.html is None:
        return Damaged(url, "not_html", "no HTML metadata")
    head = http.html.head
    # The base is resolved against the page and may be relative itself.
    base = resolve(url, head.base) if head.base.strip() else None
    asked = {word for meta in head.metas if meta.name.strip().lower() == "robots" for word in _words(meta.content)}
    closed = bool(asked & {"nofollow", "none"})
    links = tuple(_links(http.html.links, url, base or url, closed))
    status = str(http.message.status)
    return WatPage(
        url=url,
        status=int(status) if status.isdigit() else 0,
        title=_fold(head.title),
        links=links,
    )


def _links(links: list[_Link], page_url: str, base: str, closed: bool) -> Iterator[WatLink]:
    own = resolve(page_url, page_url)
    for link in links:
        if link.path not in _ANCHORS or link.url is None:
            continue
        url = resolve(base, link.url)
        inside = not link.url.strip() or link.url.lstrip().startswith("#")
        if url is None or (inside and url == own):
            continue
        yield WatLink(url=url, text=_fold(link.text or link.title), nofollow=closed or "nofollow" in _words(link.rel))


def _words(text: str) -> set[str]:
    return set(text.lower().replace(",", " ").split())


def _fold(text: str) -> str:
    return " ".join(text.split())

"""Name what is wanted of a release, and choose among the captures that an index knows of it."""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from msgspec import Struct

from groundhop.errors import ConfigError
from groundhop.pipeline.urls import host_of, url_key

_HTML_TYPES = ("text/html", "application/xhtml+xml")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(?:/[A-Za-z0-9][A-Za-z0-9_.-]*)*")
_MAX_OFFSET = 1 << 48
_WWW = re.compile(r"www\d*\.")


class Capture(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the record of one fetched page lies, as an index says."""

    url: str
    timestamp: str
    """14 digits, UTC."""
    status: int
    mime: str = ""
    """As detected from the content; empty when the index does not know."""
    digest: str = ""
    """SHA-1 of the payload in base 32; empty when the index does not know."""
    filename: str
    """Path below the data server's root."""
    offset: int
    length: int
    """Both in the compressed file."""
    truncated: str = ""
    """Why the crawler cut the payload; empty for a whole one."""


class Pattern(NamedTuple):
    """What is wanted: one page, all pages whose address begins so, or all hosts of a domain."""

    kind: Literal["page", "prefix", "domain"]
    host: str
    """Without `www.`, as the indexes sort."""
    path: str
    """With its query, begins with `/`."""

    @property
    def query(self) -> str:
        """As the index server takes it (pywb's CDXJ server API, "URL match scope")."""
        match self.kind:
            case "domain":
                return f"*.{self.host}"
            case "prefix":
                return f"{self.host}{self.path}*"
            case "page":
                return f"{self.host}{self.path}"

    def matches(self, url: str) -> bool:
        """Whether an address is wanted. The indexes fold case and ignore scheme and `www.`, and so does this."""
        authority = without_www(authority_of(url))
        if self.kind == "domain":
            return authority == self.host or authority.partition(":")[0].endswith(f".{self.host}")
        path = path_of(url).lower()
        wanted = self.path.lower()
        # Another port is another key in the indexes.
        return authority == self.host and (path.startswith(wanted) if self.kind == "prefix" else path == wanted)


def pattern_of(text: str) -> Pattern:
    """`example.org` (a whole host), `*.example.org`, `example.org/wiki/*` or an address. Raises: ConfigError."""
    bare = re.sub(r"^https?://", "", text.strip(), flags=re.IGNORECASE)
    if bare.startswith("*."):
        host = host_of(bare[2:])
        if not host or "*" in bare[2:] or "/" in bare:
            raise ConfigError(f"a domain is written *.example.org, got {text!r} - at `$.pages.commoncrawl`")
        return Pattern("domain", without_www(host), "/")
    body, star = (bare[:-1], True) if bare.endswith("*") else (bare, False)
    host = "" if body.startswith("/") else host_of(body)
    if not host or "*" in body or (star and "/" not in body):
        raise ConfigError(f"need a host, *.domain, host/path* or an address, got {text!r} - at `$.pages.commoncrawl`")
    whole_host = "/" not in bare and bare == text.strip()
    return Pattern("prefix" if star or whole_host else "page", without_www(host), path_of(body))


def without_www(host: str) -> str:
    """The host as SURT keys have it: a leading `www.`, `www2.` and so on is taken off."""
    return _WWW.sub("", host, count=1) if _WWW.match(host) and host.count(".") > 1 else host


def authority_of(url: str) -> str:
    """Host and port as the address's key has them: no port where it is the default one."""
    return re.split("[/?#]", url_key(url).partition("://")[2], maxsplit=1)[0]


def path_of(url: str) -> str:
    """Path and query of an address, `/` at least; no fragment."""
    bare = re.sub(r"^[a-z][a-z0-9+.-]*://", "", url, flags=re.IGNORECASE)
    found = re.search(r"[/?]", bare)
    path = bare[found.start() :].partition("#")[0] if found else "/"
    return path if path.startswith("/") else f"/{path}"


def unusable(capture: Capture, release: str, max_bytes: int) -> str | None:
    """Why a capture is not worth fetching, or None."""
    if not 0 <= capture.offset < _MAX_OFFSET or capture.length <= 0 or not _FILE.fullmatch(capture.filename):
        return "bad_row"
    if not capture.filename.startswith(f"crawl-data/{release}/"):
        return "other_release"
    if capture.status != 200:
        return "status"
    if capture.mime and capture.mime.lower() not in _HTML_TYPES:
        return "not_html"
    if capture.truncated:
        return "truncated"
    # A record that is larger than this packed is larger unpacked too, headers aside.
    return "too_large" if capture.length > max_bytes + (1 << 20) else None


@dataclass(slots=True)
class Chooser:
    """Keeps an even sample of at most `limit` pages of one pattern, in memory that does not grow with the index.

    Pages with the smallest hash of seed and key stay, so the choice does not depend on the order of the rows.
    """

    limit: int
    seed: int
    _kept: dict[str, tuple[bytes, Capture]] = field(init=False, default_factory=dict)
    _bound: bytes | None = field(init=False, default=None)

    def add(self, capture: Capture) -> None:
        """Enter a capture. Of several of one page the last in time is kept."""
        key = url_key(capture.url)
        before = self._kept.get(key)
        if before is not None:
            if (capture.timestamp, capture.filename, capture.offset) > (
                before[1].timestamp,
                before[1].filename,
                before[1].offset,
            ):
                self._kept[key] = (before[0], capture)
            return
        priority = hashlib.blake2b(f"{self.seed} {key}".encode("utf-8", "replace"), digest_size=16).digest()
        if self._bound is not None and priority > self._bound:
            return
        self._kept[key] = (priority, capture)
        if len(self._kept) > 2 * self.limit:
            self._shrink()

    def chosen(self) -> list[Capture]:
        """What stays, in the order in which it lies on the server."""
        self._shrink()
        return in_file_order(capture for _, capture in self._kept.values())

    def _shrink(self) -> None:
        kept = sorted(self._kept.items(), key=lambda item: item[1][0])[: self.limit]
        self._kept = dict(kept)
        if len(kept) == self.limit:
            self._bound = kept[-1][1][0]


def in_file_order(captures: Iterable[Capture]) -> list[Capture]:
    """Sorted by file and offset, each record once."""
    found = {(capture.filename, capture.offset): capture for capture in captures}
    return [found[place] for place in sorted(found)]

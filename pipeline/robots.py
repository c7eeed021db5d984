"""What a site allows: robots.txt as RFC 9309 reads it, and the signals by which pages opt out of AI training."""

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec
from protego import Protego

MAX_ROBOTS_BYTES = 500 * 1024
"""RFC 9309, 2.5: the part of the file that must be read; what follows is not."""

RobotsState = Literal["rules", "allow_all", "unreachable"]
_OPT_OUT_WORDS = ("noai", "noimageai")


class Robots(NamedTuple):
    """One site's rules. `unreachable` forbids everything for now and must be asked again, not kept for a run."""

    state: RobotsState
    rules: Protego | None = None

    def allows(self, user_agent: str, url: str) -> bool:
        """Whether `user_agent` (its product token) may fetch `url`."""
        if self.rules is None:
            return self.state == "allow_all"
        return bool(self.rules.can_fetch(url, product_token(user_agent)))

    def delay_s(self, user_agent: str) -> float | None:
        """The Crawl-delay for `user_agent` in seconds, or None. Not in RFC 9309, but widely meant."""
        found = None if self.rules is None else self.rules.crawl_delay(product_token(user_agent))
        return None if found is None else float(found)


def parse_robots(body: bytes) -> Robots:
    """Read a robots file: a byte-order mark is no part of it, and a line that the size limit cuts does not count."""
    text = body.removeprefix(b"\xef\xbb\xbf")
    if len(text) > MAX_ROBOTS_BYTES:
        text = text[:MAX_ROBOTS_BYTES].rpartition(b"\n")[0]
    return Robots("rules", Protego.parse(text.decode("utf-8", "replace").lstrip("\ufeff")))


def robots_of(status: int | None, body: bytes) -> Robots:
    """What an answer to /robots.txt means; `status` None is no answer. RFC 9309, 2.3.1.

    2xx: the rules. 4xx: no rules, all allowed. 429, 5xx and no answer: all forbidden for now.
    """
    if status is not None and 200 <= status < 300:
        return parse_robots(body)
    if status is not None and 400 <= status < 500 and status != 429:
        return Robots("allow_all")
    return Robots("unreachable")


def product_token(user_agent: str) -> str:
    """The name that robots files call a crawler by: `groundhop` of `groundhop/1.0 (+mail)`."""
    found = re.match(r"\s*([A-Za-z_-]+)", user_agent)
    return found.group(1) if found else user_agent.strip() or "*"


def opt_outs(headers: Iterable[tuple[str, str]], metas: Iterable[tuple[str, str]], user_agent: str) -> tuple[str, ...]:
    """Signals against AI training in a response and its meta elements, sorted: `noai`, `noimageai`, `tdm-reservation`.

    Reads X-Robots-Tag (also when addressed to `user_agent`), meta robots, and the TDM Reservation Protocol.
    """
    token = product_token(user_agent).lower()
    found: set[str] = set()
    for name, value in headers:
        name = name.strip().lower()
        if name == "x-robots-tag":
            found |= _directives(value, token)
        elif name == "tdm-reservation" and value.strip() == "1":
            found.add("tdm-reservation")
    for name, value in metas:
        if name in ("robots", token):
            found |= _directives(value, token)
        elif name == "tdm-reservation" and value.strip() == "1":
            found.add("tdm-reservation")
    return tuple(sorted(found))


def tdm_reserved(body: bytes) -> tuple[tuple[str, bool], ...]:
    """The rules of a `/.well-known/tdmrep.json`: path pattern, and whether rights are reserved; empty if unreadable.

    Format: TDM Reservation Protocol, W3C community group report, section 6.1.
    """
    try:
        rules = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ()
    found: list[tuple[str, bool]] = []
    for rule in rules if isinstance(rules, list) else []:
        if isinstance(rule, dict) and isinstance(rule.get("location"), str):
            found.append((rule["location"], rule.get("tdm-reservation") in (1, "1")))
    return tuple(found)


def reserves(rules: Iterable[tuple[str, bool]], url: str) -> bool:
    """Whether the first rule that matches the path of `url` reserves its rights. Patterns are those of robots files."""
    parts = urlsplit(url)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    for pattern, reserved in rules:
        body = ".*".join(map(re.escape, pattern.removesuffix("$").split("*")))
        if re.match(body + ("$" if pattern.endswith("$") else ""), path):
            return reserved
    return False


def _directives(value: str, token: str) -> set[str]:
    """The opt-out words of a comma list; `otherbot: noai` speaks to the bot it names until the next name."""
    found: set[str] = set()
    addressed = True
    for part in value.lower().split(","):
        name, colon, rest = part.strip().partition(":")
        if colon and name.strip() not in ("max-snippet", "max-image-preview", "max-video-preview", "unavailable_after"):
            addressed = name.strip() in (token, "*")
            part = rest
        if addressed and part.strip() in _OPT_OUT_WORDS:
            found.add(part.strip())
    return found

"""What a site allows: robots.txt as RFC 9309 reads it, and the signals by which pages opt out of AI training."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

import msgspec
from protego import Protego

MAX_ROBOTS_BYTES = 500 * 1024
"""RFC 9309, 2.5: the part of the file that must be read; what follows is not."""

RobotsState = Literal["rules", "allow_all", "unreachable"]
_RULES = ("disallow", "dissallow", "disalow", "dissalow", "diasllow", "allow", "crawldelay", "requestrate", "visittime")
_OPT_OUT_WORDS = ("noai", "noimageai")


@dataclass(frozen=True, slots=True)
class Robots:
    """One site's rules. `unreachable` forbids everything for now and must be asked again, not kept for a run."""

    state: RobotsState
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Rule lines by product token, in lower case; `*` for all others."""
    _read: dict[str, Protego] = field(default_factory=dict)

    def allows(self, user_agent: str, url: str) -> bool:
        """Whether `user_agent` (a product token, or the whole header) may fetch `url`."""
        if self.state != "rules":
            return self.state == "allow_all"
        return bool(self._rules_for(user_agent).can_fetch(url, "*"))

    def delay_s(self, user_agent: str) -> float | None:
        """The Crawl-delay for `user_agent` in seconds, or None. Not in RFC 9309, but widely meant."""
        found = self._rules_for(user_agent).crawl_delay("*")
        return None if found is None else float(found)

    def _rules_for(self, user_agent: str) -> Protego:
        """The rules of the group that names the crawler, else of `*`; groups of one name are one."""
        named = (token for token in product_tokens(user_agent) if token in self.groups)
        token = next(named, "*")
        if token not in self._read:
            # Groups are chosen here, by whole names; the library matches paths.
            self._read[token] = Protego.parse("\n".join(("User-agent: *", *self.groups.get(token, ()))))
        return self._read[token]


def parse_robots(body: bytes) -> Robots:
    """Read a robots file: a byte-order mark is no part of it, and a line that the size limit cuts does not count."""
    raw = body.removeprefix(b"\xef\xbb\xbf")
    if len(raw) > MAX_ROBOTS_BYTES:
        raw = raw[:MAX_ROBOTS_BYTES].rpartition(b"\n")[0]
    return Robots("rules", _groups(raw.decode("utf-8", "replace").replace("\x00", "").lstrip("\ufeff")))


def _groups(text: str) -> dict[str, tuple[str, ...]]:
    """Rule lines by product token. RFC 9309, 2.2.1: agents in a row share the rules that follow them."""
    groups: dict[str, list[str]] = {}
    agents: list[str] = []
    closed = False
    for line in re.split(r"\r\n|\r|\n", text):
        name, colon, value = line.partition("#")[0].partition(":")
        name = re.sub(r"[\s_-]+", "", name.lower())
        if not colon:
            continue
        if name == "useragent":
            agents = [*([] if closed else agents), *_agent_tokens(value)]
            closed = False
            for agent in agents:
                groups.setdefault(agent, [])
        elif name.startswith(_RULES):
            closed = True
            for agent in dict.fromkeys(agents):
                groups[agent].append(line)
    return {agent: tuple(rules) for agent, rules in groups.items()}


def _agent_tokens(value: str) -> list[str]:
    text = value.strip().lower()
    return ["*"] if text.startswith("*") else re.findall(r"^[a-z0-9_.-]+", text)


def robots_of(status: int | None, body: bytes) -> Robots:
    """What an answer to /robots.txt means; `status` None is no answer. RFC 9309, 2.3.1.

    2xx: the rules. 4xx: no rules, all allowed. 429, 5xx and no answer: all forbidden for now.
    """
    if status is not None and 200 <= status < 300:
        return parse_robots(body)
    if status is not None and 400 <= status < 500 and status != 429:
        return Robots("allow_all")
    return Robots("unreachable")


def product_tokens(user_agent: str) -> list[str]:
    """The names that robots files may call a crawler by, in lower case, the most telling first.

    `groundhop` of `groundhop/1.0 (+mail)`; `tinybot`, then `mozilla`, of `Mozilla/5.0 (compatible; tinybot/1.0)`.
    """
    found: list[str] = re.findall(r"(?:^|compatible;)\s*([a-z0-9_.-]+)", user_agent.lower())
    return found[::-1]


def opt_outs(headers: Iterable[tuple[str, str]], metas: Iterable[tuple[str, str]], user_agent: str) -> tuple[str, ...]:
    """Signals against AI training in a response and its meta elements, sorted: `noai`, `noimageai`, `tdm-reservation`.

    Reads X-Robots-Tag (also when addressed to `user_agent`), meta robots, and the TDM Reservation Protocol.
    """
    tokens = frozenset(product_tokens(user_agent))
    found: set[str] = set()
    for name, value in headers:
        name = name.strip().lower()
        if name == "x-robots-tag":
            found |= _directives(value, tokens)
        elif name == "tdm-reservation" and value.strip() == "1":
            found.add("tdm-reservation")
    for name, value in metas:
        if name == "robots" or name in tokens:
            found |= _directives(value, tokens)
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


def _directives(value: str, tokens: frozenset[str]) -> set[str]:
    """The opt-out words of a comma list; `otherbot: noai` speaks to the bot it names until the next name."""
    found: set[str] = set()
    addressed = True
    for part in value.lower().split(","):
        name, colon, rest = part.strip().partition(":")
        if colon and name.strip() not in ("max-snippet", "max-image-preview", "max-video-preview", "unavailable_after"):
            addressed = name.strip() == "*" or name.strip() in tokens
            part = rest
        if addressed and part.strip() in _OPT_OUT_WORDS:
            found.add(part.strip())
    return found

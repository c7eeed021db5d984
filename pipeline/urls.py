"""Name pages: one key for all spellings of an address, and the site that a host belongs to.

The key is for comparing only. Requests use the address as it was found, because a server may answer another
spelling with another page.
"""

import ipaddress
import re
from functools import cache
from typing import NamedTuple
from urllib.parse import unquote, urljoin

import idna
import tldextract

TRACKING = frozenset(
    """
    utm_source utm_medium utm_campaign utm_term utm_content utm_id utm_name utm_reader utm_cid utm_source_platform
    utm_creative_format utm_marketing_tactic utm_social utm_brand utm_pubreferrer utm_swu utm_viz_id
    gclid gclsrc dclid gbraid wbraid gad_source gad_campaignid srsltid _ga _gl fbclid fb_action_ids fb_action_types
    msclkid yclid ysclid _openstat twclid ttclid li_fat_id igshid igsh epik mc_cid mc_eid ml_subscriber
    ml_subscriber_hash mkt_tok _hsenc _hsmi __hssc __hstc __hsfp hsctatracking vero_id vero_conv oly_anon_id
    oly_enc_id wickedid rb_clickid s_cid pk_campaign pk_kwd pk_keyword pk_source pk_medium pk_content
    mtm_campaign mtm_keyword mtm_source mtm_medium mtm_content mtm_cid mtm_group mtm_placement
    """.split()  # noqa: SIM905
)
"""Parameters that name a campaign or a click and never a page. A closed list of whole names: a prefix rule would
also take `gallery`, `game` or `source` away."""

_PARTS = re.compile(r"(?://([^/?#]*))?([^?#]*)(?:\?([^#]*))?(?:#(.*))?", re.DOTALL)
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE | re.ASCII)
_OPAQUE = re.compile(r"[a-z][a-z0-9+-]*:(?![0-9])", re.IGNORECASE | re.ASCII)
_EDGES = "".join(map(chr, range(0x21)))
_PERCENT = re.compile(r"%([0-9A-Fa-f]{2})|(.)", re.DOTALL)
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_LITERAL = _UNRESERVED | frozenset("!$&'()*+,;=:@/?")


class _Parts(NamedTuple):
    scheme: str
    authority: str
    path: str
    query: str | None
    fragment: str | None


def url_key(url: str) -> str:
    """Name the page behind `url`: equal for all spellings of one page, and unchanged when applied to itself.

    http and https, and their default ports, are one. User names and passwords never enter the key. A word without
    a scheme is read as a host. Addresses of other kinds (`mailto:`) come back trimmed. Never raises.
    Rules: RFC 3986 section 6.2.2, and the WHATWG URL standard where browsers differ from it.
    """
    text = _clean(url)
    if _is_other_kind(text):
        return text
    parts = _split(text)
    query = "" if parts.query is None else _query_key(parts.query)
    fragment = parts.fragment or ""
    return (
        f"{parts.scheme}://{_authority_key(parts.authority)}{_path_key(parts.path)}"
        + (f"?{query}" if query else "")
        + (f"#{_percent(fragment)}" if fragment.startswith("!") else "")
    )


def host_of(url: str) -> str:
    """The host of `url` as its key has it, without port; empty for an address without one."""
    text = _clean(url)
    if _is_other_kind(text):
        return ""
    authority = _authority_key(_split(text).authority)
    return authority if authority.endswith("]") else authority.rsplit(":", 1)[0] if ":" in authority else authority


def registered_domain(host: str) -> str | None:
    """The part of `host` that one owner registered, or None for addresses, bare suffixes and single words.

    Follows the public suffix list with its private section: two hosts under `github.io` are two sites.
    """
    plain = host.strip().strip(".").lower()
    if not plain or _is_address(plain.strip("[]")):
        return None
    found = _suffixes()(plain)
    return f"{found.domain}.{found.suffix}" if found.domain and found.suffix else None


def resolve(base: str, reference: str) -> str | None:
    """The absolute address of a link as a browser reads it, without fragment (`#!` stays).

    None when it is not an http address. Follows the WHATWG URL standard on white space and back slashes.
    """
    text = _clean(reference)
    scheme = re.match(r"([a-z][a-z0-9+.-]*):", text, re.IGNORECASE | re.ASCII)
    if scheme and (scheme.group(1).lower() not in ("http", "https") or not text[scheme.end() :].strip("/\\")):
        return None
    head, mark, tail = _cut(text, "?#")
    try:
        absolute = urljoin(base, head.replace("\\", "/") + mark + tail)
    except ValueError:
        return None
    address, _, fragment = absolute.partition("#")
    parts = re.match(r"(https?)://([^/?#]+)(.*)", address, re.IGNORECASE | re.ASCII | re.DOTALL)
    if parts is None:
        return None
    scheme_name, authority, rest = parts.groups()
    host, port = _host_and_port(authority)
    if not host:
        return None
    return f"{scheme_name.lower()}://{host}{port}" + _request_form(
        rest + (f"#{fragment}" if fragment[:1] == "!" else "")
    )


def _is_other_kind(text: str) -> bool:
    """Whether an address has a scheme that leads to no host, such as `mailto:`."""
    opaque = _OPAQUE.match(text)
    return opaque is not None and not _SCHEME.match(text) and opaque.group().lower() not in ("http:", "https:")


def _clean(url: str) -> str:
    return re.sub(r"[\t\n\r]", "", url.strip(_EDGES))


def _cut(text: str, marks: str) -> tuple[str, str, str]:
    found = re.search(f"[{marks}]", text)
    return (text, "", "") if found is None else (text[: found.start()], found.group(), text[found.end() :])


def _split(text: str) -> _Parts:
    found = _SCHEME.match(text)
    scheme = found.group(1).lower() if found else "https"
    if found:
        rest = text[found.end() - 2 :]
    else:
        rest = re.sub(r"^(?:https?:)?[/\\]*", "//", text, count=1, flags=re.IGNORECASE | re.ASCII)
    head, mark, tail = _cut(rest, "?#")
    matched = _PARTS.match(head.replace("\\", "/") + mark + tail)
    authority, path, query, fragment = matched.groups() if matched else ("", "", None, None)
    return _Parts("https" if scheme == "http" else scheme, authority or "", path, query, fragment)


def _authority_key(authority: str) -> str:
    host, port = _host_and_port(authority)
    # Both default ports go whatever the scheme was, since the key no longer knows it.
    return host + ("" if port in (":80", ":443") else port)


def _host_and_port(authority: str) -> tuple[str, str]:
    """Host as its key has it, and `:port` or nothing. User names and passwords are left out."""
    host, port = authority.rpartition("@")[2], ""
    if not host.endswith("]"):
        host, colon, port = host.rpartition(":")
        if not colon or not ((port.isascii() and port.isdigit()) or port == ""):
            host, port = host + colon + port, ""
    port = port.lstrip("0")
    return _host_key(host), f":{port}" if port else ""


def _host_key(host: str) -> str:
    plain = unquote(host, errors="replace").lower().lstrip(_EDGES).rstrip(_EDGES + ".")
    if not plain.isascii():
        try:
            plain = idna.encode(plain, uts46=True).decode("ascii")
        except (idna.IDNAError, UnicodeError):
            return _quote_host(plain)
    return _quote_host(plain).rstrip(".")


def _quote_host(plain: str) -> str:
    keep = _UNRESERVED | frozenset("[]:") if re.fullmatch(r"\[[0-9a-f:.]*\]", plain) else _UNRESERVED
    return "".join(c if c in keep else "".join(f"%{b:02x}" for b in c.encode("utf-8", "replace")) for c in plain)


def _path_key(path: str) -> str:
    kept: list[str] = []
    for segment in _percent(path).split("/")[1:]:
        if segment == "..":
            del kept[-1:]
        elif segment != ".":
            kept.append(segment)
    return "/" + "/".join(kept).rstrip("/")


def _query_key(query: str) -> str:
    pairs = [(_percent(pair.partition("=")[0]), _percent(pair)) for pair in query.split("&") if pair]
    # Sorting by name alone keeps the order of repeated parameters, which may mean something.
    return "&".join(pair for name, pair in sorted(pairs, key=lambda p: p[0]) if name.lower() not in TRACKING)


def _percent(text: str) -> str:
    """Write percent-escapes in one way: unreserved characters plain, all else that needs it in upper-case hex."""

    def one(found: re.Match[str]) -> str:
        code, plain = found.groups()
        if code is not None:
            character = chr(int(code, 16))
            return character if character in _UNRESERVED else f"%{code.upper()}"
        return plain if plain in _LITERAL else "".join(f"%{b:02X}" for b in plain.encode("utf-8", "replace"))

    return _PERCENT.sub(one, text)


def _request_form(address: str) -> str:
    """Escape only what cannot go over the wire: white space, controls, quotes, angle brackets and non-ASCII."""
    return "".join(
        c if "!" <= c <= "~" and c not in '"<>' else "".join(f"%{b:02X}" for b in c.encode("utf-8", "replace"))
        for c in address
    )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@cache
def _suffixes() -> tldextract.TLDExtract:
    # No list is downloaded: results must not depend on the day or on a network.
    return tldextract.TLDExtract(cache_dir=None, suffix_list_urls=(), include_psl_private_domains=True)

"""Turn the bytes of a page into text the way browsers name encodings, and never fail on a label."""

import codecs
import re
from typing import NamedTuple

import webencodings

_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_HEADER_CHARSET = re.compile(r"charset\s*=\s*[\"']?\s*([^\"';\s]+)", re.IGNORECASE)
_META_CHARSET = re.compile(rb"<meta\b[^>]{0,300}?charset\s*=\s*[\"']?\s*([^\"'\s/>;]+)", re.IGNORECASE)
_XML_ENCODING = re.compile(rb"^\s*<\?xml\b[^>]{0,200}?encoding\s*=\s*[\"']([^\"'>]+)", re.IGNORECASE)
_PRESCAN_BYTES = 4096
_DETECT_BYTES = 200_000
_DAMAGED_SHARE = 0.1

# What the web means by these labels is wider than the codec of the same name in Python.
_WIDER = {"shift_jis": "cp932", "euc-kr": "cp949", "gbk": "gb18030", "big5": "big5hkscs"}


class Decoded(NamedTuple):
    """Text of a body and the Python codec that read it."""

    text: str
    encoding: str


def decode(body: bytes, content_type: str | None = None) -> Decoded:
    """Decode a page. Order: byte-order mark, valid UTF-8, labels (header, meta, XML), detection; never raises.

    Labels follow the WHATWG encoding standard: `iso-8859-1` is windows-1252, and unknown labels do not count.
    A label counts only where the whole body can be read by it.
    """
    for mark, name in _BOMS:
        if body.startswith(mark):
            return Decoded(body[len(mark) :].decode(name, "replace"), name)
    labels = labels_of(body, content_type)
    # Bytes above 0x7F that happen to be valid UTF-8 are UTF-8, whatever a label says; pure ASCII may be ISO-2022-JP.
    if not body.isascii() or not labels:
        text = _strict(body, "utf-8")
        if text is not None:
            return Decoded(text, "utf-8")
        if "utf-8" in labels and _hardly_damaged(body):
            return Decoded(body.decode("utf-8", "replace"), "utf-8")
    for name in labels:
        text = _strict(body, name)
        if text is not None:
            return Decoded(text, name)
    name = _detect(body)
    return Decoded(body.decode(name, "replace"), name)


def labels_of(body: bytes, content_type: str | None) -> list[str]:
    """Python codecs of the known labels that header, meta elements and XML declaration give, in this order."""
    found = _HEADER_CHARSET.findall(content_type or "")
    head = body[:_PRESCAN_BYTES]
    declared = [*_META_CHARSET.findall(head), *_XML_ENCODING.findall(head)]
    inside = [_codec(raw.decode("ascii", "replace")) for raw in declared]
    # A body that can be searched for an ASCII declaration is not UTF-16, whatever that declaration says.
    known = [_codec(label) for label in found] + ["utf-8" if n and n.startswith("utf-16") else n for n in inside]
    return list(dict.fromkeys(name for name in known if name is not None))


def _codec(label: str) -> str | None:
    found = webencodings.lookup(label)
    if found is None or found.name == "x-user-defined":
        return None
    name: str = _WIDER.get(found.name, found.codec_info.name)
    return name


def _strict(body: bytes, name: str) -> str | None:
    try:
        return body.decode(name)
    except (UnicodeDecodeError, UnicodeError):
        return None


def _hardly_damaged(body: bytes) -> bool:
    """Whether nearly all characters beyond ASCII are good UTF-8: a cut or a slip, not another encoding."""
    beyond = [c for c in body.decode("utf-8", "replace") if c > "\x7f"]
    return beyond.count("\ufffd") <= _DAMAGED_SHARE * len(beyond)


def _detect(body: bytes) -> str:
    from charset_normalizer import from_bytes

    # Markup is ASCII and dilutes the few bytes that tell encodings apart.
    bare = re.sub(rb"<[^<>]*>", b" ", body[:_DETECT_BYTES])
    best = from_bytes(bare).best()
    if best is None or best.encoding == "ascii" or _single_byte(best.encoding):
        return "cp1252" if best is None else _as_browsers(best.encoding)
    return _WIDER.get(best.encoding, best.encoding)


def _single_byte(name: str) -> bool:
    return name.startswith(
        ("iso8859", "latin", "cp125", "cp4", "cp8", "mac", "koi8", "hp_", "cp1006", "cp1026", "cp1140")
    )


def _as_browsers(name: str) -> str:
    # Code pages that no browser knows, and Latin-1's many look-alikes, are guesses at Western text.
    if name in ("ascii", "iso8859_1", "latin_1") or webencodings.lookup(name.replace("iso8859_", "iso-8859-")) is None:
        return "cp1252"
    return name

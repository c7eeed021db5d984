"""Make text that others wrote harmless in a prompt: it can never become a control token, a tool call or its result."""

import re
import unicodedata
from collections.abc import Iterable

_BARS = re.compile(r"([<＜])(?=[|｜])|(?<=[|｜])([>＞])")
_TAG_NAMES = (
    r"tool_?calls?|tool_?responses?|tool_?results?|tools?|function(?:_?calls?|_?results?|s)?|parameters?|invoke|think(?:ing)?|thought|"
    r"reasoning|system|assistant|user|human|s|bos|eos|pad|unk|mask|sep|cls|start_of_turn|end_of_turn|im_start|im_end|endoftext"
)
_TAGS = re.compile(rf"<(?=(?:/\s*)?(?:{_TAG_NAMES})\s*(?:[=>/:]|\s\w+\s*=))", re.IGNORECASE)
_BRACKETS = re.compile(r"\[(?=/?(?:INST|TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS|SYSTEM_PROMPT)\])|<(?=<\s*/?SYS\s*>>)")
# Joiners stay: several scripts are written with them.
_SURROGATE = re.compile("[\ud800-\udfff]")
_INVISIBLE = re.compile(
    "[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def defang(text: str, tokens: Iterable[str] = ()) -> str:
    """Return `text` with a space inside everything that a chat template or tokenizer could take for control.

    Invisible characters and lone surrogates go first, so that removing them cannot join two halves. `tokens` are
    further strings to break, e.g. a tokenizer's added tokens. Doing it twice changes nothing.
    """
    text = _INVISIBLE.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    text = without_surrogates(text)
    text = _BARS.sub(lambda m: f"{m[1]} " if m[1] else f" {m[2]}", text)
    text = _BRACKETS.sub(lambda m: f"{m[0]} ", _TAGS.sub("< ", text))
    for token in tokens:
        if len(token) > 1 and token.strip() and token in text:
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def without_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON can carry and no encoder takes, by U+FFFD; pairs become their character."""
    if text.isascii() or not _SURROGATE.search(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def clean_values(value: object) -> object:
    """Apply `without_surrogates` to every string within plain JSON values."""
    if isinstance(value, str):
        return without_surrogates(value)
    if isinstance(value, list):
        return [clean_values(item) for item in value]
    if isinstance(value, dict):
        return {without_surrogates(str(key)): clean_values(item) for key, item in value.items()}
    return value


def one_line(text: str) -> str:
    """Fold white space: titles and addresses stay on one line. Composed to NFC, so that equal titles look equal."""
    return " ".join(unicodedata.normalize("NFC", text).split())

"""The two tools as OpenAI schemas, and the check of what a model passes to them."""

from dataclasses import dataclass
from typing import Any

from groundhop.errors import MalformedCallError

MAX_QUERIES = 3

TOOL_SCHEMAS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": f"Search the web. Up to {MAX_QUERIES} queries.",
            "parameters": {
                "type": "object",
                "properties": {
                    "queries": {
                        "type": "array",
                        "items": {"type": "string"},
                        "minItems": 1,
                        "maxItems": MAX_QUERIES,
                        "description": "Plain words, no operators.",
                    }
                },
                "required": ["queries"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "visit",
            "description": "Read the parts of a page that fit `find`.",
            "parameters": {
                "type": "object",
                "properties": {
                    "url": {"type": "string", "description": "Address from a result or a link."},
                    "find": {"type": "string", "description": "What to look for on the page."},
                },
                "required": ["url"],
                "additionalProperties": False,
            },
        },
    },
)
"""Names follow most search agents: `search` takes a list, `visit` an address and a goal."""


@dataclass(frozen=True, slots=True)
class SearchCall:
    """`search` with its queries, at least one, none empty."""

    queries: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VisitCall:
    """`visit`; an empty `find` asks for the page's beginning."""

    url: str
    find: str


def check(name: str, arguments: dict[str, Any]) -> SearchCall | VisitCall:
    """Turn a model's arguments into a call. A lone string counts as a list of one.

    Raises: MalformedCallError whose text the model can act on.
    """
    match name:
        case "search":
            return SearchCall(_queries(arguments))
        case "visit":
            return VisitCall(_text(arguments, "url", required=True), _text(arguments, "find", required=False))
        case _:
            raise MalformedCallError(f"there is no tool {name[:40]!r}: use search or visit")


def _queries(arguments: dict[str, Any]) -> tuple[str, ...]:
    # `query` is what many models were trained to write; its meaning is plain.
    value = arguments.get("queries", arguments.get("query"))
    if value is None:
        raise MalformedCallError('search needs "queries": a list of strings')
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise MalformedCallError('"queries" must be a list of strings')
    queries = tuple(dict.fromkeys(" ".join(item.split()) for item in items if item.strip()))
    if not queries:
        raise MalformedCallError('"queries" is empty: write at least one query')
    if len(queries) > MAX_QUERIES:
        raise MalformedCallError(f"at most {MAX_QUERIES} queries a call, got {len(queries)}")
    return queries


def _text(arguments: dict[str, Any], key: str, *, required: bool) -> str:
    value = arguments.get(key)
    if value is None and not required:
        return ""
    if not isinstance(value, str) or (required and not value.strip()):
        raise MalformedCallError(f'visit needs "{key}": a string')
    return value.strip()

"""Put a bench's tables where docs/results.md keeps them."""

import re
from pathlib import Path


def replace_between(page: Path, name: str, text: str) -> None:
    """Put `text` between the page's markers for `name`."""
    start, end = f"<!-- results: {name} -->", "<!-- /results -->"
    pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
    old = page.read_text("utf-8")
    if not pattern.search(old):
        raise SystemExit(f"{page} has no {start}")
    page.write_text(pattern.sub(lambda _: f"{start}\n\n{text}\n\n{end}", old), "utf-8")

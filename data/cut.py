"""Cut the small web that ships with the project out of the corpus. Usage: python data/cut.py CORPUS_FOLDER [OUTPUT]

The corpus folder holds `small.jsonl.zst` and `pages.jsonl.zst` (url, html, licence, source_repo, commit a line) and
`LICENSES/`. The outcome does not depend on chance: the same corpus gives the same bytes.
"""

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from groundhop import jsonl
from groundhop.pipeline.extract import extract
from groundhop.pipeline.urls import url_key
from groundhop.pipeline.warc import Stored, WarcAppender

LIMIT_BYTES = 4_980_000
SMALL_HTML = 160_000
LINKED_HTML = 60_000
LEFT_OUT = "www.debian.org"  # its texts are under the GPL
DATE = "2026-11-29T00:00:00Z"
MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
FULL_DATE = re.compile(rf"\b(?:(?:{MONTHS}) \d{{1,2}}, (?:1[5-9]|20)\d\d|\d{{1,2}} (?:{MONTHS}) (?:1[5-9]|20)\d\d)\b")


@dataclass(slots=True)
class Candidate:
    """A page of the corpus with what speaks for it."""

    row: dict[str, str]
    dates: int = 0
    targets: tuple[str, ...] = ()
    characters: int = 0
    named_by: set[str] = field(default_factory=set)

    @property
    def tier(self) -> int:
        """0: facts and onward links; 1: one of each at least; 2: neither."""
        if self.characters < 400:
            return 2
        return 0 if self.dates >= 2 and len(self.targets) >= 2 else 1 if self.dates and self.targets else 2


def rows(path: Path) -> Iterator[dict[str, str]]:
    """Yield the corpus' rows."""
    return jsonl.read(path, dict)


def look(candidate: Candidate) -> Candidate:
    """Fill in dates, main-text links and length."""
    found = extract(candidate.row["html"], candidate.row["url"])
    if found is not None:
        candidate.dates = len(set(FULL_DATE.findall(found.text)))
        candidate.targets = tuple(dict.fromkeys(link.key for link in found.links if link.main))
        candidate.characters = len(found.text)
    return candidate


def in_turn(candidates: Iterable[tuple[str, Candidate]]) -> Iterator[tuple[str, Candidate]]:
    """The best of each source in turn: most named first, then by key."""
    by_source: dict[str, list[tuple[str, Candidate]]] = defaultdict(list)
    for key, candidate in sorted(candidates, key=lambda item: (-len(item[1].named_by), item[0])):
        by_source[candidate.row["source_repo"]].append((key, candidate))
    for place in range(max(map(len, by_source.values()), default=0)):
        for source in sorted(by_source):
            if place < len(by_source[source]):
                yield by_source[source][place]


def linked(included: dict[str, Candidate], corpus: dict[str, dict[str, str]], seen: dict[str, Candidate]) -> None:
    """Look at the pages that the included ones link to from their main text."""
    for key, page in included.items():
        for target in page.targets:
            if target in corpus and target not in included and target != key:
                if target not in seen:
                    seen[target] = look(Candidate(corpus[target]))
                seen[target].named_by.add(key)


def cut(folder: Path, output: Path) -> Counter[str]:
    """Write the WARC. Returns pages by source."""
    output.unlink(missing_ok=True)
    small = [row for row in rows(folder / "small.jsonl.zst") if len(row["html"]) <= SMALL_HTML]
    corpus = {
        url_key(row["url"]): row
        for row in rows(folder / "pages.jsonl.zst")
        if len(row["html"]) <= LINKED_HTML and LEFT_OUT not in row["url"]
    }
    about = {"software": "groundhop data/cut.py", "description": "not a crawl: see data/README.md"}
    warc = WarcAppender(output, 0, DATE, about)
    included: dict[str, Candidate] = {}
    written = 0

    def add(key: str, candidate: Candidate) -> bool:
        nonlocal written
        row = candidate.row
        headers = (("Content-Type", "text/html; charset=utf-8"),)
        source = f"{row['source_repo']}@{row['commit'][:12]}"
        body = row["html"].encode("utf-8", "replace")
        pointer = warc.append(Stored(row["url"], 200, headers, body, licence=row["licence"], source=source), DATE)
        if pointer.offset + pointer.length > LIMIT_BYTES:
            return False
        written = pointer.offset + pointer.length
        included[key] = candidate
        return True

    for row in small:
        add(url_key(row["url"]), look(Candidate(row)))
    room, seen = True, dict[str, Candidate]()
    while room:
        before = len(included)
        linked(included, corpus, seen)
        for tier in (0, 1, 2):
            for key, candidate in in_turn((k, c) for k, c in seen.items() if c.tier == tier and k not in included):
                room = room and add(key, candidate)
            if len(included) > before:
                break
        room = room and len(included) > before
    warc.close()
    with output.open("r+b") as file:
        file.truncate(written)
    return Counter(candidate.row["source_repo"] for candidate in included.values())


def main() -> None:
    """Run the cut and print what was taken."""
    folder = Path(sys.argv[1])
    output = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent / "small-web.warc.gz"
    counts = cut(folder, output)
    print(
        json.dumps(
            {"pages": sum(counts.values()), "bytes": output.stat().st_size, "by_source": dict(sorted(counts.items()))},
            indent=1,
        )
    )


if __name__ == "__main__":
    main()

"""A search index over pages on disk: BM25 over passages (tantivy), and the pages themselves beside it (SQLite).

Answers depend on the pages alone: not on the order in which they came, nor on how tantivy laid them out.
"""

import hashlib
import re
import shutil
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
import tantivy
import zstandard

from groundhop.agents.passages import passages
from groundhop.agents.untrusted import without_surrogates
from groundhop.errors import MissingError
from groundhop.records import Page

_FORMAT = "groundhop-index-1"
_ANALYSER = "groundhop"
_MAX_HITS = 4096
_PAGES = "CREATE TABLE pages (key TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID"
_NAMES = "CREATE TABLE names (name TEXT PRIMARY KEY, key TEXT NOT NULL) WITHOUT ROWID"
_BY_KEY = "SELECT body FROM pages WHERE key = ?"
_BY_NAME = "SELECT body FROM names JOIN pages USING (key) WHERE name = ?"


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage that answers a query."""

    rank: int
    """From 1."""
    key: str
    url: str
    title: str
    text: str
    start: int
    end: int
    """Where the passage lies in `Page.text`."""
    score: float


def build_index(pages: Iterable[Page], folder: Path, *, passage_words: int) -> int:
    """Write an index of `pages` into `folder`, replacing what is there. Returns the number of passages.

    A kill leaves the old index or none. Of two pages with one key the first counts.
    """
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    (temporary / "passages").mkdir(parents=True)
    names = sqlite3.connect(temporary / "pages.sqlite")
    names.execute(_PAGES)
    names.execute(_NAMES)
    index = tantivy.Index(_schema(), path=str(temporary / "passages"))
    index.register_tokenizer(_ANALYSER, _analyser())
    writer = index.writer(heap_size=128_000_000, num_threads=1)
    digests: list[str] = []
    count = 0
    for page in _stored(pages, names):
        digests.append(
            hashlib.sha256(msgspec.json.encode((page.key, page.url, page.title, page.text, page.links))).hexdigest()
        )
        for start, end in passages(page.text, passage_words):
            count += 1
            writer.add_document(_document(page, start, end))
    writer.commit()
    writer.wait_merging_threads()
    names.commit()
    names.close()
    version = hashlib.sha256("\n".join([_FORMAT, str(passage_words), *sorted(digests)]).encode()).hexdigest()
    (temporary / "index.json").write_bytes(
        msgspec.json.encode({"format": _FORMAT, "version": version, "pages": len(digests), "passages": count})
    )
    shutil.rmtree(folder, ignore_errors=True)
    temporary.replace(folder)
    return count


class LocalIndex:
    """Searches a folder that `build_index` wrote. Safe to share between threads."""

    def __init__(self, folder: Path) -> None:
        """Open the index. Raises: MissingError without one."""
        try:
            meta = msgspec.json.decode((folder / "index.json").read_bytes())
        except FileNotFoundError as error:
            raise MissingError(f"no search index in {folder}: run `groundhop pages CONFIG` first") from error
        self.version: str = meta["version"]
        """Digest of the pages and of how they were cut: equal versions give equal answers."""
        self.pages: int = meta["pages"]
        self._schema = _schema()
        self._index = tantivy.Index(self._schema, path=str(folder / "passages"))
        self._index.register_tokenizer(_ANALYSER, _analyser())
        self._searcher = self._index.searcher()
        self._analyser = _analyser()
        self._path = f"{(folder / 'pages.sqlite').resolve().as_uri()}?mode=ro&immutable=1"
        self._local = threading.local()

    def search(self, query: str, top: int) -> list[Hit]:
        """The `top` best passages for the plain words of `query`; no character of it is an operator.

        Equal scores are ordered by page key, then offset.
        """
        words = sorted(set(self._analyser.analyze(without_surrogates(query))))
        if not words or top < 1:
            return []
        shoulds = [(tantivy.Occur.Should, tantivy.Query.term_query(self._schema, "body", word)) for word in words[:256]]
        found = self._best(tantivy.Query.boolean_query(shoulds), top)
        return [Hit(rank, *fields) for rank, fields in enumerate(found, start=1)]

    def page(self, url_or_key: str) -> Page | None:
        """The page of that key or address; scheme, `www.`, fragment and a last slash make no difference."""
        database = self._database()
        for name in (url_or_key.strip(), loose(url_or_key)):
            row = database.execute(_BY_KEY, (name,)).fetchone() or database.execute(_BY_NAME, (name,)).fetchone()
            if row is not None:
                return msgspec.json.decode(zstandard.ZstdDecompressor().decompress(row[0]), type=Page)
        return None

    def known(self, keys: Sequence[str]) -> set[str]:
        """Those of `keys` that name a page of the index."""
        database = self._database()
        return {key for key in keys if database.execute("SELECT 1 FROM pages WHERE key = ?", (key,)).fetchone()}

    def _best(self, query: tantivy.Query, top: int) -> list[tuple[Any, ...]]:
        wanted = top + 8
        while True:
            hits = self._searcher.search(query, limit=wanted, count=False).hits
            # All passages that tie with the last one that counts must be in sight, or the layout would choose.
            complete = len(hits) < wanted or hits[-1][0] < hits[top - 1][0] or wanted >= _MAX_HITS
            if complete:
                break
            wanted *= 4
        found = [
            (*msgspec.json.decode(bytes(self._searcher.doc(place).to_dict()["hit"][0])), score) for score, place in hits
        ]
        return sorted(found, key=lambda row: (-round(row[6], 5), row[0], row[4]))[:top]

    def _database(self) -> sqlite3.Connection:
        if not hasattr(self._local, "database"):
            self._local.database = sqlite3.connect(self._path, uri=True)
        database: sqlite3.Connection = self._local.database
        return database


def loose(url: str) -> str:
    """What two spellings of one address share, for looking up what a model wrote; never a key."""
    plain = unquote(url.strip().strip("<>").partition("#")[0])
    bare = re.sub(r"^[a-z][a-z0-9+.-]*://", "", plain, flags=re.IGNORECASE)
    host, slash, path = bare.partition("/")
    return (
        "loose:"
        + host.lower().removeprefix("www.").removesuffix(":80").removesuffix(":443")
        + (slash + path).rstrip("/")
    )


def _stored(pages: Iterable[Page], database: sqlite3.Connection) -> Iterator[Page]:
    packer = zstandard.ZstdCompressor(level=6)
    for page in pages:
        row = (page.key, packer.compress(msgspec.json.encode(page)))
        if not database.execute("INSERT OR IGNORE INTO pages VALUES (?, ?)", row).rowcount:
            continue
        # Where two pages answer to one loose name the lesser key wins, whichever came first.
        for name in dict.fromkeys((page.url, loose(page.url))):
            database.execute(
                "INSERT INTO names VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET key = min(key, excluded.key)",
                (name, page.key),
            )
        yield page


def _schema() -> tantivy.Schema:
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("body", stored=False, tokenizer_name=_ANALYSER, index_option="freq")
    builder.add_bytes_field("hit", stored=True, indexed=False)
    return builder.build()


def _analyser() -> tantivy.TextAnalyzer:
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    filters = (
        tantivy.Filter.remove_long(60),
        tantivy.Filter.lowercase(),
        tantivy.Filter.ascii_fold(),
        tantivy.Filter.stemmer("english"),
    )
    for each in filters:
        builder = builder.filter(each)
    return builder.build()


def _document(page: Page, start: int, end: int) -> tantivy.Document:
    text = page.text[start:end]
    hit = msgspec.json.encode((page.key, page.url, page.title, text, start, end))
    return tantivy.Document(body=f"{page.title}\n{text}", hit=hit)

"""The local index: what is found, where, and that nothing but the pages decides it."""

import random
from itertools import pairwise
from pathlib import Path

import pytest

from groundhop.agents.index import LocalIndex, build_index
from groundhop.agents.passages import count_words, passages, sentences
from groundhop.errors import MissingError
from groundhop.records import Page


def page(name: str, text: str, title: str = "") -> Page:
    url = f"https://www.h.example/{name}"
    return Page(url=url, key=f"h.example/{name}", host="h.example", title=title or name, text=text, digest=name)


def index(folder: Path, *pages: Page, words: int = 20) -> LocalIndex:
    build_index(pages, folder / "index", passage_words=words)
    return LocalIndex(folder / "index")


def test_a_hit_names_the_passage_by_offsets_into_the_pages_text(tmp_path: Path) -> None:
    text = "First sentence about nothing. " * 10 + "\nThe heron nests in Dublin.\n" + "Last words follow here. " * 10
    (hit,) = index(tmp_path, page("a", text)).search("heron nests", 5)
    assert text[hit.start : hit.end] == hit.text
    assert "heron" in hit.text
    assert (hit.rank, hit.key, hit.url) == (1, "h.example/a", "https://www.h.example/a")


def test_the_title_counts_for_every_passage(tmp_path: Path) -> None:
    got = index(
        tmp_path, page("a", "It was built in 1904.", "Zeppelin hangar"), page("b", "It was built in 1905.", "Barn")
    ).search("zeppelin", 5)
    assert [hit.key for hit in got] == ["h.example/a"]


@pytest.mark.parametrize(
    "query",
    ['"heron" AND -dublin', "heron:dublin", "(heron", "heron~2^3 [a TO b]", "+heron *", "title:/heron/", "heron\x00"],
)
def test_no_character_of_a_query_is_an_operator(tmp_path: Path, query: str) -> None:
    assert (
        index(tmp_path, page("a", "The heron nests."), page("b", "Other words.")).search(query, 1)[0].key
        == "h.example/a"
    )


@pytest.mark.parametrize("query", ["", "   ", "?!", "\ud83d"])
def test_a_query_without_words_finds_nothing(tmp_path: Path, query: str) -> None:
    assert index(tmp_path, page("a", "The heron nests.")).search(query, 3) == []


def test_word_forms_and_accents_are_folded(tmp_path: Path) -> None:
    got = index(tmp_path, page("a", "Many bridges in Orléans."), page("b", "Nothing."))
    assert got.search("bridge orleans", 1)[0].key == "h.example/a"


def test_ties_are_ordered_by_key_whatever_the_order_of_the_pages(tmp_path: Path) -> None:
    pages = [page(f"{n:03}", "The same heron text.", "same") for n in range(100)]
    expected = [f"h.example/{n:03}" for n in range(5)]
    for seed in range(3):
        random.Random(seed).shuffle(pages)
        folder = tmp_path / str(seed)
        folder.mkdir()
        assert [hit.key for hit in index(folder, *pages).search("heron", 5)] == expected


def test_the_version_depends_on_the_pages_and_not_on_their_order(tmp_path: Path) -> None:
    a, b, c = page("a", "One."), page("b", "Two."), page("b", "Three.")
    versions = []
    for name, pages in {"ab": (a, b), "ba": (b, a), "ac": (a, c)}.items():
        (tmp_path / name).mkdir()
        versions.append(index(tmp_path / name, *pages).version)
    assert versions[0] == versions[1] != versions[2]


@pytest.mark.parametrize(
    "name",
    [
        "h.example/a",
        "https://www.h.example/a",
        "http://h.example/a/",
        "HTTPS://WWW.H.EXAMPLE/a#part",
        " www.h.example/a ",
        "<https://h.example/a>",
    ],
)
def test_a_page_is_found_under_every_spelling_of_its_address(tmp_path: Path, name: str) -> None:
    got = index(tmp_path, page("a", "One.")).page(name)
    assert got is not None
    assert got.text == "One."


def test_addresses_that_differ_in_the_path_stay_apart(tmp_path: Path) -> None:
    got = index(tmp_path, page("A", "Upper."), page("a", "Lower."), page("a?x=1", "Query."))
    found = [got.page(f"https://www.h.example/{name}") for name in ("A", "a", "a?x=1", "b")]
    assert [p.text if p else None for p in found] == ["Upper.", "Lower.", "Query.", None]


def test_building_again_replaces_the_index(tmp_path: Path) -> None:
    index(tmp_path, page("a", "One heron."))
    got = index(tmp_path, page("b", "Two herons."))
    assert got.page("h.example/a") is None
    assert [hit.key for hit in got.search("heron", 5)] == ["h.example/b"]


def test_a_missing_index_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="groundhop pages"):
        LocalIndex(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "One.",
        "Word " * 500,
        "A sentence here. " * 200,
        "line\n" * 300,
        "日本語の文章です。" * 100,
        "x" * 5000,
        "a.b.c. " * 50,
        "\n\n  lead\n\n",
    ],
)
def test_passages_cover_every_word_once_in_order(text: str) -> None:
    spans = passages(text, 40)
    covered = "".join(text[s:e] for s, e in spans)
    assert "".join(covered.split()) == "".join(text.split())
    assert all(a.end <= b.start for a, b in pairwise(spans))
    assert all(count_words(text[s:e]) <= 80 for s, e in spans)


def test_passages_end_with_sentences() -> None:
    text = "The first sentence has six words. Is the second one a question? Yes! " * 10
    assert all(text[e - 1] in ".?!" for _, e in passages(text, 25))


def test_sentences_leave_white_space_out() -> None:
    assert [("  One two.  Three\n\n four ")[s:e] for s, e in sentences("  One two.  Three\n\n four ")] == [
        "One two.",
        "Three",
        "four",
    ]

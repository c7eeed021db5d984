import json
from pathlib import Path

import pytest

from groundhop import jsonl
from groundhop.config import PagesConfig
from groundhop.pipeline.pages import LEDGER_FILE, PAGES_FILE, Drop, page_from_html, read_pages, run, trusted_canonical
from groundhop.pipeline.warc import Stored, WarcAppender
from groundhop.records import Failure, Page
from groundhop.runs import StageFolder

WORDS = "The mill stood by the river for two hundred years and ground the corn of three villages until the flood came. "
DATE = "2020-02-02T02:02:02Z"


def body(text: str = "", head: str = "") -> str:
    return f"<html><head><title>Mill</title>{head}</head><body><main><p>{WORDS * 3}{text}</p></main></body></html>"


def rows(path: Path, *items: tuple[str, str]) -> Path:
    path.write_text(
        "".join(
            json.dumps({"url": u, "html": h, "licence": "CC0", "source_repo": "farm", "more": 1}) + "\n"
            for u, h in items
        )
    )
    return path


def stage(folder: Path, config: PagesConfig) -> tuple[list[Page], list[tuple[str, str]]]:
    stage_folder = StageFolder(folder, "pages")
    run(config, stage_folder, seed=0)
    failures = [(f.item, f.reason) for f in jsonl.read(folder / "failures.jsonl", Failure)]
    return list(read_pages(folder / PAGES_FILE)), failures


def pages_of(tmp_path: Path, *items: tuple[str, str], **changes: object) -> tuple[list[Page], list[tuple[str, str]]]:
    config = PagesConfig(jsonl=(rows(tmp_path / "in.jsonl", *items),), workers=1, **changes)  # type: ignore[arg-type]
    return stage(tmp_path / "pages", config)


def test_pages_are_sorted_by_key_and_carry_licence_and_source(tmp_path: Path) -> None:
    pages, failures = pages_of(tmp_path, ("http://z.example/", body()), ("http://a.example/", body()))
    assert [(p.key, p.url, p.licence, p.source) for p in pages] == [
        ("https://a.example/", "http://a.example/", "CC0", "farm"),
        ("https://z.example/", "http://z.example/", "CC0", "farm"),
    ] and failures == []


def test_of_two_pages_with_one_key_the_first_is_kept(tmp_path: Path) -> None:
    pages, failures = pages_of(
        tmp_path, ("http://a.example/x", body("first")), ("https://a.example/x/#y", body("second"))
    )
    assert ["first" in p.text for p in pages] == [True] and failures == [("https://a.example/x", "duplicate")]


def test_each_drop_has_its_reason(tmp_path: Path) -> None:
    items = [
        ("http://a.example/thin", "<p>short</p>"),
        ("http://a.example/none", ""),
        ("mailto:x@y.example", body()),
        ("http://a.example/no", body(head="<meta name=robots content='index, noai'>")),
    ]
    assert pages_of(tmp_path, *items) == (
        [],
        [
            ("http://a.example/thin", "thin"),
            ("http://a.example/none", "empty"),
            ("mailto:x@y.example", "bad_url"),
            ("http://a.example/no", "opted_out"),
        ],
    )


def test_an_opt_out_that_is_not_respected_is_recorded(tmp_path: Path) -> None:
    pages, _ = pages_of(
        tmp_path, ("http://a.example/", body(head="<meta name=robots content=noai>")), respect_opt_outs=False
    )
    assert [p.opt_outs for p in pages] == [("noai",)]


def test_a_line_that_cannot_be_read_does_not_stop_the_others(tmp_path: Path) -> None:
    path = rows(tmp_path / "in.jsonl", ("http://a.example/", body()))
    path.write_text('{"url": 5}\nnot json\n' + path.read_text())
    pages, failures = stage(tmp_path / "pages", PagesConfig(jsonl=(path,), workers=1))
    assert len(pages) == 1 and [reason for _, reason in failures] == ["damaged", "damaged"]


def test_a_canonical_that_names_the_home_page_folds_nothing(tmp_path: Path) -> None:
    head = "<link rel=canonical href='http://a.example/'>"
    pages, _ = pages_of(
        tmp_path,
        ("http://a.example/one", body("1", head)),
        ("http://a.example/two", body("2", head)),
        ("http://a.example/three?x=1", body("3", head)),
    )
    assert [p.key for p in pages] == ["https://a.example/one", "https://a.example/three?x=1", "https://a.example/two"]


def test_a_canonical_without_the_query_is_the_key_and_links_follow_it(tmp_path: Path) -> None:
    head = "<link rel=canonical href='/a'>"
    pages, failures = pages_of(
        tmp_path,
        ("http://a.example/a?ref=1", body("same", head)),
        ("http://a.example/a?ref=2", body("same", head)),
        ("http://a.example/b", body("<a href='/a?ref=2'>go</a>")),
    )
    assert [p.key for p in pages] == ["https://a.example/a", "https://a.example/b"] and pages[1].links[
        0
    ].key == "https://a.example/a"
    assert failures == [("https://a.example/a?ref=2", "duplicate")]


def test_a_canonical_whose_text_differs_is_not_trusted(tmp_path: Path) -> None:
    head = "<link rel=canonical href='/a'>"
    pages, _ = pages_of(
        tmp_path, ("http://a.example/a?page=1", body("one", head)), ("http://a.example/a?page=2", body("two", head))
    )
    assert [p.key for p in pages] == ["https://a.example/a", "https://a.example/a?page=2"]


@pytest.mark.parametrize(
    "canonical", ["http://other.example/a", "http://a.example/", "http://a.example/b", "http://a.example/a?x=1", None]
)
def test_other_canonicals_are_only_recorded(canonical: str | None) -> None:
    head = f"<link rel=canonical href='{canonical}'>" if canonical else ""
    page = page_from_html(body(head=head).encode(), "http://a.example/a?x=1", "text/html")
    assert isinstance(page, Page) and page.canonical == canonical and trusted_canonical(page) is None


@pytest.mark.parametrize(
    ("kind", "reason"), [("application/pdf", "not_html"), ("text/plain", "not_html"), ("image/svg+xml", "not_html")]
)
def test_other_kinds_of_content_are_no_pages(kind: str, reason: str) -> None:
    got = page_from_html(body().encode(), "http://a.example/", kind)
    assert isinstance(got, Drop) and got.reason == reason


@pytest.mark.parametrize("kind", ["text/html", "Text/HTML;charset=utf8mb4", "application/xhtml+xml", None, ""])
def test_html_by_any_name_is_a_page(kind: str | None) -> None:
    assert isinstance(page_from_html(body().encode(), "http://a.example/", kind), Page)


def warc(path: Path) -> Path:
    out = WarcAppender(path, 0, DATE, {"software": "test"})
    html = (("Content-Type", "text/html"),)
    out.append(Stored("http://a.example/old", 301, (("Location", "/new"),), b""), DATE)
    out.append(Stored("http://a.example/gone", 404, html, b"gone"), DATE)
    out.append(
        Stored("http://a.example/new", 200, html, body("<a href=/old>x</a>").encode(), licence="CC0", source="farm@1"),
        DATE,
    )
    out.append(Stored("http://a.example/pdf", 200, (("Content-Type", "application/pdf"),), b"%PDF"), DATE)
    out.close()
    return path


def test_a_warc_file_gives_pages_with_pointers_and_a_reason_for_all_else(tmp_path: Path) -> None:
    path = warc(tmp_path / "in.warc.gz")
    pages, failures = stage(tmp_path / "pages", PagesConfig(warc=(path,), workers=1))
    assert [(p.url, p.licence, p.source) for p in pages] == [("http://a.example/new", "CC0", "farm@1")] and pages[
        0
    ].warc is not None
    assert failures == [
        ("http://a.example/old", "redirect"),
        ("http://a.example/gone", "status"),
        ("http://a.example/pdf", "not_html"),
    ]


def test_a_link_to_a_redirect_has_the_key_of_where_it_leads(tmp_path: Path) -> None:
    pages, _ = stage(tmp_path / "pages", PagesConfig(warc=(warc(tmp_path / "in.warc.gz"),), workers=1))
    assert [(link.url, link.key) for link in pages[0].links] == [("http://a.example/old", "https://a.example/new")]


def test_a_killed_run_goes_on_behind_its_last_line_and_ends_the_same(tmp_path: Path) -> None:
    items = [(f"http://a.example/{n}", body(str(n)) if n % 3 else "<p>thin</p>") for n in range(9)]
    config = PagesConfig(jsonl=(rows(tmp_path / "in.jsonl", *items),), workers=1)
    whole = StageFolder(tmp_path / "whole", "pages")
    run(config, whole)
    # A ledger as a kill leaves it: some lines, the last of them torn.
    (tmp_path / "killed").mkdir()
    ledger = tmp_path / "killed" / LEDGER_FILE
    from groundhop.pipeline import pages as stage_module

    stage_module._extract_all(config, tmp_path / "none", ledger)
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(lines[:4]) + lines[4][:25])
    run(config, StageFolder(tmp_path / "killed", "pages"))
    names = (PAGES_FILE, "failures.jsonl", "done.json")
    assert [(tmp_path / "killed" / n).read_bytes() for n in names] == [
        (tmp_path / "whole" / n).read_bytes() for n in names
    ]


def test_the_number_of_workers_changes_nothing(tmp_path: Path) -> None:
    path = rows(tmp_path / "in.jsonl", *((f"http://a.example/{n}", body(str(n))) for n in range(5)))
    for workers in (1, 2):
        run(PagesConfig(jsonl=(path,), workers=workers), StageFolder(tmp_path / str(workers), "pages"))
    assert (tmp_path / "1" / PAGES_FILE).read_bytes() == (tmp_path / "2" / PAGES_FILE).read_bytes()


def test_a_finished_stage_does_nothing(tmp_path: Path) -> None:
    folder = StageFolder(tmp_path, "pages")
    folder.finish({})
    run(PagesConfig(jsonl=(tmp_path / "absent.jsonl",)), folder)
    assert not (tmp_path / PAGES_FILE).exists()

import gzip
import json
from pathlib import Path

import pytest
from tests.pipeline.commoncrawl.ccserver import (
    FILE,
    RELEASE,
    Archive,
    CommonCrawl,
    busy,
    html,
    ignore_range,
    parquet,
    part,
    served,
)

from groundhop import jsonl
from groundhop.config import PagesConfig, convert
from groundhop.errors import ConfigError, ProviderError
from groundhop.pipeline.commoncrawl import collect as room
from groundhop.pipeline.commoncrawl.collect import CAPTURES, LEDGER, RecordRow, collect
from groundhop.pipeline.pages import PAGES_FILE, read_pages, run
from groundhop.pipeline.warc import Stored, read_warc
from groundhop.records import Failure, Page
from groundhop.runs import StageFolder

PATH = f"/{FILE}"


def archive() -> Archive:
    found = Archive()
    for number in range(4):
        found.add(f"http://mill.example/{number}")
    found.add("http://mill.example/pdf", b"%PDF", mime="application/pdf")
    found.add("http://mill.example/short", truncated="length")
    found.add("http://river.example/", headers=(("X-Robots-Tag", "noai"),))
    return found


def config(server: CommonCrawl, *patterns: str, **changes: object) -> PagesConfig:
    settings: dict[str, object] = {
        "commoncrawl": patterns or ("mill.example", "river.example"),
        "commoncrawl_release": RELEASE,
        "commoncrawl_index_url": server.url,
        "commoncrawl_data_url": server.url,
        "allow_private": True,
        "pace_s": 0.0,
        "workers": 1,
    }
    return PagesConfig(**settings | changes)  # type: ignore[arg-type]


def stage(folder: Path, settings: PagesConfig) -> tuple[list[Page], list[tuple[str, str]]]:
    run(settings, StageFolder(folder, "pages"))
    failures = [(f.item, f.reason) for f in jsonl.read(folder / "failures.jsonl", Failure)]
    return list(read_pages(folder / PAGES_FILE)), failures


def test_the_pages_of_hosts_come_out_of_a_release(tmp_path: Path) -> None:
    with served(archive()) as server:
        pages, failures = stage(tmp_path, config(server))
    assert [page.url for page in pages] == [f"http://mill.example/{n}" for n in range(4)]
    assert failures == [("http://river.example/", "opted_out")]
    assert {page.source for page in pages} == {RELEASE} and all(page.warc is not None for page in pages)
    summary = json.loads((tmp_path / "done.json").read_text())["commoncrawl"]
    assert summary == {
        "release": RELEASE,
        "patterns": 2,
        "captures": 5,
        "skipped": {"not_html": 1, "truncated": 1},
    }


def test_the_stored_file_holds_the_very_bytes_of_the_crawler(tmp_path: Path) -> None:
    found = archive()
    with served(found) as server:
        path = collect(config(server, "mill.example"), tmp_path)
    first_four = found.captures[3].offset + found.captures[3].length
    assert path.read_bytes() == found.content[:first_four]


def test_one_request_at_a_time_under_a_name_that_can_be_answered(tmp_path: Path) -> None:
    with served(archive()) as server:
        collect(config(server, contact="me@a.example"), tmp_path)
    assert server.most_at_once == 1
    assert all(agent.startswith("groundhop/") and agent.endswith("(+me@a.example)") for agent in server.agents)


def test_faults_are_failures_by_name_and_never_another_page(tmp_path: Path) -> None:
    found = archive()
    third, fourth = found.captures[2], found.captures[3]

    def answer(handler, content: bytes) -> None:  # type: ignore[no-untyped-def]
        if handler.headers["Range"].startswith(f"bytes={fourth.offset}-"):
            part(content[:50], "bytes 0-49/99")(handler, content)
        else:
            ignore_range(handler, content)

    with served(found) as server:
        server.always[PATH] = answer
        # The index leads from the second page to the record of the third.
        server.rows[1] |= {"offset": str(third.offset), "length": str(third.length)}
        del server.rows[2]
        pages, failures = stage(tmp_path, config(server, "mill.example"))
    assert [page.url for page in pages] == ["http://mill.example/0"]
    assert failures == [("http://mill.example/1", "wrong_record"), ("http://mill.example/3", "wrong_range")]


def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(archive()) as server:
        whole = collect(config(server), tmp_path / "whole")
        real, calls = room.read_range, 0

        async def dies(*arguments: object, **options: object) -> object:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise KeyboardInterrupt
            return await real(*arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(room, "read_range", dies)
        with pytest.raises(KeyboardInterrupt):
            collect(config(server), tmp_path / "killed")
        monkeypatch.setattr(room, "read_range", real)
        # What a kill may leave: half a member behind the last whole one, half a line in the ledger.
        with (tmp_path / "killed" / whole.name).open("ab") as file:
            file.write(b"\x1f\x8b\x08half")
        with (tmp_path / "killed" / LEDGER).open("ab") as file:
            file.write(b'{"url": "http')
        asked = len(server.lines)
        killed = collect(config(server), tmp_path / "killed")
        # Two records were there, the index is not asked again.
        assert len(server.lines) - asked == 3
    names = (whole.name, LEDGER, CAPTURES)
    assert [(killed.parent / n).read_bytes() for n in names] == [(whole.parent / n).read_bytes() for n in names]


def test_a_data_server_that_is_down_ends_the_run_and_a_later_one_goes_on(tmp_path: Path) -> None:
    with served(archive()) as server:
        server.always[PATH] = busy()
        with pytest.raises(ProviderError, match="run again later"):
            collect(config(server), tmp_path, base_s=0.001)
        server.always.clear()
        path = collect(config(server), tmp_path, base_s=0.001)
    assert [s.url for s in read_warc(path) if isinstance(s, Stored)] == [
        *(f"http://mill.example/{n}" for n in range(4)),
        "http://river.example/",
    ]


def test_one_record_that_the_server_never_gives_is_left_out_and_named(tmp_path: Path) -> None:
    found = archive()
    first = found.captures[0]

    def answer(handler, content: bytes) -> None:  # type: ignore[no-untyped-def]
        if handler.headers["Range"].startswith(f"bytes={first.offset}-"):
            busy(503, "0")(handler, content)
        else:
            ignore_range(handler, content)

    with served(found) as server:
        server.always[PATH] = answer
        collect(config(server, "mill.example"), tmp_path, base_s=0.001)
    rows = list(jsonl.read(tmp_path / LEDGER, RecordRow))
    assert [(row.reason, row.temporary) for row in rows] == [("status", True), *[(None, False)] * 3]


def test_private_addresses_stay_refused(tmp_path: Path) -> None:
    with served(archive()) as server:
        with pytest.raises(ProviderError, match="private_address"):
            collect(config(server, allow_private=False), tmp_path)
        assert server.lines == []


def test_a_cache_outside_the_run_serves_the_next_run(tmp_path: Path) -> None:
    with served(archive()) as server:
        collect(config(server, commoncrawl_cache=tmp_path / "cache"), tmp_path / "one")
        asked = sum("-index?" in line for line in server.lines)
        collect(config(server, commoncrawl_cache=tmp_path / "cache"), tmp_path / "two")
        assert sum("-index?" in line for line in server.lines) == asked
    assert (tmp_path / "one" / CAPTURES).read_bytes() == (tmp_path / "two" / CAPTURES).read_bytes()


def test_hosts_drawn_from_a_rank_file_are_looked_up(tmp_path: Path) -> None:
    found = Archive()
    for number in range(1, 21):
        found.add(f"http://h{number}.example/")
    rows = "".join(f"{n}\t9.0E5\t{n}\t1.0E-5\texample.h{n}\n" for n in range(1, 21))
    header = "#harmonicc_pos\t#harmonicc_val\t#pr_pos\t#pr_val\t#host_rev\n"
    ranks = tmp_path / "ranks.txt.gz"
    ranks.write_bytes(gzip.compress((header + rows + "bad\n").encode()))
    settings = {"commoncrawl": (), "commoncrawl_ranks": ranks, "commoncrawl_band": (0.25, 0.5), "commoncrawl_hosts": 3}
    with served(found) as server:
        pages, _ = stage(tmp_path / "run", config(server, **settings))
    assert len(pages) == 3 and {page.host for page in pages} <= {f"h{n}.example" for n in range(5, 11)}
    summary = json.loads((tmp_path / "run" / "done.json").read_text())["commoncrawl"]["ranks"]
    assert (summary["file"], summary["rows"], summary["bad"], summary["hosts"]) == (
        "ranks.txt.gz",
        20,
        {"columns": 1},
        3,
    )
    assert len(summary["sha256"]) == 64


def test_a_page_limit_a_pattern_is_kept(tmp_path: Path) -> None:
    with served(archive()) as server:
        pages, _ = stage(tmp_path, config(server, "mill.example", commoncrawl_pages_per_pattern=2))
    assert len(pages) == 2


def test_the_columnar_index_serves_without_the_index_server(tmp_path: Path) -> None:
    found = archive()
    index = parquet(tmp_path / "index", found.captures)
    with served(found) as server:
        pages, _ = stage(tmp_path / "run", config(server, "mill.example", commoncrawl_index=(index,)))
        assert not any("-index?" in line for line in server.lines)
    assert len(pages) == 4


def test_crawled_pages_of_the_same_key_come_after(tmp_path: Path) -> None:
    lines = tmp_path / "in.jsonl"
    lines.write_text(json.dumps({"url": "https://mill.example/0", "html": html("mine").decode()}) + "\n")
    with served(archive()) as server:
        pages, failures = stage(tmp_path / "run", config(server, "mill.example", jsonl=(lines,)))
    assert [page.source for page in pages] == [None, RELEASE, RELEASE, RELEASE]
    assert ("https://mill.example/0", "duplicate") in failures


@pytest.mark.parametrize(
    ("pages", "key"),
    [
        ({"commoncrawl": ["a.example"]}, "commoncrawl_release"),
        ({"commoncrawl_release": "latest"}, "commoncrawl_release"),
        ({"commoncrawl_band": [0.5, 0.5]}, "commoncrawl_band"),
    ],
)
def test_a_config_that_pins_no_release_is_refused(pages: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        convert({"name": "x", "pages": pages}, "x.toml")

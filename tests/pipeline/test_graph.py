import random
from pathlib import Path

import pytest

from groundhop import jsonl
from groundhop.config import GraphConfig
from groundhop.pipeline.band import NodeRow
from groundhop.pipeline.graph import HostRow, neighbourhood, read_edges, run
from groundhop.records import Failure, Hop, Link, Page
from groundhop.runs import StageFolder

DEFAULT = GraphConfig()
WORDS = [
    "harbour",
    "pier",
    "timber",
    "merchant",
    "council",
    "winter",
    "lantern",
    "granite",
    "ledger",
    "sailor",
    "market",
    "bridge",
]


def page(key: str, targets: list[str], outside: list[str] = [], words: int = 80) -> Page:  # noqa: B006
    draw = random.Random(key)
    text, links = "", []
    for target in targets:
        text += "The council once bought "
        links.append(
            Link(
                url=f"https://{target}", key=target, anchor="this thing", main=True, start=len(text), end=len(text) + 10
            )
        )
        text += f"this thing from the {draw.choice(WORDS)} {draw.choice(WORDS)} of the {draw.choice(WORDS)} town.\n"
    text += "A " + " ".join(draw.choice(WORDS) for _ in range(words)) + "."
    links += [Link(url=f"https://{target}", key=target, anchor="Menu", main=False) for target in outside]
    return Page(
        url=f"https://{key}", key=key, host=key.split("/")[0], title=key, text=text, links=tuple(links), digest=""
    )


def web() -> list[Page]:
    pages = [page(f"a.example/p{n}", [f"a.example/p{(n * 7 + k) % 30}" for k in (1, 2, 3)]) for n in range(30)]
    return [
        *pages,
        page("b.example/q", ["a.example/p1"]),
        page("a.example/about", ["a.example/p2"]),
        page("a.example/thin", [], words=5),
    ]


def stage(tmp_path: Path, pages: list[Page], name: str = "graph", config: GraphConfig = DEFAULT) -> StageFolder:
    tmp_path.mkdir(exist_ok=True)
    jsonl.write(tmp_path / "pages.jsonl.zst", pages)
    folder = StageFolder(tmp_path / name, name)
    run(config=config, pages=tmp_path / "pages.jsonl.zst", folder=folder, seed=0)
    return folder


def outputs(folder: StageFolder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.path.iterdir())}


def test_the_order_of_pages_changes_no_byte(tmp_path: Path) -> None:
    pages = web()
    assert outputs(stage(tmp_path / "one", pages)) == outputs(stage(tmp_path / "two", pages[::-1]))


def test_each_dropped_page_is_kept_with_its_reason_and_counted(tmp_path: Path) -> None:
    folder = stage(tmp_path, web())
    failures = {row.item: row.reason for row in jsonl.read(folder.path / "failures.jsonl", Failure)}
    assert failures == {"a.example/about": "about", "a.example/thin": "thin"}
    assert folder.summary()["dropped"] == {"about": 1, "thin": 1}


def test_counts_add_up(tmp_path: Path) -> None:
    folder = stage(tmp_path, web())
    rows = list(jsonl.read(folder.path / "pages.jsonl", NodeRow))
    facts = folder.summary()
    assert facts["pages"] == 33 == len(rows)
    assert sum(row.pagerank for row in rows) == pytest.approx(1.0)
    assert facts["links"] == len(read_edges(folder.path)) == sum(row.out_degree for row in rows)
    assert facts["in_band"] == sum(row.in_band for row in rows) > 10


def test_hops_start_in_the_band_and_end_on_content(tmp_path: Path) -> None:
    folder = stage(tmp_path, web())
    rows = {row.key: row for row in jsonl.read(folder.path / "pages.jsonl", NodeRow)}
    hops = list(jsonl.read(folder.path / "hops.jsonl", Hop))
    assert len(hops) > 20
    assert all(rows[hop.seed].in_band and rows[hop.target].role == "content" for hop in hops)


def test_hosts_are_linked_when_their_pages_are_and_never_to_themselves(tmp_path: Path) -> None:
    hosts = {row.host: row for row in jsonl.read(stage(tmp_path, web()).path / "hosts.jsonl", HostRow)}
    assert (hosts["a.example"].pages, hosts["a.example"].in_degree, hosts["a.example"].out_degree) == (32, 1, 0)
    assert (hosts["b.example"].in_degree, hosts["b.example"].out_degree) == (0, 1)


def test_a_page_in_every_menu_of_its_host_is_navigation(tmp_path: Path) -> None:
    pages = [page(f"a.example/p{n}", [f"a.example/p{(n + 1) % 120}"], outside=["a.example/p0"]) for n in range(120)]
    folder = stage(tmp_path, pages)
    assert folder.summary()["dropped"] == {"navigation": 1}


def test_of_equal_texts_the_first_key_stays(tmp_path: Path) -> None:
    twin = page("a.example/p3", ["a.example/p4"])
    copy = Page(
        **{name: getattr(twin, name) for name in Page.__struct_fields__}
        | {"key": "a.example/p3b", "url": "https://a.example/p3b"}
    )
    folder = stage(tmp_path, [*web()[:3], copy, twin])
    failures = {row.item: row.reason for row in jsonl.read(folder.path / "failures.jsonl", Failure)}
    assert failures["a.example/p3b"] == "duplicate" and "a.example/p3" not in failures


def test_a_hosts_pages_beyond_its_cap_are_named(tmp_path: Path) -> None:
    folder = stage(tmp_path, web(), config=GraphConfig(max_pages_per_host=10))
    assert folder.summary()["dropped"]["host_cap"] == 20


def test_a_finished_stage_is_left_alone(tmp_path: Path) -> None:
    folder = stage(tmp_path, web())
    before = outputs(folder)
    run(config=GraphConfig(band=(0.4, 0.5)), pages=tmp_path / "gone.jsonl", folder=folder, seed=1)
    assert outputs(folder) == before


def test_a_neighbourhood_is_the_pages_within_reach(tmp_path: Path) -> None:
    folder = stage(tmp_path, web())
    rows = list(jsonl.read(folder.path / "pages.jsonl", NodeRow))
    part = neighbourhood(rows, read_edges(folder.path), "a.example/p1", radius=1)
    edges = read_edges(folder.path)
    expected = (
        {a for a, b in edges if b == "a.example/p1"} | {b for a, b in edges if a == "a.example/p1"} | {"a.example/p1"}
    )
    assert set(part.nodes) == expected
    assert part.nodes["a.example/about" if "a.example/about" in expected else "a.example/p1"]["role"] in {
        "about",
        "content",
    }

import asyncio
from pathlib import Path
from random import Random

import pytest

from groundhop import jsonl
from groundhop.agents.index import build_index
from groundhop.agents.leaks import leak_in
from groundhop.agents.tools import make_toolbox
from groundhop.config import QuestionsConfig, SearchConfig
from groundhop.errors import ServerError
from groundhop.pipeline.band import NodeRow
from groundhop.pipeline.cloze import ClozeWriter
from groundhop.pipeline.cues import SentenceCache, Vocabulary
from groundhop.pipeline.hops import find_hops
from groundhop.pipeline.questions import Outcome, estimate_tokens, run
from groundhop.pipeline.writer import Written
from groundhop.records import Failure, Hop, Link, Page, Question
from groundhop.runs import StageFolder

WORDS = [
    first + second
    for first in ("bar", "del", "gom", "har", "kin", "lom", "mer", "nor", "pel", "rud", "sat", "tov")
    for second in ("ben", "dle", "fax", "gar", "lot", "mas", "nik", "per", "ron", "sel", "tum", "wick")
]
NAMES = [
    "Ostwall",
    "Breken",
    "Lindholm",
    "Varga",
    "Tessel",
    "Moravec",
    "Quillan",
    "Harven",
    "Sollen",
    "Dunmarsh",
    "Eskby",
    "Fenholt",
]
SEARCH = SearchConfig(replay="off")


def filler(draw: Random, sentences: int) -> str:
    return " ".join(f"The {' '.join(draw.choice(WORDS) for _ in range(5))} stood there." for _ in range(sentences))


def web(count: int = 40) -> list[Page]:
    """Each page links to the page five places on, in a sentence of its own, and holds one dated sentence."""
    pages = []
    for number in range(count):
        draw = Random(number)
        name = (
            f"{NAMES[number % 12]} {WORDS[number % 32]} number {'abcdefghijklmnopqrstuvwxyzabcdefghijklmnop'[number]}"
        )
        target = (number + 5) % count
        lead = filler(draw, 4) + "\n"
        before = f"The {draw.choice(WORDS)} {draw.choice(WORDS)} keepers of {NAMES[(number * 5) % 12]} once quarrelled about the {draw.choice(WORDS)} of "
        text = lead + before
        link = Link(
            url=f"https://a.example/{target:02}",
            key=f"a.example/{target:02}",
            anchor="that place",
            main=True,
            start=len(text),
            end=len(text) + 10,
        )
        text += f"that place during a long {draw.choice(WORDS)} season.\n{filler(draw, 5)}\n"
        text += f"A {draw.choice(WORDS)} and a {draw.choice(WORDS)} were moved across the {draw.choice(WORDS)} in {1600 + number * 7}.\n{filler(draw, 4)}"
        key = f"a.example/{number:02}"
        pages.append(
            Page(url=f"https://{key}", key=key, host="a.example", title=name, text=text, links=(link,), digest="")
        )
    return pages


def row(page: Page) -> NodeRow:
    return NodeRow(
        key=page.key, host=page.host, in_degree=1, out_degree=1, pagerank=0.1, harmonic=0.1, percentile=0.5,
        harmonic_percentile=0.5, disagreement=0.0, role="content", in_band=True,
    )  # fmt: skip


class Site:
    """Files of the stages before, and a way to run this one."""

    def __init__(self, root: Path, pages: list[Page]) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        jsonl.write(root / "pages.jsonl.zst", pages)
        hops, _ = find_hops(pages, {page.key: row(page) for page in pages})
        jsonl.write(root / "hops.jsonl", hops)
        build_index(pages, root / "index", passage_words=SEARCH.passage_words)

    def run(
        self, name: str = "questions", config: QuestionsConfig | None = None, seed: int = 0, **more: object
    ) -> StageFolder:
        folder = StageFolder(self.root / name, "questions")
        run(
            config=config or QuestionsConfig(top=1), search=SEARCH, hops=self.root / "hops.jsonl", pages=self.root / "pages.jsonl.zst",
            index=self.root / "index", folder=folder, seed=seed, **more,  # type: ignore[arg-type]
        )  # fmt: skip
        return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"), web())


@pytest.fixture(scope="module")
def finished(site: Site) -> StageFolder:
    return site.run("finished")


def questions(folder: StageFolder) -> list[Question]:
    return list(jsonl.read(folder.path / "questions.jsonl", Question))


def records(folder: StageFolder) -> dict[str, bytes]:
    return {name: (folder.path / name).read_bytes() for name in ("questions.jsonl", "failures.jsonl", "done.json")}


def test_questions_carry_what_proves_them(finished: StageFolder) -> None:
    pages = {page.key: page for page in web()}
    made = questions(finished)
    assert len(made) >= 10
    for one in made:
        for evidence in one.evidence:
            assert pages[evidence.page].text[evidence.start : evidence.end] == evidence.text
        assert one.answer in one.evidence[1].text and one.answer not in pages[one.hops[0].seed].text
        assert one.admission is not None and one.admission.path_reaches
        assert one.kind == "date" and one.writer == "cloze"


def test_the_recorded_path_shows_the_agent_the_evidence(site: Site, finished: StageFolder) -> None:
    async def walk(one: Question) -> list[str]:
        toolbox = make_toolbox(SEARCH, site.root / "index", None, estimate_tokens)
        return [(await toolbox.call(step.tool, step.arguments, one.forbidden)).text for step in one.path]

    for one in questions(finished)[:5]:
        found, seed, target = asyncio.run(walk(one))
        assert one.path[1].arguments["url"] in found
        assert one.path[2].arguments["url"] in seed
        assert one.answer in target and one.answer not in found + seed


def test_the_leak_guard_forbids_copies_of_the_question_but_neither_of_its_pages(finished: StageFolder) -> None:
    pages = {page.key: page for page in web()}
    one = questions(finished)[0]
    assert leak_in(f"Quiz night! {one.question}", one.forbidden)
    assert not any(leak_in(pages[evidence.page].text, one.forbidden) for evidence in one.evidence)


def test_no_page_serves_both_splits(finished: StageFolder) -> None:
    made = questions(finished)
    pages = {
        split: {key for q in made if q.split == split for key in (q.hops[0].seed, q.hops[0].target)}
        for split in ("train", "heldout")
    }
    assert pages["train"] and pages["heldout"] and not pages["train"] & pages["heldout"]


def test_every_hop_ends_as_question_or_under_a_reason(finished: StageFolder) -> None:
    named = {row.item for row in jsonl.read(finished.path / "failures.jsonl", Failure)}
    ledger = {row.hop for row in jsonl.read(finished.path / "ledger.jsonl", Outcome) if row.questions}
    facts = finished.summary()
    assert len(named | ledger) == facts["hops"] == 40
    assert facts["train"] + facts["heldout"] == len(questions(finished))
    assert sum(facts["rejected"].values()) == sum(1 for _ in jsonl.read(finished.path / "failures.jsonl", Failure))


def test_the_order_of_pages_changes_no_question(finished: StageFolder, tmp_path: Path) -> None:
    assert records(Site(tmp_path / "turned", web()[::-1]).run()) == records(finished)


def test_another_seed_draws_other_splits(site: Site, finished: StageFolder) -> None:
    splits = [{one.id: one.split for one in questions(folder)} for folder in (finished, site.run("seed1", seed=1))]
    both = splits[0].keys() & splits[1].keys()
    assert any(splits[0][key] != splits[1][key] for key in both)


def test_caps_on_seeds_targets_hops_and_splits_hold(site: Site) -> None:
    made = questions(site.run("caps", QuestionsConfig(top=1, limit=3, per_hop=1, per_seed=1, per_target=1)))
    assert sorted(one.split for one in made) == ["heldout"] * 3 + ["train"] * 3
    assert len({one.hops[0].seed for one in made}) == len({one.hops[0].target for one in made}) == 6


def test_hops_inside_a_host_can_be_left_out(site: Site) -> None:
    assert site.run("hosts", QuestionsConfig(same_host=False)).summary()["rejected"] == {"same_host": 40}


class Killed(BaseException):
    """Not an Exception: nothing may catch it, as nothing catches a kill."""


class Failing:
    """The cloze writer, but some calls meet a dead server; `die` stops the process in their place."""

    name = "cloze"

    def __init__(self, fails: set[int], die: bool = False) -> None:
        vocabulary = Vocabulary()
        for page in web():
            vocabulary.add(page)
        self.inner = ClozeWriter(vocabulary, SentenceCache(), cues=3, forms=QuestionsConfig().forms)
        self.fails = fails
        self.die = die
        self.calls = 0

    async def write(self, hop: Hop, seed_page: Page, target_page: Page, rng: Random) -> Written:
        self.calls += 1
        if self.calls in self.fails:
            raise Killed if self.die else ServerError("gone")
        return await self.inner.write(hop, seed_page, target_page, rng)


@pytest.mark.parametrize("at", [1, 7, 38])
def test_a_killed_stage_ends_with_the_same_records_and_asks_no_hop_twice(
    site: Site, finished: StageFolder, at: int
) -> None:
    expected = records(finished)
    with pytest.raises(Killed):
        site.run(f"killed{at}", writer=Failing({at}, die=True))
    with (site.root / f"killed{at}" / "ledger.jsonl").open("ab") as file:
        file.write(b'{"hop":"torn')
    kept = len(list(jsonl.read(site.root / f"killed{at}" / "ledger.jsonl", Outcome)))
    second = Failing(set())
    assert records(site.run(f"killed{at}", writer=second)) == expected
    asked = len(list(jsonl.read(finished.path / "ledger.jsonl", Outcome)))
    assert second.calls == asked - kept


def test_a_hop_whose_server_failed_is_a_named_failure_not_a_rejection(site: Site) -> None:
    folder = site.run("partly", writer=Failing({2, 5}))
    assert folder.summary()["rejected"]["server_error"] == 2


def test_a_server_that_stays_away_stops_the_stage(site: Site) -> None:
    with pytest.raises(ServerError):
        site.run("away", writer=Failing(set(range(1, 1000))))
    assert not (site.root / "away" / "done.json").exists()


def test_a_finished_stage_is_left_alone(site: Site, finished: StageFolder) -> None:
    before = records(finished)
    site.run("finished", QuestionsConfig(limit=1))
    assert records(finished) == before


@pytest.mark.parametrize("text", ["plain words of English text", "https://a.example/x_%28y%29?z=1", "東京都渋谷区", ""])
def test_token_estimates_err_on_the_high_side_of_one_in_four_characters(text: str) -> None:
    assert estimate_tokens(text) >= len(text) / 4

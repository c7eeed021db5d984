import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from groundhop.pipeline.admission import Admitted, Admitter
from groundhop.pipeline.writer import Draft, Refusal
from groundhop.records import Hop, Link, Page

SEED_TEXT = "The guild sold the old pier to the railway. It also met the council near the new mill."
SENTENCE = "The guild sold the old pier to the railway."
TARGET_TEXT = "Granite came late.\nThe council carried a lantern there in 1871.\nThe end came slowly."
FACT = "The council carried a lantern there in 1871."


def page(key: str, text: str, links: tuple[Link, ...] = ()) -> Page:
    return Page(url=f"https://{key}", key=key, host="a.example", title=key, text=text, links=links, digest="")


def link(key: str, anchor: str, text: str = SEED_TEXT) -> Link:
    start = text.index(anchor)
    return Link(url=f"https://{key}", key=key, anchor=anchor, main=True, start=start, end=start + len(anchor))


SEED = page("seed", SEED_TEXT, (link("target", "the old pier"), link("railway", "railway")))
TARGET = page("target", TARGET_TEXT)
START = SEED_TEXT.index("the old pier")
HOP = Hop(
    seed="seed", target="target", anchor="the old pier", anchor_start=START, anchor_end=START + 12,
    sentence_start=0, sentence_end=len(SENTENCE), seed_percentile=0.5, target_percentile=0.5,
)  # fmt: skip


def draft(**changes: Any) -> Draft:
    at = TARGET_TEXT.index("1871")
    fact = TARGET_TEXT.index(FACT)
    fields: dict[str, Any] = {
        "question": 'A page says: "The guild sold ____ to the railway." Which year with "council" and "lantern"?',
        "answer": "1871", "kind": "date", "evidence_start": fact, "evidence_end": fact + len(FACT),
        "answer_start": at, "answer_end": at + 4, "queries": ("guild sold to the railway",), "cues": ("council", "lantern"),
        "pieces": ("The guild sold", "to the railway."), "form": "year",
    }  # fmt: skip
    return Draft(**(fields | changes))


@dataclass
class Hit:
    key: str
    text: str
    start: int = 0
    end: int = 10_000


@dataclass
class Result:
    text: str


@dataclass
class World:
    """An index and tools that answer what they are told; the defaults let the draft pass."""

    found: dict[str, list[Hit]] = field(default_factory=dict)
    results: str = "[1] seed\nhttps://seed\nThe guild sold the old pier"
    seed_view: str = "The guild sold [the old pier](https://target) to the [railway](https://railway)."
    target_view: str = TARGET_TEXT
    pages: dict[str, Page] = field(default_factory=dict)
    calls: list[tuple[str, dict[str, Any], tuple[str, ...]]] = field(default_factory=list)

    def search(self, query: str, top: int) -> Sequence[Hit]:
        return self.found.get(query, [])[:top]

    async def call(self, name: str, arguments: dict[str, Any], forbidden: Sequence[str] = ()) -> Result:
        self.calls.append((name, arguments, tuple(forbidden)))
        if name == "search":
            return Result(self.results)
        return Result(self.seed_view if arguments["url"] == "https://seed" else self.target_view)


def admit(world: World, one: Draft | None = None, seed: Page = SEED, target: Page = TARGET) -> Admitted | Refusal:
    admitter = Admitter(world, world, world.pages.get, 3)
    return asyncio.run(admitter.admit(one or draft(), HOP, seed, target))


def reason(world: World, one: Draft | None = None, **pages: Page) -> str | None:
    got = admit(world, one, **pages)
    return got.reason if isinstance(got, Refusal) else None


def test_a_question_that_takes_both_pages_passes_with_its_path() -> None:
    got = admit(World())
    assert isinstance(got, Admitted)
    assert [step.arguments for step in got.path] == [
        {"queries": ["guild sold to the railway"]},
        {"url": "https://seed", "find": "guild sold to the railway"},
        {"url": "https://target", "find": "council lantern"},
    ]
    assert got.admission.path_reaches and not got.admission.answer_on_seed and got.admission.own_words_rank is None


@pytest.mark.parametrize("form", ["1871", "March 1871", "(1871)"])
def test_an_answer_that_stands_on_the_seed_page_is_one_hop(form: str) -> None:
    assert reason(World(), seed=page("seed", f"{SEED_TEXT} Later, {form} came.", SEED.links)) == "answer_on_seed"


def test_any_accepted_form_on_the_seed_page_counts_but_no_part_of_a_word() -> None:
    one = draft(answer="1,250", aliases=("1250",))
    seed = page("seed", f"{SEED_TEXT} It cost 1250 pounds.", SEED.links)
    assert reason(World(), one, seed=seed) == "answer_on_seed"
    assert reason(World(), one, seed=page("seed", f"{SEED_TEXT} Lot 12501.", SEED.links)) is None


def test_an_answer_in_the_question_is_refused() -> None:
    assert (
        reason(World(), draft(question='In 1871 a page said: "The guild sold ____ to the railway"?'))
        == "answer_in_question"
    )


@pytest.mark.parametrize("query", ["guild sold to the railway", "council lantern", draft().question])
def test_one_search_that_brings_the_evidence_makes_it_one_hop(query: str) -> None:
    other, hit = Hit("other", "x"), Hit("target", TARGET_TEXT)
    assert reason(World(found={query: [other, other, hit]})) == "one_hop"
    assert reason(World(found={query: [other, other, other, hit]})) is None


def test_another_passage_of_the_target_is_not_the_evidence() -> None:
    assert reason(World(found={"council lantern": [Hit("target", "Granite came late.", 0, 18)]})) is None


@pytest.mark.parametrize(
    "text",
    [
        f"{TARGET_TEXT}\nThe lantern was given to the council in 1890.",
        TARGET_TEXT.replace("1871", "1871 and again in 1890"),
        TARGET_TEXT.replace("lantern", "lamp"),
    ],
)
def test_cues_that_fit_two_facts_or_none_are_ambiguous(text: str) -> None:
    assert reason(World(), target=page("target", text)) == "ambiguous"


def test_a_page_linked_from_the_same_sentence_must_not_answer_too() -> None:
    rival = page("railway", "A lantern hung in the council house in 1902.")
    assert reason(World(pages={"railway": rival})) == "ambiguous"
    assert reason(World(pages={"railway": page("railway", "A lantern hung in the council house.")})) is None


def test_quoted_words_must_stand_once_on_the_seed_page() -> None:
    twice = f"{SEED_TEXT} The guild sold the mill to the railway."
    assert reason(World(), seed=page("seed", twice, SEED.links)) == "ambiguous_link"


def test_quoted_words_must_stand_on_no_other_page() -> None:
    copy = Hit("copy", "Then the guild sold a ship to the railway.")
    world = World(found={"The guild sold to the railway.": [Hit("seed", SEED_TEXT), copy]})
    assert reason(world) == "ambiguous_link"
    world.found["The guild sold to the railway."][1] = Hit("copy", "The guild sold ships. They went to the railway")
    assert reason(World(found={"The guild sold to the railway.": [Hit("seed", SEED_TEXT)]})) is None


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"results": "[1] other\nhttps://seed2\nnothing"}, "search"),
        ({"seed_view": "The guild sold the old pier to the railway."}, "link"),
        ({"seed_view": "The [old pier](https://target) is far away."}, "quoted"),
        ({"target_view": "The council carried a lantern there in [cut]"}, "evidence"),
    ],
)
def test_a_path_that_does_not_reach_is_refused_with_the_step(changes: dict[str, str], missing: str) -> None:
    got = admit(World(**changes))  # type: ignore[arg-type]
    assert isinstance(got, Refusal) and got.reason == "path_fails" and missing in got.detail


def test_links_inside_the_evidence_do_not_hide_it() -> None:
    view = TARGET_TEXT.replace("a lantern", "[a lantern](https://lamp/a_%28b%29)").replace("\n", " \n ")
    assert reason(World(target_view=view)) is None


def test_the_second_query_is_tried_when_the_first_does_not_reach() -> None:
    class Picky(World):
        async def call(self, name: str, arguments: dict[str, Any], forbidden: Sequence[str] = ()) -> Result:
            if arguments.get("queries") == ["guild"]:
                return Result("nothing")
            return await super().call(name, arguments, forbidden)

    got = admit(Picky(), draft(queries=("guild", "guild sold")))
    assert isinstance(got, Admitted) and got.path[0].arguments == {"queries": ["guild sold"]}


def test_addresses_are_written_as_the_view_shows_them() -> None:
    odd = Link(url="https://target/a_(b)", key="target", anchor="the old pier", main=True, start=START, end=START + 12)
    world = World(seed_view="The guild sold [the old pier](https://target/a_%28b%29) to the railway.")
    got = admit(world, seed=page("seed", SEED_TEXT, (odd,)))
    assert isinstance(got, Admitted) and got.path[2].arguments["url"] == "https://target/a_%28b%29"


def test_the_leak_guard_spares_the_quotation_that_the_agent_must_read() -> None:
    words = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron"
    seed = page("seed", f"{SEED_TEXT} {words}", SEED.links)
    got = admit(
        World(),
        draft(question=f'A page says: "{words}" and "The guild sold ____ to the railway." Which year?'),
        seed=seed,
    )
    assert isinstance(got, Admitted)
    assert got.forbidden and not any(gram in words for gram in got.forbidden)


def test_same_cues_with_a_fact_on_other_pages_are_counted() -> None:
    found = {
        "council lantern": [Hit("b", "The council lit a lantern in 1902."), Hit("c", "The council lit a lantern.")]
    }
    got = admit(World(found=found))
    assert isinstance(got, Admitted) and got.admission.same_cues_elsewhere == 1

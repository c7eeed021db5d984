import asyncio
from random import Random

from groundhop.pipeline.cloze import MAX_WORDS, ClozeWriter, ask
from groundhop.pipeline.cues import SentenceCache, Vocabulary
from groundhop.pipeline.writer import Draft, Written
from groundhop.records import Hop, Page

SENTENCE = "In spring the harbour guild of Ostwall fought the mill owners over the old pier for weeks."
TARGET = (
    "The old pier stands at the mouth of the river.\n"
    "The council bought granite for its northern wall in 1871.\n"
    "The council carried the lantern to its northern wall on March 4, 1902.\n"
    "Some 45 sailors rested in the shade of the southern wall during storms."
)


def page(key: str, title: str, text: str) -> Page:
    return Page(url=f"https://{key}", key=key, host="a.example", title=title, text=text, digest="")


def hop(text: str = SENTENCE, anchor: str = "the old pier") -> Hop:
    start = text.index(anchor)
    return Hop(
        seed="s", target="t", anchor=anchor, anchor_start=start, anchor_end=start + len(anchor),
        sentence_start=0, sentence_end=len(text), seed_percentile=0.5, target_percentile=0.5,
    )  # fmt: skip


def write(
    target: str = TARGET,
    title: str = "Ostwall breakwater",
    forms: tuple[str, ...] = ("date", "year", "number"),
    seed: int = 0,
) -> Written:
    vocabulary = Vocabulary()
    for text in (SENTENCE, target, *("Other words entirely." for _ in range(20))):
        vocabulary.add(page("x", "", text))
    writer = ClozeWriter(vocabulary, SentenceCache(), cues=3, forms=forms)  # type: ignore[arg-type]
    return asyncio.run(writer.write(hop(), page("s", "Guild", SENTENCE), page("t", title, target), Random(seed)))


def by_answer(written: Written) -> dict[str, Draft]:
    return {draft.answer: draft for draft in reversed(written.drafts)}


def test_each_fact_of_the_target_becomes_drafts_with_exact_evidence() -> None:
    drafts = by_answer(write())
    assert set(drafts) == {"1871", "March 4, 1902", "45"}
    for draft in drafts.values():
        assert TARGET[draft.answer_start : draft.answer_end] == draft.answer
        evidence = TARGET[draft.evidence_start : draft.evidence_end]
        assert draft.answer in evidence and all(cue in evidence for cue in draft.cues)


def test_the_question_shows_neither_answer_nor_target() -> None:
    for draft in write().drafts:
        assert draft.answer not in draft.question
        assert "old pier" not in draft.question and "breakwater" not in draft.question
        assert draft.question.count("____") == 1 and len(draft.question.split()) <= MAX_WORDS


def test_cues_come_from_neither_the_quotation_nor_the_title() -> None:
    taken = {"harbour", "guild", "ostwall", "pier", "breakwater", "march"}
    assert not any(taken & {cue.casefold() for cue in draft.cues} for draft in write().drafts)


def test_the_question_reads_like_a_sentence() -> None:
    assert ask("The guild fought over ____ for weeks.", "number", "sailors", ("shade", "southern", "storms")) == (
        'A web page says: "The guild fought over ____ for weeks." Open the page that the blank links to. '
        'What number of sailors does it give in the sentence with the words "shade", "southern" and "storms"?'
    )


def test_only_wanted_forms_are_asked_for() -> None:
    assert set(by_answer(write(forms=("number",)))) == {"45"}


def test_equal_seeds_give_equal_drafts_and_others_another_order() -> None:
    assert write(seed=1) == write(seed=1)
    assert {write(seed=seed).drafts[0].answer for seed in range(8)} == {"1871", "March 4, 1902", "45"}


def test_why_there_is_no_draft_is_said() -> None:
    def reasons(written: Written) -> set[str]:
        return {refusal.reason for refusal in written.refusals}

    assert reasons(write(title="Spring")) == reasons(write(title="Mill owners")) == {"unclear_link"}
    assert reasons(write(target="The old pier stands at the mouth of the river and nobody knows why.")) == {"no_fact"}
    assert reasons(write(target="The pier of the guild was the old one by far in 1871.")) == {"no_cues"}

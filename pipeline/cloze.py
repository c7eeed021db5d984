"""Write questions without a model: blank the link in the seed page's sentence, ask for a fact of the page behind it."""

from collections.abc import Sequence
from random import Random

from groundhop.pipeline.cues import Cut, SentenceCache, Vocabulary, cue_groups
from groundhop.pipeline.facts import MONTHS, Fact, Form, facts_in, same_form
from groundhop.pipeline.phrases import Phrase, link_phrase, short_title
from groundhop.pipeline.sentences import words_of, written_words
from groundhop.pipeline.writer import Draft, Refusal, Written
from groundhop.records import Hop, Page

MAX_WORDS = 70
"""Longer questions are not asked."""

_BARRED = frozenset(month.casefold() for month in MONTHS) | {"percent", "million", "billion", "thousand"}


class ClozeWriter:
    """Writes from the two pages' own words; `vocabulary` says which words are common."""

    name = "cloze"

    def __init__(
        self, vocabulary: Vocabulary, sentences: SentenceCache, *, cues: int, forms: Sequence[Form], facts: int = 6
    ) -> None:
        self._vocabulary = vocabulary
        self._sentences = sentences
        self._cues = cues
        self._forms = tuple(forms)
        self._facts = facts

    async def write(self, hop: Hop, seed_page: Page, target_page: Page, rng: Random) -> Written:
        """Drafts for up to `facts` facts of the target, in an order drawn from `rng`; a few choices of cues each."""
        phrase = link_phrase(seed_page.text, hop, target_page.title)
        if phrase is None:
            return Written(refusals=(Refusal(reason="unclear_link", detail=hop.anchor),))
        cut = self._sentences.of(target_page)
        facts = [fact for span in cut.spans for fact in facts_in(target_page.text, span, self._forms)]
        if not facts:
            return Written(refusals=(Refusal(reason="no_fact"),))
        rng.shuffle(facts)
        barred = {*words_of(phrase.text), *words_of(hop.anchor), *words_of(short_title(target_page.title)), *_BARRED}
        drafts: list[Draft] = []
        refusals: list[Refusal] = []
        for fact in facts[: self._facts]:
            made = self._of_fact(target_page, fact, phrase, cut, barred)
            if isinstance(made, Refusal):
                refusals.append(made)
            else:
                drafts += made
        return Written(drafts=tuple(drafts), refusals=tuple(refusals))

    def _of_fact(
        self,
        page: Page,
        fact: Fact,
        phrase: Phrase,
        cut: Cut,
        barred: set[str],
    ) -> list[Draft] | Refusal:
        text = page.text
        if self._vocabulary.is_boilerplate(page, fact.start):
            return Refusal(reason="boilerplate", detail=fact.answer)
        if same_form(text, fact.sentence, fact.form, fact.noun) != 1:
            return Refusal(reason="ambiguous", detail=fact.answer)
        others = [words for span, words in zip(cut.spans, cut.words, strict=True) if span != fact.sentence]
        words = written_words(text[fact.sentence.start : fact.sentence.end])
        refused = barred | set(words_of(fact.answer)) | set(words_of(fact.noun))
        groups = cue_groups(words, refused, others, self._vocabulary, self._cues)
        if not groups:
            return Refusal(reason="no_cues", detail=fact.answer)
        drafts = [_draft(fact, phrase, cues) for cues in groups]
        short = [draft for draft in drafts if len(draft.question.split()) <= MAX_WORDS]
        return short or Refusal(reason="long", detail=fact.answer)


def _draft(fact: Fact, phrase: Phrase, cues: tuple[str, ...]) -> Draft:
    return Draft(
        question=ask(phrase.text, fact.form, fact.noun, cues),
        answer=fact.answer,
        kind=fact.kind,
        aliases=fact.aliases,
        evidence_start=fact.sentence.start,
        evidence_end=fact.sentence.end,
        answer_start=fact.start,
        answer_end=fact.end,
        queries=phrase.queries,
        cues=cues,
        pieces=phrase.pieces,
        noun=fact.noun,
        form=fact.form,
    )


def ask(phrase: str, form: Form, noun: str, cues: Sequence[str]) -> str:
    """The question's words."""
    wanted = {
        "year": "Which year",
        "date": "Which date",
        "number": f"What number of {noun}",
        "percent": "What percentage",
        "name": "Which full name",
    }[form]
    quoted = [f'"{cue}"' for cue in cues]
    listed = quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"
    words = "word" if len(cues) == 1 else "words"
    return (
        f'A web page says: "{phrase}" Open the page that the blank links to. '
        f"{wanted} does it give in the sentence with the {words} {listed}?"
    )

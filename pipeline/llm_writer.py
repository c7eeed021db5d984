"""Write questions with a language model: draft, obfuscate, self-check; and believe nothing that the pages do not bear out."""

import os
from random import Random
from typing import Literal

from msgspec import Struct

from groundhop.agents.http_client import ReplicaClient
from groundhop.config import QuestionsConfig
from groundhop.errors import ConfigError, CredentialError, InputError
from groundhop.judges.exact import compare_any
from groundhop.pipeline.admission import spaced
from groundhop.pipeline.chat_json import Conversation, JsonModel, prompt
from groundhop.pipeline.phrases import short_title
from groundhop.pipeline.quotes import ground
from groundhop.pipeline.selfcontained import refusal
from groundhop.pipeline.sentences import fold, words_of
from groundhop.pipeline.writer import Draft, Refusal, Written
from groundhop.records import Hop, Page

SEED_CHARS = 3000
TARGET_CHARS = 8000
"""How much of each page the model reads; of the seed page, the part around the link."""


class Drafted(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model's first turn."""

    question: str
    answer: str
    kind: Literal["date", "number", "name", "text"]
    aliases: list[str]
    evidence: str
    find: list[str]


class Obfuscated(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The second turn."""

    question: str
    search: str


class Checked(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The self-check, in a conversation of its own that has not seen the draft."""

    answer: str
    needs_both: bool
    unique: bool
    clear: bool
    problem: str


class LlmWriter:
    """Writes one draft a hop in three turns."""

    name = "llm"

    def __init__(self, model: JsonModel) -> None:
        self._model = model

    async def write(self, hop: Hop, seed_page: Page, target_page: Page, rng: Random) -> Written:
        """At most one draft. Raises: ServerError and CredentialError from the endpoint."""
        talk = Conversation(self._model, rng.randrange(2**31))
        check = Conversation(self._model, rng.randrange(2**31))
        try:
            got = await self._write(talk, check, hop, seed_page, target_page)
        except InputError as error:
            got = Refusal(reason="unreadable", detail=str(error))
        tokens = talk.tokens + check.tokens
        if isinstance(got, Refusal):
            return Written(refusals=(got,), tokens=tokens)
        return Written(drafts=(got,), tokens=tokens)

    async def _write(
        self, talk: Conversation, check: Conversation, hop: Hop, seed_page: Page, target_page: Page
    ) -> Draft | Refusal:
        drafted = await talk.ask(_draft_words(hop, seed_page, target_page), Drafted)
        place = ground(target_page.text, drafted.evidence)
        if place is None:
            return Refusal(reason="ungrounded", detail=drafted.evidence)
        evidence = target_page.text[place.start : place.end]
        if spaced(drafted.answer) not in spaced(evidence):
            return Refusal(reason="answer_not_in_evidence", detail=drafted.answer)
        title = short_title(target_page.title)
        words = prompt("writer_obfuscate.txt").substitute(target_title=title)
        final = await talk.ask(words, Obfuscated)
        if problem := refusal(final.question):
            return Refusal(reason="not_selfcontained", detail=problem)
        if words_of(title) and f" {' '.join(words_of(title))} " in f" {' '.join(words_of(final.question))} ":
            return Refusal(reason="names_target", detail=title)
        sentence = seed_page.text[hop.sentence_start : hop.sentence_end]
        asked = prompt("writer_check.txt").substitute(question=final.question, sentence=sentence, evidence=evidence)
        problem = _objection(await check.ask(asked, Checked), drafted)
        if problem:
            return Refusal(reason="self_check", detail=problem)
        return _to_draft(drafted, final, target_page, place.start, place.end)


def make_llm_writer(config: QuestionsConfig) -> LlmWriter:
    """The writer that the config describes.

    Raises: ConfigError without an address or a model's name; CredentialError when the named variable is empty and
    the address is not this machine's.
    """
    if not config.llm_url or not config.llm_model:
        raise ConfigError('[questions] writer = "llm" needs llm_url and llm_model')
    key = os.environ.get(config.llm_key_env, "")
    local = any(f"//{host}" in config.llm_url for host in ("127.0.0.1", "localhost", "[::1]"))
    if not key and not local:
        raise CredentialError(f"[questions] needs a key for {config.llm_url}: set {config.llm_key_env}")
    client = ReplicaClient([config.llm_url], headers={"Authorization": f"Bearer {key}"} if key else {})
    return LlmWriter(JsonModel(client, config.llm_model, config.llm_temperature, config.llm_max_tokens))


def _draft_words(hop: Hop, seed_page: Page, target_page: Page) -> str:
    text = seed_page.text
    anchor = f"[[{text[hop.anchor_start : hop.anchor_end]}]]"
    sentence = text[hop.sentence_start : hop.anchor_start] + anchor + text[hop.anchor_end : hop.sentence_end]
    start = max(0, min(hop.sentence_start - SEED_CHARS // 2, len(text) - SEED_CHARS))
    return prompt("writer_draft.txt").substitute(
        sentence=" ".join(sentence.split()),
        seed_title=seed_page.title,
        seed_text=text[start : start + SEED_CHARS],
        target_title=target_page.title,
        target_text=target_page.text[:TARGET_CHARS],
    )


def _objection(checked: Checked, drafted: Drafted) -> str:
    """What the self-check holds against a question, or nothing."""
    if not checked.answer.strip():
        return "the passages do not give the answer"
    if compare_any(checked.answer, (drafted.answer, *drafted.aliases), drafted.kind).same is False:
        return f"answered {checked.answer!r}, expected {drafted.answer!r}"
    for claim in ("needs_both", "unique", "clear"):
        if not getattr(checked, claim):
            return f"not {claim}: {checked.problem}"
    return ""


def _to_draft(drafted: Drafted, final: Obfuscated, target: Page, start: int, end: int) -> Draft:
    evidence = target.text[start:end]
    held = set(words_of(evidence))
    answer_words = set(words_of(drafted.answer))
    cues = tuple(
        word
        for phrase in drafted.find
        for word in phrase.split()
        if fold(word) in held and fold(word) not in answer_words
    )
    at = evidence.find(drafted.answer)
    answer_start, answer_end = (start + at, start + at + len(drafted.answer)) if at >= 0 else (start, end)
    return Draft(
        question=" ".join(final.question.split()),
        answer=" ".join(drafted.answer.split()),
        kind=drafted.kind,
        aliases=tuple(
            dict.fromkeys(alias.strip() for alias in drafted.aliases if alias.strip() and alias != drafted.answer)
        ),
        evidence_start=start,
        evidence_end=end,
        answer_start=answer_start,
        answer_end=answer_end,
        queries=tuple(dict.fromkeys(query for query in (" ".join(final.search.split()), final.question) if query)),
        cues=cues or tuple(words_of(evidence)[:4]),
    )

"""What a question writer takes and gives: `Draft`s from one hop, or the reasons why there are none."""

from random import Random
from typing import Protocol

from msgspec import Struct

from groundhop.records import AnswerKind, Hop, Page


class Draft(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question that nobody has checked yet."""

    question: str
    answer: str
    kind: AnswerKind
    aliases: tuple[str, ...] = ()
    evidence_start: int
    evidence_end: int
    """The proving sentence in the target page's text."""
    answer_start: int
    answer_end: int
    queries: tuple[str, ...]
    """Searches that should bring the seed page; the first that does is the one to show."""
    cues: tuple[str, ...]
    """Words that find the evidence on the target page."""
    pieces: tuple[str, ...] = ()
    """Word runs quoted from the linking sentence; empty when nothing is quoted."""
    noun: str = ""
    """What a number counts."""
    form: str = ""
    """`facts.Form` of the answer, where known: other facts of this form near the cues would be rivals."""


class Refusal(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a hop or a draft of it came to nothing."""

    reason: str
    detail: str = ""


class Written(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a writer made of one hop."""

    drafts: tuple[Draft, ...] = ()
    """Best first."""
    refusals: tuple[Refusal, ...] = ()
    tokens: int = 0
    """Tokens that a model server counted, prompt and completion."""


class Writer(Protocol):
    """Writes questions that need a hop: find the seed page, follow its link, read a fact on the target."""

    name: str

    async def write(self, hop: Hop, seed_page: Page, target_page: Page, rng: Random) -> Written:
        """Drafts for one hop. Raises: ServerError when a model server failed for good; nothing else."""
        ...

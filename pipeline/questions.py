"""Turn hops into admitted questions: write, check on the project's own index, keep what needs both pages."""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from msgspec import Struct, structs

from groundhop import jsonl
from groundhop.agents.index import LocalIndex
from groundhop.agents.tools import make_toolbox
from groundhop.config import QuestionsConfig, SearchConfig
from groundhop.errors import ServerError
from groundhop.pipeline.admission import Admitter, construction_path, forbidden_of
from groundhop.pipeline.cloze import ClozeWriter
from groundhop.pipeline.cues import Vocabulary
from groundhop.pipeline.hops import hop_id
from groundhop.pipeline.splits import split_of
from groundhop.pipeline.writer import Draft, Refusal, Writer
from groundhop.progress import progress
from groundhop.records import Admission, Evidence, Hop, Page, Question, Split
from groundhop.runs import StageFolder

logger = logging.getLogger(__name__)

ANSWER_REASONS = frozenset({"answer_on_seed", "answer_in_question"})
"""Refusals that no other choice of cues for the same fact can mend."""
BATCH = 32
"""Hops that are worked on before caps are looked at again. Fixed, so that concurrency changes no result."""


class Outcome(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What became of one hop: a line of the ledger that a killed run goes on from."""

    hop: str
    question: Question | None = None
    refusals: tuple[Refusal, ...] = ()
    tokens: int = 0


@dataclass(slots=True)
class Quota:
    """Which hops may still give a question."""

    limit: int
    per_seed: int
    per_target: int
    kept: Counter[Split] = field(default_factory=Counter)
    seeds: Counter[str] = field(default_factory=Counter)
    targets: Counter[str] = field(default_factory=Counter)

    def refusal(self, hop: Hop, split: Split) -> str | None:
        """Why `hop` may not, or None."""
        if self.kept[split] >= self.limit:
            return "limit"
        if self.seeds[hop.seed] >= self.per_seed:
            return "seed_full"
        return "target_full" if self.targets[hop.target] >= self.per_target else None

    def take(self, hop: Hop, split: Split) -> None:
        """Count a kept question."""
        self.kept[split] += 1
        self.seeds[hop.seed] += 1
        self.targets[hop.target] += 1


@dataclass(slots=True)
class Workshop:
    """Writes and admits questions for single hops; each answer depends on the hop and the corpus alone."""

    writer: Writer
    admitter: Admitter
    pages: dict[str, Page]
    seed: int

    async def work(self, hop: Hop, split: Split) -> Outcome:
        """The first admitted draft of a hop as a question, and what was refused before. Raises: ServerError."""
        name = hop_id(hop)
        seed_page, target_page = self.pages[hop.seed], self.pages[hop.target]
        written = await self.writer.write(hop, seed_page, target_page, Random(f"{self.seed} {name}"))
        refusals = list(written.refusals)
        given_away: set[int] = set()
        for draft in written.drafts:
            if draft.answer_start in given_away:
                continue
            got = await self.admitter.admit(draft, hop, seed_page, target_page)
            if isinstance(got, Admission):
                question = to_question(draft, hop, seed_page, target_page, split, got, self.writer.name)
                return Outcome(hop=name, question=question, refusals=tuple(refusals), tokens=written.tokens)
            refusals.append(got)
            if got.reason in ANSWER_REASONS:
                given_away.add(draft.answer_start)
        return Outcome(hop=name, refusals=tuple(refusals), tokens=written.tokens)


def to_question(
    draft: Draft, hop: Hop, seed_page: Page, target_page: Page, split: Split, admission: Admission, writer: str
) -> Question:
    """The record of an admitted draft. Its id is a hash of the hop and of the answer's place."""
    name = hashlib.sha256(f"{hop_id(hop)}\n{draft.answer_start}\n{draft.question}".encode()).hexdigest()[:12]
    evidence = (
        Evidence(
            page=hop.seed,
            start=hop.sentence_start,
            end=hop.sentence_end,
            text=seed_page.text[hop.sentence_start : hop.sentence_end],
        ),
        Evidence(
            page=hop.target,
            start=draft.evidence_start,
            end=draft.evidence_end,
            text=target_page.text[draft.evidence_start : draft.evidence_end],
        ),
    )
    return Question(
        id=name,
        question=draft.question,
        answer=draft.answer,
        kind=draft.kind,
        aliases=draft.aliases,
        evidence=evidence,
        hops=(hop,),
        path=construction_path(draft, hop, seed_page),
        split=split,
        writer=writer,
        admission=admission,
        forbidden=forbidden_of(draft, seed_page, target_page),
    )


def sort_hops(
    hops: Sequence[Hop], config: QuestionsConfig, seed: int, hosts: dict[str, str]
) -> tuple[list[tuple[Hop, Split]], list[tuple[Hop, str]]]:
    """Hops whose two pages serve one split, in an order drawn by hash; and the others with the reason."""
    usable: list[tuple[Hop, Split]] = []
    refused: list[tuple[Hop, str]] = []
    for hop in hops:
        split = split_of(hop.seed, seed, config.heldout_share)
        if not config.same_host and hosts[hop.seed] == hosts[hop.target]:
            refused.append((hop, "same_host"))
        elif split != split_of(hop.target, seed, config.heldout_share):
            refused.append((hop, "crosses_split"))
        else:
            usable.append((hop, split))
    usable.sort(key=lambda pair: hashlib.sha256(f"{seed} {hop_id(pair[0])}".encode()).digest())
    return usable, refused


def estimate_tokens(text: str) -> int:
    """A high guess at the tokens of `text` for any tokenizer: what fits by it fits in truth."""
    return -(-len(text.encode()) // 3)


def run(
    *,
    config: QuestionsConfig,
    search: SearchConfig,
    hops: Path,
    pages: Path,
    index: Path,
    folder: StageFolder,
    seed: int,
    count_tokens: Callable[[str], int] = estimate_tokens,
    writer: Writer | None = None,
) -> None:
    """Write `questions.jsonl` (both splits, sorted by id); `ledger.jsonl` holds what became of each hop.

    Admission looks at tool output cut by `count_tokens`: give the policy's tokenizer where there is one.
    `writer` replaces the one that the config names. Raises: ServerError when a language model stays away.
    """
    if folder.done:
        return
    hop_rows = list(jsonl.read(hops, Hop))
    wanted = {key for hop in hop_rows for key in (hop.seed, hop.target)}
    stored, vocabulary = _read_pages(pages, wanted)
    usable, crossing = sort_hops(hop_rows, config, seed, {key: page.host for key, page in stored.items()})
    local = LocalIndex(index)
    toolbox = make_toolbox(_local_only(search), index, None, count_tokens)
    admitter = Admitter(local, toolbox, local.page, config.top)
    workshop = Workshop(writer or make_writer(config, vocabulary), admitter, stored, seed)
    asyncio.run(_work_through(workshop, usable, crossing, config, folder))


def make_writer(config: QuestionsConfig, vocabulary: Vocabulary) -> Writer:
    """The writer that the config names."""
    match config.writer:
        case "cloze":
            return ClozeWriter(vocabulary, cues=config.cues, forms=config.forms)
        case "llm":
            from groundhop.pipeline.llm_writer import make_llm_writer

            return make_llm_writer(config)


async def _work_through(
    workshop: Workshop,
    usable: Sequence[tuple[Hop, Split]],
    crossing: Sequence[tuple[Hop, str]],
    config: QuestionsConfig,
    folder: StageFolder,
) -> None:
    ledger = {row.hop: row for row in jsonl.read_if_there(folder.path / "ledger.jsonl", Outcome)}
    quota = Quota(config.limit, config.per_seed, config.per_target)
    questions: list[Question] = []
    failures = [(hop_id(hop), reason, f"{hop.seed} -> {hop.target}") for hop, reason in crossing]
    tokens = 0
    with jsonl.Appender(folder.path / "ledger.jsonl") as out, progress("questions", len(usable)) as shown:
        for batch in _batches(usable, BATCH):
            open_hops = [(hop, split) for hop, split in batch if quota.refusal(hop, split) is None]
            outcomes = await _work_batch(workshop, open_hops, ledger, out, config.llm_concurrency)
            for hop, split in batch:
                outcome = outcomes.get(hop_id(hop))
                reason = quota.refusal(hop, split)
                if outcome is not None:
                    failures += ((outcome.hop, r.reason, r.detail) for r in outcome.refusals)
                    tokens += outcome.tokens
                if reason is not None:
                    failures.append((hop_id(hop), reason, ""))
                elif outcome is not None and outcome.question is not None:
                    quota.take(hop, split)
                    questions.append(outcome.question)
                elif outcome is None:
                    failures.append((hop_id(hop), "server_error", ""))
            shown.advance(len(batch), {"kept": len(questions)})
    jsonl.write(folder.path / "questions.jsonl", sorted(questions, key=lambda question: question.id))
    folder.fail_all(failures)
    folder.finish(_summary(questions, failures, len(usable) + len(crossing), tokens, workshop.writer.name))


async def _work_batch(
    workshop: Workshop,
    hops: Sequence[tuple[Hop, Split]],
    ledger: dict[str, Outcome],
    out: jsonl.Appender,
    concurrency: int,
) -> dict[str, Outcome]:
    """Outcomes by hop, from the ledger or worked out. A hop whose model server failed is missing, so that a rerun tries it."""
    gate = asyncio.Semaphore(concurrency)
    done: dict[str, Outcome] = {}
    errors: list[ServerError] = []

    async def one(hop: Hop, split: Split) -> None:
        name = hop_id(hop)
        if name in ledger:
            done[name] = ledger[name]
            return
        async with gate:
            try:
                done[name] = await workshop.work(hop, split)
            except ServerError as error:
                logger.warning("hop %s: %s", name, error)
                errors.append(error)
                return
        out.append(done[name])

    await asyncio.gather(*(one(hop, split) for hop, split in hops))
    if errors and not done:
        raise errors[0]
    return done


def _summary(
    questions: Sequence[Question], failures: Sequence[tuple[str, str, str]], hops: int, tokens: int, writer: str
) -> dict[str, object]:
    splits, kinds = Counter(q.split for q in questions), Counter(q.kind for q in questions)
    return {
        "writer": writer,
        "hops": hops,
        "train": splits["train"],
        "heldout": splits["heldout"],
        "kinds": dict(sorted(kinds.items())),
        "seeds": len({q.hops[0].seed for q in questions}),
        "targets": len({q.hops[0].target for q in questions}),
        "rejected": dict(sorted(Counter(reason for _, reason, _ in failures).items())),
        "writer_tokens": tokens,
    }


def _read_pages(path: Path, wanted: set[str]) -> tuple[dict[str, Page], Vocabulary]:
    vocabulary = Vocabulary()
    stored: dict[str, Page] = {}
    for page in jsonl.read(path, Page):
        vocabulary.add(page)
        if page.key in wanted:
            stored[page.key] = page
    return stored, vocabulary


def _local_only(search: SearchConfig) -> SearchConfig:
    # Admission is measured on the project's own index, whatever the agent will search later.
    return structs.replace(search, provider="local", replay="off")


def _batches(items: Sequence[tuple[Hop, Split]], size: int) -> Iterator[Sequence[tuple[Hop, Split]]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]

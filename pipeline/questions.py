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
from groundhop.pipeline.admission import Admitted, Admitter
from groundhop.pipeline.cloze import ClozeWriter
from groundhop.pipeline.cues import SentenceCache, Vocabulary
from groundhop.pipeline.hops import hop_id
from groundhop.pipeline.splits import Splits
from groundhop.pipeline.writer import Draft, Refusal, Writer
from groundhop.progress import progress
from groundhop.records import Evidence, Hop, Page, Question, Split
from groundhop.runs import StageFolder

logger = logging.getLogger(__name__)

ANSWER_REASONS = frozenset({"answer_on_seed", "answer_in_question"})
"""Refusals that no other choice of cues for the same fact can mend."""
BATCH = 32
"""Hops that are worked on before caps are looked at again. Fixed, so that concurrency changes no result."""


class Outcome(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What became of one hop: a line of the ledger that a killed run goes on from."""

    hop: str
    questions: tuple[Question, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Closed:
    """A hop that can give no question any more."""

    reason: str


@dataclass(slots=True)
class Quota:
    """Which hops may still give a question, and to which split."""

    limit: int
    per_seed: int
    per_target: int
    splits: Splits
    seeds: Counter[str] = field(default_factory=Counter)
    targets: Counter[str] = field(default_factory=Counter)

    def offer(self, hop: Hop) -> Split | Closed:
        """The split that a question on `hop` would join, or why there may be none."""
        full: list[Split] = [split for split, count in self.splits.kept.items() if count >= self.limit]
        split = self.splits.propose(hop, full)
        if split is None:
            return Closed("crosses_split")
        if split in full:
            return Closed("limit")
        if self.seeds[hop.seed] >= self.per_seed:
            return Closed("seed_full")
        return Closed("target_full") if self.targets[hop.target] >= self.per_target else split

    def take(self, hop: Hop, split: Split) -> None:
        """Count a kept question."""
        self.splits.take(hop, split)
        self.seeds[hop.seed] += 1
        self.targets[hop.target] += 1


@dataclass(slots=True)
class Workshop:
    """Writes and admits questions for single hops; each answer depends on the hop and the corpus alone."""

    writer: Writer
    admitter: Admitter
    pages: dict[str, Page]
    seed: int
    per_hop: int

    async def work(self, hop: Hop) -> Outcome:
        """Up to `per_hop` admitted drafts of a hop, one a fact, and what was refused before. Raises: ServerError."""
        name = hop_id(hop)
        seed_page, target_page = self.pages[hop.seed], self.pages[hop.target]
        written = await self.writer.write(hop, seed_page, target_page, Random(f"{self.seed} {name}"))
        refusals = list(written.refusals)
        questions: list[Question] = []
        settled: set[int] = set()
        for draft in written.drafts:
            if draft.answer_start in settled:
                continue
            got = await self.admitter.admit(draft, hop, seed_page, target_page)
            if isinstance(got, Admitted):
                questions.append(to_question(draft, hop, seed_page, target_page, got, self.writer.name))
                settled.add(draft.answer_start)
                if len(questions) == self.per_hop:
                    break
                continue
            refusals.append(got)
            if got.reason in ANSWER_REASONS:
                settled.add(draft.answer_start)
        return Outcome(hop=name, questions=tuple(questions), refusals=tuple(refusals), tokens=written.tokens)


def to_question(
    draft: Draft, hop: Hop, seed_page: Page, target_page: Page, admitted: Admitted, writer: str
) -> Question:
    """The record of an admitted draft, its split still open. Its id is a hash of hop, answer's place and wording."""
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
        path=admitted.path,
        writer=writer,
        admission=admitted.admission,
        forbidden=admitted.forbidden,
    )


def sort_hops(
    hops: Sequence[Hop], same_host: bool, seed: int, hosts: dict[str, str]
) -> tuple[list[Hop], list[tuple[Hop, str]]]:
    """Hops that may serve, in an order drawn by hash; and the others with the reason."""
    refused = [(hop, "same_host") for hop in hops if not same_host and hosts[hop.seed] == hosts[hop.target]]
    usable = [hop for hop in hops if same_host or hosts[hop.seed] != hosts[hop.target]]
    return sorted(usable, key=lambda hop: hashlib.sha256(f"{seed} {hop_id(hop)}".encode()).digest()), refused


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
    hosts = {key: page.host for key, page in stored.items()}
    usable, refused = sort_hops(hop_rows, config.same_host, seed, hosts)
    local = LocalIndex(index)
    toolbox = make_toolbox(_local_only(search), index, None, count_tokens)
    cache = SentenceCache()
    admitter = Admitter(local, toolbox, local.page, config.top, cache)
    workshop = Workshop(writer or make_writer(config, vocabulary, cache), admitter, stored, seed, config.per_hop)
    asyncio.run(_work_through(workshop, usable, refused, config, folder))


def make_writer(config: QuestionsConfig, vocabulary: Vocabulary, sentences: SentenceCache) -> Writer:
    """The writer that the config names."""
    match config.writer:
        case "cloze":
            return ClozeWriter(vocabulary, sentences, cues=config.cues, forms=config.forms)
        case "llm":
            from groundhop.pipeline.llm_writer import make_llm_writer

            return make_llm_writer(config)


async def _work_through(
    workshop: Workshop,
    usable: Sequence[Hop],
    refused: Sequence[tuple[Hop, str]],
    config: QuestionsConfig,
    folder: StageFolder,
) -> None:
    ledger = {row.hop: row for row in jsonl.read_if_there(folder.path / "ledger.jsonl", Outcome)}
    quota = Quota(config.limit, config.per_seed, config.per_target, Splits(config.heldout_share))
    questions: list[Question] = []
    failures = [(hop_id(hop), reason, f"{hop.seed} -> {hop.target}") for hop, reason in refused]
    tokens = 0
    with jsonl.Appender(folder.path / "ledger.jsonl") as out, progress("questions", len(usable)) as shown:
        for batch in _batches(usable, BATCH):
            open_hops = [hop for hop in batch if not isinstance(quota.offer(hop), Closed)]
            outcomes = await _work_batch(workshop, open_hops, ledger, out, config.llm_concurrency)
            for hop in batch:
                outcome = outcomes.get(hop_id(hop))
                failures += _failures(hop, outcome, quota.offer(hop))
                tokens += outcome.tokens if outcome else 0
                for question in outcome.questions if outcome else ():
                    offer = quota.offer(hop)
                    if not isinstance(offer, Closed):
                        quota.take(hop, offer)
                        questions.append(structs.replace(question, split=offer))
            shown.advance(len(batch), {"kept": len(questions)})
    jsonl.write(folder.path / "questions.jsonl", sorted(questions, key=lambda question: question.id))
    folder.fail_all(failures)
    folder.finish(_summary(questions, failures, len(usable) + len(refused), tokens, workshop.writer.name))


def _failures(hop: Hop, outcome: Outcome | None, offer: Split | Closed) -> list[tuple[str, str, str]]:
    found = [(hop_id(hop), refusal.reason, refusal.detail) for refusal in (outcome.refusals if outcome else ())]
    if isinstance(offer, Closed):
        return [*found, (hop_id(hop), offer.reason, "")]
    return found if outcome else [(hop_id(hop), "server_error", "")]


async def _work_batch(
    workshop: Workshop, hops: Sequence[Hop], ledger: dict[str, Outcome], out: jsonl.Appender, concurrency: int
) -> dict[str, Outcome]:
    """Outcomes by hop, from the ledger or worked out.

    A hop whose model server failed is missing, so that a rerun tries it. Raises: ServerError when all failed.
    """
    gate = asyncio.Semaphore(concurrency)
    done = {name: ledger[name] for name in map(hop_id, hops) if name in ledger}
    errors: list[ServerError] = []

    async def one(hop: Hop) -> None:
        async with gate:
            try:
                outcome = await workshop.work(hop)
            except ServerError as error:
                logger.warning("hop %s: %s", hop_id(hop), error)
                errors.append(error)
                return
        done[outcome.hop] = outcome
        out.append(outcome)

    await asyncio.gather(*(one(hop) for hop in hops if hop_id(hop) not in done))
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


def _batches(items: Sequence[Hop], size: int) -> Iterator[Sequence[Hop]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]

"""The agent's tools: every call ends in a text for the model and an outcome for the record."""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from groundhop.agents.index import LocalIndex
from groundhop.agents.leaks import leak_in
from groundhop.agents.providers import Found, LocalProvider, Provider, page_request, search_request
from groundhop.agents.replay import ReplayProvider, ReplayStore
from groundhop.agents.schemas import TOOL_SCHEMAS, SearchCall, VisitCall, check
from groundhop.agents.untrusted import defang
from groundhop.agents.view import Sight, fit, show_page, show_results
from groundhop.agents.youcom import YouProvider
from groundhop.config import SearchConfig
from groundhop.errors import ConfigError, CredentialError, MalformedCallError, ProviderError

__all__ = ["TOOL_SCHEMAS", "ToolResult", "Toolbox", "make_toolbox", "seen_by_agent"]

logger = logging.getLogger(__name__)

Outcome = Literal["ok", "empty", "malformed", "refused", "provider_error"]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call brought."""

    text: str
    """For the model: harmless, and cut to its budget."""
    outcome: Outcome
    """ok; empty: there is nothing; malformed: the call made no sense; refused: the page may not be shown or read;
    provider_error: the service failed, which says nothing about the model."""
    detail: str = ""


class Toolbox:
    """`search` and `visit` over one provider. Deterministic where the provider is."""

    def __init__(self, provider: Provider, sight: Sight, *, top: int) -> None:
        self._provider = provider
        self._sight = sight
        self._top = top

    async def call(self, name: str, arguments: dict[str, Any], forbidden: Sequence[str] = ()) -> ToolResult:
        """Run one call. `forbidden` n-grams mark results that quote the question; those are left out.

        Raises: CredentialError, which stops a run. A failing provider is an outcome, not an exception.
        """
        try:
            wanted = check(name, arguments)
        except MalformedCallError as error:
            return ToolResult(f"Error: {error}.", "malformed", str(error))
        try:
            if isinstance(wanted, SearchCall):
                return await self._search(wanted, forbidden)
            return await self._visit(wanted, forbidden)
        except ProviderError as error:
            logger.warning("%s failed: %s", name, error)
            return ToolResult("Error: the tool is out of order.", "provider_error", str(error))

    def fit(self, text: str, tokens: int) -> str:
        """Cut a result further, to what a conversation has room for."""
        return fit(text, tokens, self._sight.count)

    async def close(self) -> None:
        """Release what the provider holds."""
        await self._provider.close()

    async def _search(self, wanted: SearchCall, forbidden: Sequence[str]) -> ToolResult:
        answers = await asyncio.gather(*(self._provider.fetch(search_request(q, self._top)) for q in wanted.queries))
        found = _interleave([(q, answer.results) for q, answer in zip(wanted.queries, answers, strict=True)])
        kept = [(q, f) for q, f in found if leak_in(" ".join((f.title, *f.snippets)), forbidden) is None]
        dropped = len(found) - len(kept)
        detail = f"{dropped} results quote the question" if dropped else ""
        if not kept:
            return ToolResult("No results. Try other words.", "empty", detail)
        return ToolResult(show_results(kept, self._sight), "ok", detail)

    async def _visit(self, wanted: VisitCall, forbidden: Sequence[str]) -> ToolResult:
        answer = await self._provider.fetch(page_request(wanted.url))
        if answer.page is None or not answer.page.text.strip():
            note = answer.note or "there is no page with this address: take one from a result or a link"
            outcome: Outcome = "refused" if answer.status in {400, 422} else "empty"
            return ToolResult(f"Error: {note}.", outcome, f"status {answer.status}: {wanted.url[:200]}")
        if leak := leak_in(f"{answer.page.title} {answer.page.text}", forbidden):
            return ToolResult("Error: this page may not be shown.", "refused", f"quotes the question: {leak[:100]}")
        return ToolResult(show_page(answer.page, wanted.find, self._sight), "ok")


def make_toolbox(
    search: SearchConfig,
    index_folder: Path | None,
    replay_path: Path | None,
    count_tokens: Callable[[str], int],
    control_tokens: Sequence[str] = (),
) -> Toolbox:
    """The tools that a run's `[search]` table describes. `control_tokens` are added tokens of the policy's tokenizer.

    Raises: MissingError without the index; ConfigError; CredentialError without the provider's key.
    """
    provider = _provider(search, index_folder, replay_path)
    sight = Sight(
        count=count_tokens,
        defang=lambda text: defang(text, control_tokens),
        snippet_tokens=search.snippet_tokens,
        search_tokens=search.search_tokens,
        visit_tokens=search.visit_tokens,
        passage_words=search.passage_words,
    )
    return Toolbox(provider, sight, top=search.top)


async def seen_by_agent(toolbox: Toolbox, query: str) -> str:
    """What the agent would see if it searched for `query`, or visited it when it is an address."""
    is_address = query.startswith(("http://", "https://")) and " " not in query
    result = await (
        toolbox.call("visit", {"url": query}) if is_address else toolbox.call("search", {"queries": [query]})
    )
    return result.text


def _provider(search: SearchConfig, index_folder: Path | None, replay_path: Path | None) -> Provider:
    provider = _source(search, index_folder)
    if search.replay == "off" or replay_path is None:
        return provider
    return ReplayProvider(provider, ReplayStore(replay_path), search.replay)


def _source(search: SearchConfig, index_folder: Path | None) -> Provider:
    match search.provider:
        case "local":
            if index_folder is None:
                raise ConfigError('search.provider is "local" and needs an index: run `groundhop pages CONFIG` first')
            return LocalProvider(LocalIndex(index_folder))
        case "you":
            key = os.environ.get(search.you_key_env, "")
            # A strict replay asks nobody, so it needs no key.
            if not key and search.replay != "strict":
                raise CredentialError(f"search.provider is you: put your key in {search.you_key_env}")
            return YouProvider(
                key or "replay", url=search.you_url, requests_per_s=search.requests_per_s, timeout_s=search.timeout_s
            )


def _interleave(answers: Sequence[tuple[str, Sequence[Found]]]) -> list[tuple[str, Found]]:
    """Take the queries' results in turn by rank; a passage that several queries found is shown once."""
    found: dict[tuple[str, tuple[str, ...]], tuple[str, Found]] = {}
    for rank in range(max((len(results) for _, results in answers), default=0)):
        for query, results in answers:
            if rank < len(results):
                found.setdefault((results[rank].url, results[rank].snippets), (query, results[rank]))
    return list(found.values())

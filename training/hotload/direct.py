"""A publisher's replicas without a control plane: their addresses, and this process in the middle.

For a trainer and servers that share a disk. All move together: written and verified on every one before any of them serves.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import httpx

from groundhop.errors import GroundhopError, ServerError
from groundhop.training.hotload import swap
from groundhop.training.hotload.checkpoint import open_checkpoint
from groundhop.training.hotload.fleet import OperationHint
from groundhop.training.hotload.journal import Held, Journal
from groundhop.training.hotload.replica import CachePolicy, PauseMode, Replica, make_client
from groundhop.training.hotload.store.objects import Objects
from groundhop.training.hotload.store.snapshots import SnapshotIndex, read_index
from groundhop.training.hotload.supply import Depot, Supply, Whole, held_of

logger = logging.getLogger(__name__)

T = TypeVar("T")
MakeClient = Callable[[Mapping[str, str]], httpx.AsyncClient]


@dataclass(frozen=True, slots=True)
class _Member:
    replica: Replica
    journal: Journal


class DirectFleet:
    """A `Fleet` of vLLM servers at known addresses. Not to be called from a running event loop."""

    def __init__(
        self,
        urls: Sequence[str],
        headers: Mapping[str, str],
        folder: Path,
        objects: Objects,
        *,
        cache: CachePolicy = "reset_all",
        requests: PauseMode = "keep",
        client: MakeClient = make_client,
    ) -> None:
        """`urls`: base addresses without `/v1`. `folder`: for staged files and journals; the servers must see it under the same
        path. `objects`: the publisher's store. `cache` and `requests`: what happens to the prompt cache and to requests in
        flight.
        """
        self._urls = list(urls)
        self._headers = dict(headers)
        self._folder = folder
        self._depot = Depot(objects, folder)
        self._objects = objects
        self._cache: CachePolicy = cache
        self._requests: PauseMode = requests
        self._client = client
        self._known: set[str] = set()
        """Addresses whose weights this process has compared with their journal."""

    def hot_load(self, index: SnapshotIndex, operation_hint: OperationHint) -> None:
        """See `Fleet`. A replica that the delta does not bring there gets the whole checkpoint."""
        asyncio.run(self._hot_load(index))

    def clean_on(self, identity: str) -> bool:
        """See `Fleet`: by what each worker verified last, or by a digest over its live bits."""
        try:
            return asyncio.run(self._clean_on(read_index(self._objects, identity).digest))
        except GroundhopError as error:
            logger.info("cannot tell whether all replicas hold %s: %s", identity, error)
            return False

    async def _hot_load(self, index: SnapshotIndex) -> None:
        txn = uuid.uuid4().hex
        async with AsyncExitStack() as stack:
            members = await self._members(stack)
            await _all(self._recognise(member, index) for member in members)
            try:
                plans = await _all(self._write(member, index, txn) for member in members)
            except GroundhopError as error:
                reason = f"{index.identity} was given up: {error}"
                await _all(swap.withdraw(member.replica, member.journal, reason) for member in members)
                raise
            await _all(swap.serve(m.replica, m.journal, plan) for m, plan in zip(members, plans, strict=True))
        await asyncio.to_thread(self._depot.tidy, {index.identity})

    async def _write(self, member: _Member, index: SnapshotIndex, txn: str) -> swap.Plan:
        plan = self._plan(txn, await asyncio.to_thread(self._depot.prepare, member.journal.record, index))
        try:
            await swap.write(member.replica, member.journal, plan)
        except ServerError as error:
            logger.warning("%s: %s; loading the whole checkpoint instead", index.identity, error)
            if plan.supply.whole is not None:
                await asyncio.to_thread(self._depot.discard)
            plan = self._plan(txn, await asyncio.to_thread(self._depot.restore, index))
            await swap.write(member.replica, member.journal, plan)
        return plan

    async def _recognise(self, member: _Member, index: SnapshotIndex) -> None:
        """At first sight, as the weights may be any of three: the journal's, the base, the snapshot itself."""
        if member.replica.url in self._known:
            return
        base = Held(identity=index.base or "", version=0, digest=index.base_digest)
        await swap.recognise(member.replica, member.journal, [base, held_of(index)])
        if member.journal.record.writing is None:
            await member.replica.resume()
        self._known.add(member.replica.url)

    async def _clean_on(self, digest: str) -> bool:
        async with AsyncExitStack() as stack:
            members = await self._members(stack)
            found = await _all(_digest(member.replica) for member in members)
            return bool(digest) and all(one == digest for one in found)

    async def _members(self, stack: AsyncExitStack) -> list[_Member]:
        client = await stack.enter_async_context(self._client(self._headers))
        return [_Member(Replica(client, url), Journal(self._folder / f"{_name(url)}.json")) for url in self._urls]

    def _plan(self, txn: str, supply: Supply) -> swap.Plan:
        return swap.Plan(txn, supply, self._cache, self._requests)


async def load_checkpoint(
    urls: Sequence[str],
    folder: Path,
    version: int,
    headers: Mapping[str, str] | None = None,
    *,
    client: MakeClient = make_client,
) -> str:
    """Bring all servers, whatever they hold, to the checkpoint in `folder`, and label it `version`. Returns its state digest.

    Switches running servers between policies. Raises: ServerError that names the one that does not hold it, and is out of
    service.
    """
    digest = (await asyncio.to_thread(open_checkpoint, folder)).digest
    held = Held(identity=f"checkpoint-{digest[:16]}", version=version, digest=digest)
    plan = swap.Plan(uuid.uuid4().hex, Supply(held, Whole(folder, held)), "reset_all")

    async def load(replica: Replica) -> None:
        journal = Journal(None)
        try:
            await swap.write(replica, journal, plan)
        except ServerError as error:
            await swap.withdraw(replica, journal, str(error))
            raise
        await swap.serve(replica, journal, plan)

    async with client(headers or {}) as connection:
        await _all(load(Replica(connection, url)) for url in urls)
    return digest


async def _digest(replica: Replica) -> str:
    """Of what it holds; "" where it is partly written. Reads all weights only where the worker cannot say."""
    state = await replica.state()
    return "" if state.dirty else state.digest or await replica.audit()


async def _all(work: Iterable[Awaitable[T]]) -> list[T]:
    """Run all to their ends, then raise what the first failing one raised."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def _name(url: str) -> str:
    parts = urlsplit(url)
    return f"replica-{(parts.hostname or 'unknown').replace(':', '_')}-{parts.port or 80}"

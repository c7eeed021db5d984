"""Keep one vLLM server on the versions that a control plane commits: `groundhop hotload agent`.

An agent runs beside its server. It fetches while the server serves, writes its journal before it touches a weight, and comes
back from kill -9 at any moment: what the weights are is then told by a digest over the live bits, never by memory.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from groundhop.errors import (
    ChecksumError,
    ConflictError,
    FencedError,
    GroundhopError,
    InputError,
    MissingError,
    RefusedError,
    ServerError,
    SpaceError,
)
from groundhop.training.hotload import swap
from groundhop.training.hotload.control.client import AgentClient
from groundhop.training.hotload.control.wire import (
    Code,
    Current,
    HeartbeatBody,
    Phase,
    RegisterBody,
    RegisterReply,
    ReportBody,
    Task,
)
from groundhop.training.hotload.journal import Held, Journal
from groundhop.training.hotload.replica import Certificate, Replica
from groundhop.training.hotload.store.log import CommitLog
from groundhop.training.hotload.store.objects import Objects
from groundhop.training.hotload.supply import Depot, held_of

logger = logging.getLogger(__name__)

FIRST_DELAY_S, LONGEST_DELAY_S = 0.2, 5.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Settings:
    """What an agent is told at its start."""

    deployment: str
    name: str
    zone: str = ""
    patience_s: float = 60.0
    """So long do requests wait in a paused server for a repair; then they are ended and new ones refused."""
    keep_every: int = 20
    """Restore a local checkpoint every so many versions, for the engine's next restart; 0: never."""


class SupersededError(Exception):
    """The control plane has given the attempt in hand up."""


class Agent:
    """One replica's agent. `run` lasts until it is cancelled, or a newer agent of this name takes over."""

    def __init__(
        self,
        settings: Settings,
        replica: Replica,
        client: AgentClient,
        objects: Objects,
        depot: Depot,
        journal: Journal,
    ) -> None:
        self._settings = settings
        self._replica = replica
        self._client = client
        self._log = CommitLog(objects)
        self._depot = depot
        self._journal = journal
        self._certificate = Certificate(ok=True)
        self._plan: swap.Plan | None = None
        """What is staged or written, of the task in hand."""
        self._whole_only = False
        """Whether deltas failed here, so that only a whole checkpoint is to be trusted."""
        self._work: asyncio.Task[None] | None = None
        self._hands = asyncio.Lock()
        """Held by whoever pauses, writes to or resumes the server."""
        self._registered: RegisterReply | None = None
        self._label = ""
        """What the server called its weights when it was last taken stock of, or put into service."""
        self._stuck_since: float | None = None
        self._since_kept = settings.keep_every
        self._keeping: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Take charge, and serve the control plane. Raises: RefusedError when a newer agent has taken over."""
        await self._begin()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._beat())
                group.create_task(self._follow())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    # --- taking charge

    async def _begin(self) -> None:
        await self._again(self._take_stock)
        await self._again(self._register)

    async def _take_stock(self) -> None:
        """Find out what the server holds, and let it serve that, or nobody."""
        if not await self._replica.alive():
            raise ServerError(f"{self._replica.url} does not answer")
        before = self._journal.record
        known = await asyncio.to_thread(self._commits)
        self._certificate = await swap.recognise(self._replica, self._journal, known) or self._certificate
        live = self._journal.record.held
        logger.info("%s is %s on %s", self._replica.url, self._journal.record.state, live.identity if live else "?")
        if self._journal.record.writing is not None:
            return
        if live is not None and await self._replica.version() != str(live.version):
            # Keys and values may be of what was being written.
            await self._replica.freshen(
                "reset_all" if before.writing else "preserve", f"{live.identity} {time.time_ns()}"
            )
            await self._replica.stamp(str(live.version))
        self._label = await self._replica.version()
        await self._replica.put_back()

    def _commits(self) -> list[Held]:
        return [
            Held(identity=c.identity, version=c.version, digest=c.digest, epoch=c.epoch)
            for c in reversed(self._log.commits())
        ]

    async def _register(self) -> None:
        about = RegisterBody(
            deployment=self._settings.deployment,
            name=self._settings.name,
            epoch=self._client.epoch,
            engine="vllm",
            zone=self._settings.zone,
            layout_signature=self._certificate.layout_signature,
            plan_digest=self._certificate.plan_digest,
            overwrite_names=tuple(self._certificate.overwrite_names),
            current=self._current(),
        )
        self._registered = await self._client.register(about)

    def _current(self) -> Current:
        record = self._journal.record
        held = record.held
        return Current(
            identity=held.identity if held else None,
            digest=held.digest if held and record.state == "clean" else "",
            clean=record.writing is None,
            dirty_to=record.writing.to.identity if record.writing else None,
        )

    # --- heartbeats

    async def _beat(self) -> None:
        while True:
            assert self._registered is not None
            await asyncio.sleep(self._registered.heartbeat_s)
            try:
                await self._check()
                serving = self._journal.record.writing is None and not self._hands.locked()
                body = HeartbeatBody(epoch=self._client.epoch, current=self._current(), serving=serving)
                if not (await self._client.heartbeat(body)).known:
                    await self._register()
            except ServerError as error:
                # A server that is gone does not beat: the control plane counts it as offline.
                logger.warning("%s", error)

    async def _check(self) -> None:
        """Notice a server that was started again, and one that stands still too long."""
        if not await self._replica.alive():
            raise ServerError(f"{self._replica.url} does not answer")
        if not self._hands.locked():
            async with self._hands:
                await self._look_after()

    async def _look_after(self) -> None:
        record = self._journal.record
        if record.writing is not None:
            self._stuck_since = self._stuck_since or time.monotonic()
            if time.monotonic() - self._stuck_since > self._settings.patience_s:
                self._stuck_since = time.monotonic()
                await self._replica.take_out(f"its weights wait for a repair to {record.writing.to.identity}")
            return
        self._stuck_since = None
        # Weights that were recognised only when a version was staged are not labelled yet.
        known = {self._label, str(record.held.version)} if record.held is not None else set()
        if known and await self._replica.version() not in known:
            logger.warning("%s was started again", self._replica.url)
            await self._take_stock()
            await self._register()
        elif await self._replica.is_paused():
            # Its weights are known, labelled and fresh; only the resume did not get through.
            await self._replica.put_back()

    # --- tasks

    async def _follow(self) -> None:
        key = ""
        while True:
            try:
                reply = await self._again(functools.partial(self._client.task, key))
            except RefusedError as error:
                if error.code != "not_found":
                    raise
                await self._again(self._register)
                continue
            if reply.key == key:
                continue
            if self._work is not None:
                # What began is brought to an end: a fetch that serves nobody is cheap, a write must not be cut.
                await self._work
            key = reply.key
            self._work = None if reply.task is None else asyncio.create_task(self._do(reply.task))

    async def _do(self, task: Task) -> None:
        async with self._hands:
            await self._try(task)

    async def _try(self, task: Task) -> None:
        try:
            match task.action:
                case "stage":
                    await self._stage(task)
                case "apply":
                    await self._write(task)
                    if not task.joint:
                        await self._serve(task)
                case "commit":
                    await self._serve(task)
                case "recover":
                    await self._stage(task)
                    await self._write(task)
                    await self._serve(task)
        except SupersededError:
            logger.info("%s: %s was given up", task.identity, task.txn)
        except GroundhopError as error:
            logger.warning("%s of %s failed: %s", task.action, task.identity, error)
            with contextlib.suppress(SupersededError):
                await self._fail(task, error)
        except Exception:
            logger.exception("%s of %s failed", task.action, task.identity)
            with contextlib.suppress(SupersededError):
                await self._fail(task, ServerError("the agent failed, see its log"))

    async def _stage(self, task: Task) -> None:
        await self._report(task, "fetching")
        began = time.monotonic()
        record = self._journal.record
        epochs = [held.epoch for held in (record.held, record.live) if held is not None]
        index = await asyncio.to_thread(
            self._depot.read_index, task.identity, task.index_sha256, max(epochs, default=0)
        )
        if task.digest and index.digest and task.digest != index.digest:
            raise ChecksumError(
                f"{task.identity}: its index promises {index.digest[:12]}, the hot-load {task.digest[:12]}"
            )
        if record.state == "unknown" and index.digest:
            # The first version of a run is what its servers were started on, as a rule.
            await swap.name(self._replica, self._journal, [held_of(index)])
            record = self._journal.record
        if self._whole_only:
            supply = await asyncio.to_thread(self._depot.restore, index)
        else:
            supply = await asyncio.to_thread(self._depot.prepare, record, index)
        self._plan = swap.Plan(task.txn, supply, task.prompt_cache, task.requests)
        await self._report(task, "staged", bytes_=supply.bytes, seconds=time.monotonic() - began)

    async def _write(self, task: Task) -> None:
        plan = self._plan
        if plan is None or plan.txn != task.txn:
            raise ServerError(f"nothing is staged for {task.txn}")

        async def tell(phase: swap.SwapPhase) -> None:
            try:
                await self._report(task, phase)
            except SupersededError:
                # Once a weight was written, verifying it is the best that can be done.
                if phase != "verifying":
                    raise

        try:
            written = await swap.write(self._replica, self._journal, plan, tell)
        except ServerError:
            self._whole_only = plan.supply.whole is None
            if plan.supply.whole is not None:
                await asyncio.to_thread(self._depot.discard)
            raise
        self._whole_only = False
        await self._report(task, "prepared", bytes_=plan.supply.bytes, changed=written.changed, seconds=written.seconds)

    async def _serve(self, task: Task) -> None:
        plan = self._plan
        if plan is None or plan.txn != task.txn:
            raise ServerError(f"nothing is prepared for {task.txn}")
        done = await swap.serve(self._replica, self._journal, plan)
        self._label = plan.label
        await self._report(task, "serving", cache_reset=done == "reset_all")
        self._plan = None
        await asyncio.to_thread(self._depot.tidy, {task.identity})
        self._since_kept += 1
        if self._settings.keep_every and self._since_kept > self._settings.keep_every and self._keeping is None:
            self._since_kept = 1
            self._keeping = asyncio.create_task(self._keep(task.identity))

    async def _keep(self, identity: str) -> None:
        try:
            await asyncio.to_thread(self._depot.keep, identity)
        except (GroundhopError, OSError) as error:
            logger.warning("no local checkpoint of %s: %s", identity, error)
        finally:
            self._keeping = None

    async def _fail(self, task: Task, error: GroundhopError) -> None:
        clean = self._journal.record.writing is None
        code, retry = _kind_of(error)
        await self._report(task, "failed" if clean else "dirty", error=str(error)[:2000], code=code, retry=retry)

    async def _report(
        self,
        task: Task,
        phase: Phase,
        *,
        bytes_: int = 0,
        changed: int = 0,
        seconds: float = 0.0,
        cache_reset: bool = False,
        error: str = "",
        code: Code = "unavailable",
        retry: bool = True,
    ) -> None:
        """Tell the control plane, as often as it takes. Raises: SupersededError when it does not want to know any more."""
        body = ReportBody(
            epoch=self._client.epoch,
            txn=task.txn,
            phase=phase,
            current=self._current(),
            plan_digest=self._certificate.plan_digest,
            bytes=bytes_,
            changed=changed,
            seconds=seconds,
            cache_reset=cache_reset,
            error=error,
            retry=retry,
            code=code,
        )
        if not (await self._again(lambda: self._client.report(body))).accepted:
            raise SupersededError(task.txn)

    async def _again(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask until it is answered: without its control plane an agent only waits."""
        delay = FIRST_DELAY_S
        while True:
            try:
                return await ask()
            except ServerError as error:
                logger.warning("%s; trying again in %.1f s", error, delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY_S)


def _kind_of(error: GroundhopError) -> tuple[Code, bool]:
    """The code of a failure, and whether another try may help."""
    match error:
        case SpaceError():
            return "resource_exhausted", True
        case ChecksumError():
            return "data_loss", False
        case FencedError():
            return "aborted", False
        case MissingError() | ConflictError():
            return "failed_precondition", True
        case InputError():
            return "invalid_argument", False
        case _:
            return "unavailable", True

"""The stretch in which a replica stands still: new weights in, verified, and back to serving, or out of service.

Order (`control-plane.md` 5.3): pause, journal DIRTY, write, verify, journal PREPARED; then, once the fleet agreed, caches, label,
journal, resume. A replica whose weights are known always resumes; one whose weights are not known serves nobody.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from groundhop.errors import ServerError
from groundhop.training.hotload.journal import Held, Journal
from groundhop.training.hotload.receiver.requests import ApplyRequest
from groundhop.training.hotload.replica import CachePolicy, Certificate, PauseMode, Replica
from groundhop.training.hotload.supply import Supply

logger = logging.getLogger(__name__)

SwapPhase = Literal["pausing", "applying", "verifying"]
Tell = Callable[[SwapPhase], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Plan:
    """One move of one replica."""

    txn: str
    supply: Supply
    cache: CachePolicy = "preserve"
    requests: PauseMode = "keep"

    @property
    def label(self) -> str:
        """What vLLM calls the weights: the version's number, which `min_required_version` can rank."""
        return str(self.supply.target.version)

    @property
    def salt(self) -> str:
        """New with every move, so that a rollback does not find what the rolled-back weights left."""
        return f"{self.supply.target.identity} {self.txn}"


@dataclass(frozen=True, slots=True)
class Written:
    """What a move wrote."""

    changed: int
    seconds: float
    """Since the pause began."""


async def _quiet(_: SwapPhase) -> None:
    pass


async def write(replica: Replica, journal: Journal, plan: Plan, tell: Tell = _quiet) -> Written:
    """Make the weights `plan.supply.target`. The replica is paused and prepared when this returns.

    Raises: ServerError. What the journal says then holds: `clean`, and it serves what it served; or `dirty`, and it is paused.
    """
    began = time.monotonic()
    await tell("pausing")
    try:
        await replica.pause(plan.requests)
        await tell("applying")
        journal.begin(plan.txn, plan.supply.target)
    except BaseException:
        # Nothing is written. A replica that was dirty before stays paused.
        if journal.record.state not in ("dirty", "prepared"):
            await replica.resume()
        raise
    changed = 0
    try:
        changed = await _apply(replica, plan)
        await tell("verifying")
        if plan.supply.empty and (found := await replica.audit()) != plan.supply.target.digest:
            raise ServerError(f"{replica.url} holds {found[:12]}, not {plan.supply.target.digest[:12]}")
    except ServerError as error:
        if await settle(replica, journal) != plan.supply.target:
            if journal.record.state == "clean":
                await replica.resume()
            raise
        logger.warning("%s holds %s although: %s", replica.url, plan.supply.target.identity, error)
        return Written(changed, time.monotonic() - began)
    journal.verify()
    return Written(changed, time.monotonic() - began)


async def serve(replica: Replica, journal: Journal, plan: Plan) -> CachePolicy:
    """Serve what is prepared: caches, label, journal, resume. Returns what was done about the prompt cache.

    Raises: ServerError; the replica is then out of service, with weights that are known.
    """
    assert journal.record.live == plan.supply.target, "only verified weights are served"
    try:
        # The salt first, the label last: whoever is let in under the new label must not meet the old salt.
        done = await replica.freshen(plan.cache, plan.salt)
        await replica.stamp(plan.label)
        journal.hold(plan.supply.target)
        await replica.put_back()
    except ServerError as error:
        await _take_out(replica, str(error))
        raise
    return done


async def withdraw(replica: Replica, journal: Journal, reason: str) -> None:
    """Take a replica out of service: what it may hold is not to be served."""
    journal.doubt()
    await _take_out(replica, reason)


async def settle(replica: Replica, journal: Journal) -> Held | None:
    """Find out, by a digest over the live bits, which of the states in the journal the weights are, and write it down.

    Returns it; None when it is none of them, and the journal then holds no more than that.
    """
    record, digest = journal.record, await _look(replica)
    if record.writing is not None and digest == record.writing.to.digest:
        journal.verify()
        return record.writing.to
    if record.held is not None and digest == record.held.digest:
        journal.hold(record.held)
        return record.held
    journal.doubt()
    return None


async def recognise(replica: Replica, journal: Journal, known: Iterable[Held]) -> Certificate | None:
    """At first sight of a server: have its placement certified, and tell what it holds. It is paused afterwards.

    Its weights are one of those in the journal, or one of `known`, or are written down as nobody's, unless a write was under
    way. Returns the certificate; None where there is one already, or the engine is refused and takes whole loads only.
    """
    await replica.pause("keep")
    certificate = None
    if not (await replica.state()).certified:
        try:
            certificate = await replica.certify(None)
        except ServerError as error:
            logger.warning("%s; it gets whole checkpoints", error)
    if await settle(replica, journal) is None:
        await name(replica, journal, known)
    return certificate


async def name(replica: Replica, journal: Journal, known: Iterable[Held]) -> None:
    """Write down which of `known` the weights are, by their digest; as nobody's where they are none and no write is under way."""
    digest = await _look(replica)
    found = next((held for held in known if digest and held.digest == digest), None)
    if found is not None or journal.record.writing is None:
        journal.hold(found)


async def _look(replica: Replica) -> str:
    """The digest of the live bits; what the worker says of its last load where it cannot read them; "" when nobody knows."""
    try:
        return await replica.audit()
    except ServerError as error:
        logger.warning("the weights of %s cannot be read: %s", replica.url, error)
    try:
        state = await replica.state()
    except ServerError:
        return ""
    return "" if state.dirty else state.digest


async def _apply(replica: Replica, plan: Plan) -> int:
    supply, changed = plan.supply, 0
    if supply.whole is not None:
        held = supply.whole.held
        changed += (await replica.load(supply.whole.folder, held.identity, held.digest)).changed
    for number, step in enumerate(supply.steps):
        request = ApplyRequest(
            txn=f"{plan.txn}.{number}",
            identity=step.to.identity,
            version=step.to.version,
            parts=tuple(str(path.resolve()) for path in step.parts),
            base_digest=step.base_digest,
            digest=step.to.digest,
            operation=step.operation,
        )
        changed += (await replica.apply(request)).changed
    return changed


async def _take_out(replica: Replica, reason: str) -> None:
    try:
        await replica.take_out(reason)
    except ServerError as error:
        logger.warning("could not take %s out of service: %s", replica.url, error)

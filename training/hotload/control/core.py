"""The one way in which a deployment changes: first the ledger, then the state, then everybody who waits.

All of it runs in one event loop, and between reading a state and appending an event nothing is awaited, so no two requests
act on one state. Appending waits for the disk on purpose: nothing may follow from an event that is not durable.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from groundhop.errors import StoreError
from groundhop.training.hotload.control import rules
from groundhop.training.hotload.control.admission import refuse
from groundhop.training.hotload.control.ledger import Ledger
from groundhop.training.hotload.control.records import Deployment, Event, WentOffline
from groundhop.training.hotload.control.states import evolve

logger = logging.getLogger(__name__)

LONGEST_POLL_S = 60.0
LONGEST_SLEEP_S = 3600.0
RETRY_S = 1.0
_BEGAN = time.time() - time.monotonic()


def steady_time() -> float:
    """Unix time that never jumps while the process lives."""
    return _BEGAN + time.monotonic()


class Core:
    """Deployments by name, their ledger, their clock, and everybody who waits for a change."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        """Take up what the ledger holds: attempts without a commit are aborted, those with one roll forward."""
        self._ledger = ledger
        self._clock = clock
        self._deployments = ledger.load()
        self._beats: dict[tuple[str, str], float] = {}
        self._changed: dict[str, asyncio.Event] = {}
        self._hurry = asyncio.Event()
        for name, found in list(self._deployments.items()):
            # Nobody could beat while there was nobody to listen.
            self._beats |= {(name, replica): clock() for replica in found.replicas}
            event = rules.after_restart(found)
            if event is not None:
                self._append(name, event)
            self._follow(name)

    def names(self) -> list[str]:
        """All deployments."""
        return sorted(self._deployments)

    def find(self, name: str) -> Deployment:
        """A deployment's state. Raises: RefusedError, `not_found`."""
        found = self._deployments.get(name)
        if found is None:
            raise refuse("not_found", f"no deployment {name!r}")
        return found

    async def run(self) -> None:
        """Notice silence and run-out times; sleeps until the next of them. Runs until cancelled."""
        while True:
            self._hurry.clear()
            try:
                wake_at = self.tick()
            except StoreError:
                # Nothing changed; what is due stays due. The disk may get its space back.
                logger.exception("control: the ledger cannot be written, trying again in %.0f s", RETRY_S)
                await asyncio.sleep(RETRY_S)
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), max(wake_at - self._clock(), 0.0))

    def tick(self) -> float:
        """Do what the time calls for; gives the time at which to look again."""
        now = self._clock()
        wake_at = now + LONGEST_SLEEP_S
        for name in self.names():
            patience = self._deployments[name].config.offline_after_s
            for key, replica in list(self._deployments[name].replicas.items()):
                silent_at = self._beats.setdefault((name, key), now) + patience
                if replica.state != "offline" and silent_at <= now:
                    logger.warning("control: %s/%s is silent for %.1f s: offline", name, key, patience)
                    self._append(name, WentOffline(name=key))
                elif replica.state != "offline":
                    wake_at = min(wake_at, silent_at)
            self._follow(name)
            self._wake(name)
            later = [moment for moment in rules.deadlines(self._deployments[name]) if moment > now]
            wake_at = min([wake_at, *later])
        return wake_at

    def _beat(self, deployment: str, name: str) -> None:
        self._beats[deployment, name] = self._clock()

    def _append(self, name: str, event: Event) -> Deployment:
        return self._write(name, event, self._deployments[name])

    def _write(self, name: str, event: Event, before: Deployment) -> Deployment:
        """THE way in which anything changes: first the ledger, then the state, then everybody who waits."""
        now = self._clock()
        sequence = self._ledger.append(name, event, now)
        after = evolve(before, event, now)
        self._deployments[name] = after
        with contextlib.suppress(StoreError):
            self._ledger.save(after, sequence)
        self._wake(name)
        self._hurry.set()
        return after

    def _follow(self, name: str) -> None:
        while (event := rules.follow(self._deployments[name], self._clock())) is not None:
            logger.info("control: %s: %s", name, _say(event))
            self._append(name, event)

    def _wake(self, name: str) -> None:
        waiting = self._changed.pop(name, None)
        if waiting is not None:
            waiting.set()

    async def _until(self, name: str, claim: Callable[[Deployment], bool], wait_s: float) -> bool:
        """Wait for a claim about a deployment to hold; whether it does."""
        loop = asyncio.get_running_loop()
        end = loop.time() + min(max(wait_s, 0.0), LONGEST_POLL_S)
        while not claim(self.find(name)):
            left = end - loop.time()
            if left <= 0:
                return False
            changed = self._changed.setdefault(name, asyncio.Event())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), left)
        return True


def _say(event: Event) -> str:
    fields = [
        f"{key}={getattr(event, key)}" for key in ("identity", "state", "name", "txn", "reason") if hasattr(event, key)
    ]
    return " ".join([type(event).__name__.lower(), *fields])

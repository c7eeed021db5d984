"""A token bucket: at most so many requests a second, however many wait at once."""

import asyncio
import time
from collections.abc import Awaitable, Callable


class Pace:
    """Lets callers through at `per_second`, `burst` of them at once after a rest; in the order in which they came."""

    def __init__(
        self,
        per_second: float,
        burst: int = 1,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._interval = 1.0 / per_second
        self._burst = burst
        self._clock = clock
        self._sleep = sleep
        self._next = -float("inf")
        """When the bucket would be empty but for one token."""

    async def wait(self) -> None:
        """Return when it is this caller's turn."""
        now = self._clock()
        turn = max(self._next, now - (self._burst - 1) * self._interval)
        self._next = turn + self._interval
        if turn > now:
            await self._sleep(turn - now)

    def hold(self, seconds: float) -> None:
        """Let nobody through for so long: the server asked for it."""
        self._next = max(self._next, self._clock() + seconds)

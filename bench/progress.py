"""What a long measurement says while it runs, and how long it may wait for each thing."""

import contextlib
import faulthandler
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

_BEGAN = time.monotonic()


def say(text: str) -> None:
    """One line on stderr, with the seconds since the start."""
    print(f"{time.monotonic() - _BEGAN:7.1f} s  {text}", file=sys.stderr, flush=True)


def end_on_sigterm() -> None:
    """Let a SIGTERM end this process by an exception, so that the servers it started are stopped."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


@contextlib.contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """Say that `what` begins and how long it took. Main thread only, one at a time.

    Raises: TimeoutError after `seconds`, with the stacks of all threads on stderr. Where the main thread hangs outside Python
    the stacks come 5 s later, and the error when it is back.
    """
    assert threading.current_thread() is threading.main_thread()

    def late(_: int, __: FrameType | None) -> NoReturn:
        faulthandler.dump_traceback(all_threads=True)
        raise TimeoutError(f"{what}: not done after {seconds:g} s")

    say(f"{what} ...")
    began, before = time.monotonic(), signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + 5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)
    say(f"{what}: {time.monotonic() - began:.1f} s")

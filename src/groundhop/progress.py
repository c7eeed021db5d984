"""Show how far long work is: a bar on a terminal, one line each ten seconds elsewhere."""

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

logger = logging.getLogger(__name__)

LINE_EVERY_S = 10.0


class Progress:
    """Counts finished items and says so with rate and estimate."""

    def __init__(self, name: str, total: int | None, done: int = 0) -> None:
        self._name = name
        self._total = total
        self._skipped = done
        self._done = done
        self._start = self._last = time.monotonic()
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        if sys.stderr.isatty():
            self._open_bar()

    def _open_bar(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[notes]}"),
        )
        self._bar = Bar(*columns, transient=False)
        self._bar.start()
        self._task = self._bar.add_task(self._name, total=self._total, completed=self._done, notes="")

    def advance(self, count: int = 1, notes: Mapping[str, object] | None = None) -> None:
        """Note `count` more finished items; `notes` are counters worth seeing."""
        self._done += count
        words = "  ".join(f"{key} {value}" for key, value in (notes or {}).items())
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done, notes=words)
        elif time.monotonic() - self._last >= LINE_EVERY_S:
            self._last = time.monotonic()
            logger.info("%s", self.line(words))

    def line(self, words: str = "") -> str:
        """`rollouts 1200/8000  31/s  eta 3m40s  no-verdict 7`."""
        elapsed = max(time.monotonic() - self._start, 1e-9)
        rate = (self._done - self._skipped) / elapsed
        total = "" if self._total is None else f"/{self._total}"
        eta = "" if self._total is None or rate <= 0 else f"  eta {_duration((self._total - self._done) / rate)}"
        return f"{self._name} {self._done}{total}  {rate:.3g}/s{eta}  {words}".rstrip()

    def close(self) -> None:
        """Show the final state."""
        if self._bar is not None:
            self._bar.stop()
        else:
            logger.info("%s", self.line())


@contextmanager
def progress(name: str, total: int | None, done: int = 0) -> Iterator[Progress]:
    """Show progress of `total` items while the block runs; `done` of them were there before."""
    shown = Progress(name, total, done)
    try:
        yield shown
    finally:
        shown.close()


def _duration(seconds: float) -> str:
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{left:02}s" if minutes else f"{left}s"

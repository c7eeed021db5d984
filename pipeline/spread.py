"""Map a function over an endless stream with worker processes: in order, in bounded memory, outliving bad items."""

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")

_AHEAD = 8
"""Items a worker that wait or run: enough to keep it busy, little enough to keep memory flat."""


def spread(function: Callable[[A], B], items: Iterable[A], *, workers: int) -> Iterator[tuple[A, B | Exception]]:
    """Yield each item with its result, or with the exception that it raised, in the order of `items`.

    An item that kills its process comes back with `BrokenProcessPool`; those that ran beside it are run again.
    `function` and the items must be picklable. With one worker all runs in this process.
    """
    if workers == 1:
        for item in items:
            yield item, _try(function, item)
        return
    stream = iter(items)
    waiting: deque[tuple[A, Future[B]]] = deque()
    pool = _pool(workers)
    try:
        while True:
            while len(waiting) < workers * _AHEAD and (more := next(stream, _END)) is not _END:
                waiting.append((more, _submit(pool, function, more)))  # type: ignore[arg-type]
            if not waiting:
                return
            item, future = waiting.popleft()
            try:
                yield item, future.result()
            except BrokenProcessPool:
                yield item, _alone(function, item)
                pool.shutdown(wait=False)
                pool = _pool(workers)
                waiting = deque((other, _submit(pool, function, other)) for other, _ in waiting)
            except Exception as error:
                yield item, error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


_END = object()


def _pool(workers: int) -> ProcessPoolExecutor:
    # Fork would copy whatever threads and locks this process holds.
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


def _submit(pool: ProcessPoolExecutor, function: Callable[[A], B], item: A) -> Future[B]:
    try:
        return pool.submit(function, item)
    except BrokenProcessPool as error:
        # A worker died since the last result: the item comes up in its turn and is then run alone.
        lost: Future[B] = Future()
        lost.set_exception(error)
        return lost


def _try(function: Callable[[A], B], item: A) -> B | Exception:
    try:
        return function(item)
    except Exception as error:
        return error


def _alone(function: Callable[[A], B], item: A) -> B | Exception:
    """Run an item in a process of its own, to see whether it was this one that killed its worker."""
    with _pool(1) as pool:
        try:
            return pool.submit(function, item).result()
        except Exception as error:
            return error

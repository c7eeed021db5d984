"""How compiled loops are made and run here: one thread a call, the interpreter's lock released, callers split the work.

Numba's own threading layers are not used: the portable one ends the process when two Python threads enter it, and the
OpenMP one does so in a forked child. Loops that release the lock, driven by a thread pool that lives as long as the
call, do neither.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numba
from numba import config
from numpy.typing import NDArray

Item = TypeVar("Item")
Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile a loop at its first call for the types it gets, and keep the machine code on disk where that can be written.

    Numba looks for a place beside the module, then in the user's cache; where neither can be written it compiles anew in
    each process.
    """
    try:
        made = numba.njit(nogil=True, cache=True, boundscheck=False)(function)
    except RuntimeError:
        made = numba.njit(nogil=True, boundscheck=False)(function)
    return made  # type: ignore[no-any-return]


def thread_count() -> int:
    """How many threads a call may use: the processor's cores that this process may run on, or `NUMBA_NUM_THREADS`."""
    return int(getattr(config, "NUMBA_NUM_THREADS"))  # noqa: B009 (its stubs do not know it)


def in_parallel(function: Callable[[Item], Result], items: Iterable[Item], threads: int | None = None) -> list[Result]:
    """Call `function` on each item, in order of the results, with `threads` threads (None: `thread_count()`)."""
    work: Sequence[Item] = list(items)
    workers = min(len(work), thread_count() if threads is None else threads)
    if workers <= 1:
        return [function(item) for item in work]
    with ThreadPoolExecutor(workers, "hotload") as pool:
        return list(pool.map(function, work))


def fixed(array: NDArray[Any]) -> NDArray[Any]:
    """A read-only view, so that loops are compiled once and not once more for arrays that cannot be written."""
    view = array.view()
    view.flags.writeable = False
    return view


def spans(size: int, step: int) -> list[tuple[int, int]]:
    """`size` elements as (start, stop) pieces of `step` elements, the last one shorter."""
    return [(start, min(start + step, size)) for start in range(0, size, step)]

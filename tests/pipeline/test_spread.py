import os
import signal
from concurrent.futures.process import BrokenProcessPool

import pytest

from groundhop.pipeline.spread import spread


def half(number: int) -> int:
    if number == 13:
        os.kill(os.getpid(), signal.SIGKILL)
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number // 2


@pytest.mark.parametrize("workers", [1, 2])
def test_results_keep_the_order_and_an_exception_is_a_result(workers: int) -> None:
    got = [(n, str(r)) for n, r in spread(half, range(6), workers=workers)]
    assert got == [(0, "0"), (1, "1 is odd"), (2, "1"), (3, "3 is odd"), (4, "2"), (5, "5 is odd")]


def test_an_item_that_kills_its_process_costs_only_itself() -> None:
    got = dict(spread(half, (10, 12, 13, 14, 16), workers=2))
    assert isinstance(got.pop(13), BrokenProcessPool) and got == {10: 5, 12: 6, 14: 7, 16: 8}


def test_no_more_than_a_window_is_taken_from_the_stream() -> None:
    taken: list[int] = []

    def numbers() -> object:
        for n in range(1000):
            taken.append(n)
            yield 2 * n

    next(iter(spread(half, numbers(), workers=2)))  # type: ignore[arg-type]
    assert len(taken) < 20

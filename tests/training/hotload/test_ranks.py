"""Shards of a training job: where their elements lie, and two processes that publish as one."""

import subprocess
import sys
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groundhop.training.hotload.projection import Projection, is_owner

WORKER = Path(__file__).with_name("rank_worker.py")


def shards(shape: tuple[int, ...], axis: int, ranks: int) -> list[Projection]:
    """As `torch.chunk` and so `Shard` cut: even pieces, the last ones shorter or empty."""
    each = -(-shape[axis] // ranks)
    found = []
    for rank in range(ranks):
        start = min(rank * each, shape[axis])
        local = list(shape)
        local[axis] = min(start + each, shape[axis]) - start
        found.append(Projection(shape, tuple(local), axis, start))
    return found


@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple),
    axis=st.integers(0, 3),
    ranks=st.integers(1, 9),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_changes_of_all_shards_are_the_changes_of_the_whole(
    shape: tuple[int, ...], axis: int, ranks: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    old = random.integers(0, 3, prod(shape)).astype(np.uint16)
    new = random.integers(0, 3, prod(shape)).astype(np.uint16)
    rebuilt, positions = old.copy(), []
    for projection in shards(shape, axis % len(shape), ranks):
        before, after = projection.cut(old), projection.cut(new)
        local = np.flatnonzero(before != after)
        mine = projection.positions(local)
        assert np.all(mine[1:] > mine[:-1])
        rebuilt[mine] = after[local]
        positions += mine.tolist()
    assert np.array_equal(rebuilt, new)
    assert sorted(positions) == np.flatnonzero(old != new).tolist()


def test_exactly_one_rank_speaks_for_what_all_hold() -> None:
    whole = Projection((4,), (4,), None, 0)
    for name in ("a", "b", "model.norm.weight"):
        assert sum(is_owner(name, whole, rank, 5) for rank in range(5)) == 1


@pytest.mark.slow
def test_two_processes_publish_what_a_gathered_export_holds(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=500) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    said = outputs[0][0].splitlines()
    assert said == [
        "start 0 wrong: []",
        "publish 1 True wrong: []",
        "failed",
        "publish 3 True wrong: []",
        "publish 4 True wrong: []",
        "refused: rank 1: plain: need the shape [9], the trainer gave [2]",
        "publish 6 wrong: []",
        "rows True",
    ]
    assert "failed" in outputs[1][0]
    assert "refused: rank 1" in outputs[1][0]

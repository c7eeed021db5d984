"""Two gloo processes end where one does on the concatenated batch (T-L7): replicas, DDP, FSDP2 with uneven rows."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from logra_rank import CASES
from sketched import batch, logra, loss_of, small, weights_of
from torch import Tensor

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(Path(__file__).parent / "logra_rank.py")]
    running = [
        subprocess.Popen([*command, str(rank), str(root)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(said)
    return [torch.load(root / f"rank{rank}.pt") for rank in range(2)]


def alone(**settings: Any) -> dict[str, Tensor]:
    model = small()
    optimizer = logra(model, **{"others": "adamw", "others_learning_rate": 1e-2, **settings})
    for seed in range(3):
        loss_of(model, batch(seed)).backward()
        optimizer.step()
        model.zero_grad()
    return weights_of(model)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_end_where_one_process_does(ranks: list[dict[str, Any]], name: str) -> None:
    start, wanted, found = weights_of(small()), alone(**CASES[name]), ranks[0]["weights"][name]
    for key, weight in wanted.items():
        moved = (weight - start[key]).norm()
        assert moved > 0
        assert (found[key] - weight).norm() / moved < (2e-3 if "int16" in name else 1e-4), key


@pytest.mark.parametrize("name", CASES)
def test_both_ranks_hold_the_same_bits(ranks: list[dict[str, Any]], name: str) -> None:
    one, other = (rank["weights"][name] for rank in ranks)
    assert all(torch.equal(weight, other[key]) for key, weight in one.items())


def test_ranks_that_project_differently_are_refused_on_both(ranks: list[dict[str, Any]]) -> None:
    assert ["projections differ between processes" in rank["said"] for rank in ranks] == [True, True]

"""One of two ranks of a small job: FSDP2 and hand-made DTensors, trained a little and published. Run by test_ranks.py."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from groundhop.errors import InputError, StoreError
from groundhop.training.hotload.bits import bits_of
from groundhop.training.hotload.named import Given
from groundhop.training.hotload.publisher import Publisher
from groundhop.training.hotload.ranks import RankPublisher
from groundhop.training.hotload.store.disk import DiskObjects

RANK, ROOT = int(sys.argv[1]), Path(sys.argv[2])


class Model(torch.nn.Module):
    """Rows that two ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(7, 5)
        self.second = torch.nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.relu(self.first(x)))
        return out


def extras(seed: int) -> dict[str, Any]:
    """Tensors that FSDP2 does not make: columns, copies, plain ones, two mesh axes, bytes, nothing at all."""
    one, two = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    random = torch.Generator().manual_seed(7)
    later = torch.Generator().manual_seed(100 + seed)

    def moved(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        values = torch.randn(shape, generator=random)
        touched = torch.rand(shape, generator=later) < (0.2 if seed else 0)
        return torch.where(touched, values * 1.1, values).to(dtype)

    return {
        "columns": distribute_tensor(moved(4, 5, 3), one, [Shard(1)]),
        "long": distribute_tensor(moved(3, 3).to(torch.int64), one, [Shard(1)]),
        "copies": distribute_tensor(moved(4, 6), one, [Replicate()]),
        "gathered": distribute_tensor(moved(5, 4), two, [Replicate(), Shard(0)]),
        "one row": distribute_tensor(moved(1, 4), one, [Shard(0)]),
        "plain": moved(9),
    }


def main() -> None:
    dist.init_process_group("gloo", init_method=f"file://{ROOT}/rendezvous", rank=RANK, world_size=2)
    torch.manual_seed(1)
    model = Model()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    objects = DiskObjects(ROOT / "store")
    one = Publisher(objects, ROOT / "publisher", run_id="run", owner="job", part_bytes=100) if RANK == 0 else None
    ranks = RankPublisher(one)

    def named(seed: int) -> Iterator[tuple[str, Any]]:
        yield from model.named_parameters()
        yield from extras(seed).items()

    def check(seed: int, line: str) -> None:
        """The baseline is what a gathered export holds."""
        export = Given([(n, t.full_tensor() if hasattr(t, "full_tensor") else t) for n, t in named(seed)])
        if one is not None:
            wrong = [n for n in export.specs if not np.array_equal(one.baseline.bits(n), export.bits(n))]
            print(line, "wrong:", wrong, flush=True)

    first = ranks.start(named(0))
    check(0, f"start {first.version}")
    for seed in (1, 2, 3):
        model(torch.randn(4, 7)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if seed == 2:
            fail(objects, one, ranks, named(seed))
        done = ranks.publish(named(seed))
        check(seed, f"publish {done.version} {done.changed > 0}")
    try:
        ranks.publish([(n, t[:2] if RANK == 1 and n == "plain" else t) for n, t in named(3)])
    except InputError as error:
        print("refused:", error, flush=True)
    done = ranks.publish(named(4))
    check(4, f"publish {done.version}")
    shard_bits = ranks._shards.bits["first.weight"].size
    local = dict(model.named_parameters())["first.weight"].to_local().numel()  # type: ignore[attr-defined]
    print("rows", shard_bits == local == bits_of(dict(model.named_parameters())["first.weight"].to_local()).size)  # type: ignore[attr-defined]
    dist.destroy_process_group()


def fail(objects: DiskObjects, one: Publisher | None, ranks: RankPublisher, named: Iterator[tuple[str, Any]]) -> None:
    """A store that fails once, on rank 0; all ranks hear of it."""
    put = objects.put

    def refuse(key: str, data: bytes) -> None:
        raise StoreError(f"{key}: no")

    objects.put = refuse  # type: ignore[method-assign]
    try:
        ranks.publish(named)
    except StoreError:
        print("failed", flush=True)
    objects.put = put  # type: ignore[method-assign]


main()

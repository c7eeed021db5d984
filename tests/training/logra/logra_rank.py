"""One of two ranks that train the same small model by LoGRA, in every way that ranks can share it. Run by test_logra_ranks.py."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sketched import Small, batch, logra, loss_of, small
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from groundhop.errors import ChecksumError

CASES: dict[str, dict[str, Any]] = {
    "plain activation": {"reduce_others": True},
    "plain gradient": {"reduce_others": True, "capture": "gradient"},
    "ddp activation": {},
    "ddp gradient": {"capture": "gradient"},
    "fsdp activation": {},
    "fsdp gradient": {"capture": "gradient"},
    "fsdp activation plain": {"variant": "plain", "weight_decay": 0.1},
    "fsdp activation int16": {"quantise": "int16"},
}


def run(name: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    model = small()
    if name.startswith("fsdp"):
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = logra(model, **{"others": "adamw", "others_learning_rate": 1e-2, **settings})
    wrapped: nn.Module = DistributedDataParallel(model) if name.startswith("ddp") else model
    for seed in range(3):
        rows = batch(seed).chunk(2)[dist.get_rank()]
        loss_of(wrapped, rows).backward()
        optimizer.step()
        model.zero_grad()
    return whole(model)


def whole(model: Small) -> dict[str, Tensor]:
    named = ((name, weight.detach()) for name, weight in model.named_parameters())
    return {name: weight.full_tensor() if hasattr(weight, "full_tensor") else weight for name, weight in named}


def differing() -> str:
    model = small()
    optimizer = logra(model, seed=dist.get_rank())
    loss_of(model, batch(0)).backward()
    try:
        optimizer.step()
    except ChecksumError as error:
        return str(error)
    return "nothing"


def main(rank: int, root: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{root}/meet", rank=rank, world_size=2)
    found: dict[str, Any] = {name: run(name, settings) for name, settings in CASES.items()}
    torch.save({"weights": found, "said": differing()}, root / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))

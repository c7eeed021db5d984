"""Messages between the processes of a torch process group on the CPU, without pickle."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed


def gather(mine: Sequence[bytes], size: int, group: Any) -> list[bytes]:
    """What all `size` ranks of `group` hold, in rank order; all of them hold equally many messages."""
    if size == 1:
        return list(mine)
    found: list[list[bytes]] = [[] for _ in range(size)]
    for message in mine:
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in found]
        torch.distributed.all_gather(lengths, torch.tensor([len(message)]), group=group)
        room = max(1, *(int(length) for length in lengths))
        padded = torch.frombuffer(bytearray(message.ljust(room, b"\0")), dtype=torch.uint8)
        everyone = [torch.zeros(room, dtype=torch.uint8) for _ in found]
        torch.distributed.all_gather(everyone, padded, group=group)
        for rank, length, content in zip(found, lengths, everyone, strict=True):
            rank.append(content[: int(length)].numpy().tobytes())
    return [message for rank in found for message in rank]

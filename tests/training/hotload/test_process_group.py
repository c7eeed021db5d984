"""Two processes tell each other bytes of different lengths."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

RANK = """
import sys, torch.distributed as dist
from groundhop.training.hotload.receiver.process_group import gather
rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
mine = [b"", b"a" * (3 + 5 * rank)]
print(gather(mine, 2, dist.group.WORLD))
"""


@pytest.mark.slow
def test_every_rank_hears_all_messages_in_rank_order(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "meet")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=300)[0].strip() for rank in ranks]
    assert said == [str([b"", b"aaa", b"", b"aaaaaaaa"])] * 2

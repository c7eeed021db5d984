"""One real vLLM: weights in place against a server that was started on the new ones, and no server left behind."""

import asyncio
import itertools
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from groundhop.config import ServeConfig
from groundhop.serve import Servers
from groundhop.training.hotload.direct import load_checkpoint
from groundhop.training.hotload.refit import make_refitter
from groundhop.training.models import prepare

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
pytest.importorskip("vllm")

CONFIG = ServeConfig(ready_s=600, device="cpu", kv_cache_bytes=64_000_000, max_num_seqs=8)
FLIGHT = 1500
PARENT = """
import sys, time
from pathlib import Path
from groundhop.config import ServeConfig
from groundhop.serve import Servers
servers = Servers.start(Path(sys.argv[1]), ServeConfig(ready_s=600, device="cpu", kv_cache_bytes=64_000_000, max_num_seqs=8), Path(sys.argv[2]))
print(servers.urls[0], flush=True)
time.sleep(600)
"""


@dataclass
class Pair:
    """A server that started on the old weights, and one on the new; the latter belongs to a process of its own."""

    old_folder: Path
    new_folder: Path
    old: str
    new: str
    parent: "subprocess.Popen[str]"
    folder: Path


def change_some(folder: Path, target: Path, seed: int) -> None:
    """Save the model with about 5 % of each tensor's elements changed, embeddings included."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            chosen = torch.rand(tensor.shape, generator=generator) < 0.05
            tensor[chosen] += (torch.randn(tensor.shape, generator=generator) * 0.05).to(tensor.dtype)[chosen]
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder).save_pretrained(target)


def parameters(folder: Path) -> dict[str, Any]:
    """A trainer's float32 parameters, the tied head under both of its names."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {**dict(model.named_parameters()), "lm_head.weight": model.lm_head.weight}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    # One thread: two of them spend their time waiting for each other where a model is this small.
    monkey = pytest.MonkeyPatch()
    monkey.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path_factory.mktemp("live")
    old = prepare("tiny-random", folder)
    new = folder / "new"
    change_some(old, new, seed=1)
    command = [sys.executable, "-c", PARENT, str(new), str(folder / "logs-new")]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        with Servers.start(old, CONFIG, folder / "logs-old") as servers:
            assert parent.stdout is not None
            yield Pair(old, new, servers.urls[0], parent.stdout.readline().strip(), parent, folder)
    finally:
        monkey.undo()
        parent.kill()
        parent.wait()


def checksums(url: str) -> dict[str, str]:
    """VLLM's own hashes of its parameters."""
    answer = httpx.post(f"{url}/weight_checker", json={"action": "checksum"}, trust_env=False, timeout=60)
    return answer.raise_for_status().json()["checksums"]


async def generate(url: str, tokens: int, prompt: list[int] | None = None) -> dict[str, Any]:
    """Greedy tokens with their log-probabilities and weight versions."""
    settings = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "logprobs": 0}
    body = {"model": "policy", "token_ids": prompt or list(range(20, 60)), "sampling_params": settings}
    async with httpx.AsyncClient(trust_env=False, timeout=500) as client:
        answer = await client.post(f"{url}/inference/v1/generate", json=body)
    return answer.raise_for_status().json()["choices"][0]


def test_new_weights_reach_a_running_server_bit_for_bit(pair: Pair) -> None:
    """A request in flight survives, its spans name both versions, and afterwards all equals a fresh server."""

    async def scenario() -> tuple[dict[str, Any], Any]:
        named = parameters(pair.new_folder)
        refitter = make_refitter([pair.old], pair.folder / "refits", pair.old_folder)
        flying = asyncio.create_task(generate(pair.old, FLIGHT))
        await asyncio.wait([flying, asyncio.create_task(until_busy(pair.old))], return_when=asyncio.FIRST_COMPLETED)
        result = await refitter.refit(named.items())
        return await flying, result

    before = checksums(pair.old)
    flown, result = asyncio.run(scenario())
    assert (result.version, 0 < result.changed < 0.06 * result.total) == ("1", True)
    assert len(flown["token_ids"]) == FLIGHT
    spans = flown["weight_versions"]
    assert [span["version"] for span in spans] == ["default", "0", "1"]
    assert (spans[0]["start"], spans[-1]["end"]) == (0, FLIGHT)
    assert all(left["end"] == right["start"] for left, right in itertools.pairwise(spans))
    assert before != checksums(pair.old) == checksums(pair.new)
    # What was sampled after the change is what a server of the new weights says after the same tokens.
    prompt = list(range(20, 60))
    for tokens in (prompt, prompt + flown["token_ids"][: spans[-1]["start"]]):
        ours, theirs = asyncio.run(generate(pair.old, 64, tokens)), asyncio.run(generate(pair.new, 64, tokens))
        assert ours["token_ids"] == theirs["token_ids"]
        assert ours["logprobs"] == theirs["logprobs"]


async def until_busy(url: str) -> None:
    """Return when the server has a request running."""
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        while True:
            lines = (await client.get(f"{url}/metrics")).text.splitlines()
            if any(line.startswith("vllm:num_requests_running") and float(line.split()[-1]) > 0 for line in lines):
                return


def test_a_server_on_another_base_is_healed_by_the_whole_checkpoint(pair: Pair) -> None:
    """A delta that builds on weights which the server does not hold is refused, and the right ones still arrive."""
    asyncio.run(load_checkpoint([pair.old], pair.new_folder, 30))
    third = pair.folder / "third"
    change_some(pair.old_folder, third, seed=3)
    refitter = make_refitter([pair.old], pair.folder / "other-refits", pair.old_folder)
    result = asyncio.run(refitter.refit(parameters(third).items()))
    healed = checksums(pair.old)
    asyncio.run(load_checkpoint([pair.old], third, 33))
    assert (healed, result.version) == (checksums(pair.old), "1")
    assert asyncio.run(generate(pair.old, 4))["weight_versions"] == [{"version": "33", "start": 0, "end": 4}]


def test_a_server_switches_between_checkpoints(pair: Pair) -> None:
    asyncio.run(load_checkpoint([pair.old], pair.old_folder, 40))
    first = checksums(pair.old)
    asyncio.run(load_checkpoint([pair.old], pair.new_folder, 41))
    assert first != checksums(pair.old) == checksums(pair.new)


def test_no_server_outlives_a_parent_killed_with_9(pair: Pair) -> None:
    """Runs last: it takes the second server down."""
    servers = psutil.Process(pair.parent.pid).children(recursive=True)
    assert len(servers) >= 2
    pair.parent.send_signal(signal.SIGKILL)
    pair.parent.wait()
    _, alive = psutil.wait_procs(servers, timeout=20)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]

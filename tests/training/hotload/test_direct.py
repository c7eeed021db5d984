"""A publisher and its replicas without a control plane: all on the same bits, or out of service, never stuck."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import FakeVllm, Network, digest_of, tear
from plain_states import arrays_of, state
from small_states import changed, write_folder

from groundhop.errors import ServerError
from groundhop.training.hotload.checkpoint import open_checkpoint
from groundhop.training.hotload.direct import DirectFleet, load_checkpoint
from groundhop.training.hotload.publisher import Publisher
from groundhop.training.hotload.replica import RESET_TRIES
from groundhop.training.hotload.store.objects import open_objects


class Site:
    """Two servers, a store, and a publisher that has published what the servers started on."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.now = state()
        self.folder = folder
        self.servers = {"a": FakeVllm(self.now), "b": FakeVllm(self.now)}
        self.network = Network(self.servers)
        self.options = options
        self.publisher = self.start()

    def start(self) -> Publisher:
        objects = open_objects(self.folder / "store")
        urls = [f"http://{name}" for name in self.servers]
        fleet = DirectFleet(urls, {}, self.folder / "fleet", objects, client=self.network.client, **self.options)
        publisher = Publisher(objects, self.folder / "publisher", fleet, run_id="run", owner="me")
        publisher.start(arrays_of(self.now))
        return publisher

    def publish(self, seed: int) -> Any:
        self.now = changed(self.now, seed=seed)
        return self.publisher.publish(arrays_of(self.now))

    @property
    def same(self) -> bool:
        """Whether all servers hold what was published last, and run."""
        held = {digest_of(server.weights) for server in self.servers.values()}
        return held == {digest_of(self.now)} and all(server.paused is None for server in self.servers.values())


def test_versions_reach_all_replicas_bit_for_bit(tmp_path: Path) -> None:
    site = Site(tmp_path)
    for seed in range(3):
        published = site.publish(seed)
        assert site.same
        assert {server.label for server in site.servers.values()} == {str(published.version)}
    assert all(server.counts["groundhop_load"] == 0 for server in site.servers.values())


def test_the_order_is_pause_write_cache_label_resume(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.publish(1)
    site.servers["a"].calls.clear()
    site.publish(2)
    wanted = ("/pause", "groundhop_apply", "/reset_prefix_cache", "/update_weight_version", "/resume")
    assert [call for call in site.servers["a"].calls if call in wanted] == list(wanted)


def test_a_replica_with_other_weights_gets_the_whole_checkpoint(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.publish(1)
    site.servers["b"].restart()
    site.publish(2)
    assert site.same
    assert [server.counts["groundhop_load"] for server in site.servers.values()] == [0, 1]


def test_a_write_that_breaks_off_is_mended_at_once(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.servers["b"].faults["groundhop_apply"] = tear
    site.publish(1)
    assert site.same


def test_a_replica_that_cannot_be_mended_serves_nobody_and_the_next_version_does_mend_it(tmp_path: Path) -> None:
    site = Site(tmp_path)
    broken = site.servers["b"]
    broken.faults["groundhop_apply"] = broken.faults["groundhop_load"] = lambda server: (
        200,
        {"results": [{"ok": False, "error": "no", "digest": ""}]},
    )
    broken.weights.bits("model.scales")[0] ^= 1
    with pytest.raises(ServerError, match="worker 0: no"):
        site.publish(1)
    assert [asyncio.run(_complete(site, name)) for name in site.servers] == [503, 503]
    broken.faults.clear()
    site.publish(2)
    assert site.same
    assert [asyncio.run(_complete(site, name)) for name in site.servers] == [200, 200]


async def _complete(site: Site, host: str) -> int:
    async with site.network.client() as client:
        answer = await client.post(f"http://{host}/v1/completions", json={"prompt": "x"})
        return int(answer.status_code)


def test_a_cache_that_is_not_reset_while_busy_is_asked_again(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.servers["a"].faults["/reset_prefix_cache"] = lambda server: (
        (200, {"success": False}) if server.counts["/reset_prefix_cache"] < 3 else None
    )
    site.publish(1)
    assert (site.same, site.servers["a"].counts["/reset_prefix_cache"]) == (True, 3)


def test_a_version_is_not_announced_with_a_stale_cache(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.servers["a"].faults["/reset_prefix_cache"] = lambda server: (200, {"success": False})
    with pytest.raises(ServerError, match="does not reset its prefix cache"):
        site.publish(1)
    assert (site.servers["a"].label, asyncio.run(_complete(site, "a"))) == ("default", 503)
    assert site.servers["a"].counts["/reset_prefix_cache"] == RESET_TRIES


def test_preserving_the_cache_salts_each_version_apart(tmp_path: Path) -> None:
    site = Site(tmp_path, cache="preserve")
    for seed in range(3):
        site.publish(seed)
        asyncio.run(_complete(site, "a"))
    assert (len(site.servers["a"].cache), site.servers["a"].counts["/reset_prefix_cache"]) == (3, 0)


def test_resume_is_sent_again_until_the_server_runs(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.servers["a"].faults["/resume"] = lambda server: (500, {}) if server.counts["/resume"] < 3 else None
    site.publish(1)
    assert site.same


def test_requests_in_flight_go_on_over_the_swap_and_tell_both_versions(tmp_path: Path) -> None:
    site = Site(tmp_path)
    for server in site.servers.values():
        server.outlast = "1"

    async def scenario() -> Any:
        async with site.network.client() as client:
            flying = [
                asyncio.create_task(client.post(f"http://{host}/v1/completions", json={"prompt": "x"}))
                for host in site.servers
            ]
            while not all(server.flying for server in site.servers.values()):
                await asyncio.sleep(0)
            await asyncio.to_thread(site.publish, 1)
            return [(await answer).json()["weight_versions"] for answer in flying]

    for spans in asyncio.run(scenario()):
        assert [span["version"] for span in spans] == ["default", "1"]
        assert (spans[0]["start"], spans[0]["end"]) == (0, spans[1]["start"])


def test_a_publisher_that_was_started_again_goes_on(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.publish(1)
    site.publisher = site.start()
    site.publish(2)
    assert site.same
    assert all(server.counts["groundhop_load"] == 0 for server in site.servers.values())


def test_servers_switch_to_a_checkpoint_whatever_they_hold(tmp_path: Path) -> None:
    site = Site(tmp_path)
    other = changed(state(), seed=77)
    folder = write_folder(other, tmp_path / "other")
    urls = [f"http://{name}" for name in site.servers]
    digest = asyncio.run(load_checkpoint(urls, folder, 9, client=site.network.client))
    assert digest == open_checkpoint(folder).digest
    assert {(digest_of(server.weights), server.label) for server in site.servers.values()} == {(digest, "9")}

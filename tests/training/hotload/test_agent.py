"""Agents under a control plane: every replica comes to the committed bits, from wherever it was, and dirty ones serve nobody."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_vllm import FakeVllm, Reply, digest_of, tear
from plain_states import arrays_of, state
from site_of_agents import Site
from small_states import changed
from store_servers import use_s3

from groundhop.cli import main
from groundhop.errors import RefusedError
from groundhop.training.hotload.journal import Journal
from groundhop.training.hotload.store.objects import open_objects

REFUSE: Reply = (200, {"results": [{"ok": False, "error": "no", "digest": ""}]})


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Site(tmp_path) as made:
        for name in ("a", "b"):
            made.add(name)
            made.agent(name, keep_every=0)
        made.publisher.start(arrays_of(made.now))
        yield made


def test_versions_reach_all_replicas_by_deltas_alone(site: Site) -> None:
    for seed in range(3):
        published = site.publish(seed)
        site.settled()
        assert {server.label for server in site.servers.values()} == {str(published.version)}
    assert [server.counts["groundhop_load"] for server in site.servers.values()] == [0, 0]


@pytest.mark.slow
def test_versions_travel_through_a_real_s3_server(
    s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent is a process of its own, as on another machine; nothing but the bucket lies between it and the publisher."""
    use_s3(s3_server, monkeypatch)
    open_objects("s3://agents").put("ready", b"")
    with Site(tmp_path, store="s3://agents/run") as site:
        server = site.add("a")
        site.process("a")
        site.until(lambda: "a" in site.states())
        site.publisher.start(arrays_of(site.now))
        for seed in range(3):
            site.publish(seed)
        site.settled()
        assert (site.holds("a"), server.counts["groundhop_load"]) == (True, 0)
        assert not (tmp_path / "store").exists()


def test_one_that_joins_late_takes_what_it_missed_as_one_delta(site: Site) -> None:
    for seed in range(3):
        site.publish(seed)
    late = site.add("c")
    site.agent("c")
    site.settled()
    assert (late.counts["groundhop_apply"], late.counts["groundhop_load"]) == (1, 0)


def test_one_with_unknown_weights_gets_a_whole_checkpoint(site: Site) -> None:
    site.publish(1)
    late = site.add("c", changed(state(), seed=50))
    site.agent("c")
    site.settled()
    assert late.counts["groundhop_load"] == 1


def test_a_server_that_was_started_again_catches_up_as_one_delta(site: Site) -> None:
    for seed in range(4):
        site.publish(seed)
    site.settled()
    again = site.servers["b"]
    again.restart()
    again.counts.clear()
    site.settled()
    assert (again.counts["groundhop_apply"], again.counts["groundhop_load"]) == (1, 0)


def test_a_write_that_breaks_off_is_repaired(site: Site) -> None:
    site.servers["b"].faults["groundhop_apply"] = tear
    site.publish(1)
    site.settled()
    assert Journal(site.folder / "agent-b" / "journal.json").record.state == "clean"


def test_a_dirty_replica_serves_nobody_until_it_is_repaired(site: Site) -> None:
    site.publish(1)
    torn = site.servers["b"]
    torn.faults["groundhop_load"] = lambda server: REFUSE

    def tear_for_good(server: FakeVllm) -> Reply:
        server.weights.bits("model.scales")[0] ^= 1
        server.dirty = True
        return REFUSE

    torn.faults["groundhop_apply"] = tear_for_good
    site.stop("b")
    site.agent("b", keep_every=0, patience_s=0.2)
    site.settled()
    with pytest.raises(Exception, match="no"):
        site.publish(2)
    site.until(lambda: site.complete("b").status_code == 503)
    torn.faults.clear()
    site.publish(3)
    site.settled()
    assert site.complete("b").status_code == 200


def test_a_version_is_not_announced_with_a_stale_cache(site: Site) -> None:
    stale = site.servers["b"]
    stale.faults["/reset_prefix_cache"] = lambda server: (
        (200, {"success": False}) if server.counts["/reset_prefix_cache"] < 8 else None
    )
    site.fleet._prompt_cache = "reset_all"
    site.publish(1)
    site.settled()
    assert stale.counts["/reset_prefix_cache"] >= 8


def test_a_newer_agent_of_the_same_replica_ends_the_older(site: Site) -> None:
    older = site.agents["a"]
    site.agent("a", keep_every=0)
    with pytest.raises(RefusedError, match="newer agent"):
        older.result(60)
    site.publish(1)
    site.settled()


def test_a_replica_that_missed_five_versions_takes_them_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Site(tmp_path, offline_after_s=1.0, anchor_every=3) as site:
        for name in ("a", "b"):
            site.add(name)
            site.agent(name, keep_every=0)
        site.publisher.start(arrays_of(site.now))
        site.stop("b")
        site.until(lambda: site.states()["b"] == "offline")
        for seed in range(5):
            site.publish(seed)
        behind = site.servers["b"]
        assert digest_of(behind.weights) == digest_of(state())
        # Nobody prunes from under it what a control plane knows that it needs.
        prune = ["hotload", "prune", site.store, "--keep-anchors", "1"]
        assert [main([*prune, "--dry-run"]), main([*prune, "--control", site.control])] == [0, 0]
        counts = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith(site.store)]
        assert counts == ["4", "0"]
        site.agent("b", keep_every=0)
        site.settled()
        assert (behind.counts["groundhop_apply"], behind.counts["groundhop_load"]) == (1, 0)


def test_deltas_that_cannot_be_folded_go_one_after_another(tmp_path: Path) -> None:
    with Site(tmp_path, encoding="context") as site:
        site.add("a")
        site.agent("a", keep_every=0)
        site.publisher.start(arrays_of(site.now))
        for seed in range(3):
            site.publish(seed)
        late = site.add("c")
        site.agent("c")
        site.settled()
        assert late.counts["groundhop_load"] == 0


def test_an_engine_that_starts_on_unknown_weights_comes_back_from_the_local_checkpoint(tmp_path: Path) -> None:
    with Site(tmp_path, anchor_every=100) as site:
        server = site.add("a")
        site.agent("a", keep_every=100)
        site.publisher.start(arrays_of(site.now))
        site.until((site.folder / "agent-a" / "whole" / "weight_v000000").exists)
        site.publish(0)
        site.publish(1)
        site.settled()
        server.start = changed(state(), seed=60)
        server.restart()
        server.counts.clear()
        site.settled()
        assert (server.counts["groundhop_load"], server.counts["groundhop_apply"]) == (1, 1)


KILLS = (
    "/pause",
    "groundhop_apply",
    "groundhop_apply done",
    "/reset_encoder_cache",
    "/update_weight_version",
    "/resume",
)


@pytest.mark.slow
@pytest.mark.parametrize("place", KILLS)
def test_an_agent_killed_anywhere_comes_back_to_the_committed_bits(tmp_path: Path, place: str) -> None:
    """Kill -9 when the server is asked for `place`, before it acts or after; start the agent again."""
    with Site(tmp_path, offline_after_s=60.0) as site:
        server = site.add("a")
        site.process("a")
        site.until(lambda: site.states().get("a") == "serving")
        site.publisher.start(arrays_of(site.now))
        server.faults[place.removesuffix(" done")] = _killer(site, after=place.endswith("done"))
        site.publish(1)
        site.settled()
        assert not server.faults
        assert len({site.complete("a").status_code for _ in range(2)}) == 1
        assert Journal(site.folder / "agent-a" / "journal.json").record.state == "clean"


def _killer(site: Site, after: bool) -> Callable[[FakeVllm], Reply | None]:
    def kill(server: FakeVllm) -> Reply | None:
        server.faults.clear()
        if after:
            server.late = lambda: _again(site)
        else:
            _again(site)
        return None

    return kill


def _again(site: Site) -> None:
    site.kill("a")
    site.process("a")

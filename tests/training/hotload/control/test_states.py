"""The state machine: one row a transition, then the stories that the rows make."""

import asyncio
from pathlib import Path

import pytest
from scripted_replicas import Replica, plane_with

from groundhop.errors import RefusedError
from groundhop.training.hotload.control.replicas import WRITING, may_serve
from groundhop.training.hotload.control.wire import Current, Phase

TO_STAGED: tuple[Phase, ...] = ("fetching", "staged")
TO_PREPARED: tuple[Phase, ...] = (*TO_STAGED, "pausing", "applying", "verifying", "prepared")


@pytest.mark.parametrize(
    ("done", "event", "expected"),
    [
        ((), "fetching", "fetching"),
        ((), "failed", "serving"),
        (("fetching",), "staged", "staged"),
        (("fetching",), "failed", "serving"),
        (TO_STAGED, "failed", "serving"),
        (TO_STAGED, "pausing", "pausing"),
        (TO_STAGED, "fetching", "staged"),
        (TO_PREPARED[:3], "applying", "applying"),
        (TO_PREPARED[:3], "failed", "serving"),
        (TO_PREPARED[:4], "verifying", "verifying"),
        (TO_PREPARED[:4], "dirty", "dirty"),
        (TO_PREPARED[:5], "prepared", "prepared"),
        (TO_PREPARED[:5], "dirty", "dirty"),
        (TO_PREPARED, "dirty", "dirty"),
        (TO_PREPARED, "applying", "prepared"),
    ],
)
def test_each_report_leads_to_one_state(tmp_path: Path, done: tuple[Phase, ...], event: Phase, expected: str) -> None:
    # The other replica stays behind, so that nothing is committed.
    plane, (one, _) = plane_with(tmp_path, 2, quorum=2)
    plane.create("v1")
    task = one.task
    for phase in done:
        one.report(phase, task)
    if event == "dirty":
        one.current = Current(identity=None, clean=False, dirty_to="v1")
    one.report(event, task, error="so it goes")
    assert plane.states()["a"] == expected


@pytest.mark.parametrize("phase", TO_PREPARED)
def test_a_replica_that_beats_no_more_is_offline_from_every_state(tmp_path: Path, phase: Phase) -> None:
    plane, (one, other) = plane_with(tmp_path, 2)
    plane.create("v1")
    if phase in ("fetching", "staged"):
        one.work(phase)
    else:
        one.work(), other.work("staged"), one.work(phase)
    plane.sleep(11, other)
    assert plane.states()["a"] == "offline"


def test_all_prepared_is_committed_and_all_serving_is_completed(tmp_path: Path) -> None:
    plane, (one, other) = plane_with(tmp_path, 2)
    view = plane.serve("v1", one, other)
    assert (view.state, plane.state.head, plane.state.announced) == ("completed", "v1", "v1")
    assert plane.states() == {"a": "serving", "b": "serving"}


def test_nobody_pauses_before_all_are_staged(tmp_path: Path) -> None:
    plane, (one, other) = plane_with(tmp_path, 2)
    plane.create("v1")
    one.work()
    assert one.task is not None and one.task.action == "stage"
    other.work()
    assert one.task.action == "apply"


def test_prepared_waits_paused_for_the_others(tmp_path: Path) -> None:
    plane, (one, other) = plane_with(tmp_path, 2)
    plane.create("v1")
    one.work(), other.work(), one.work()
    assert plane.states()["a"] == "prepared"
    assert one.task is not None and (one.task.action, one.task.joint) == ("apply", True)
    assert plane.state.head is None


def test_serving_is_not_accepted_before_the_commit(tmp_path: Path) -> None:
    plane, (one, _) = plane_with(tmp_path, 2)
    plane.create("v1")
    one.current = Current(identity="v1")
    assert not one.report("serving").accepted


def test_a_failure_before_the_first_write_takes_nobody_out_of_service(tmp_path: Path) -> None:
    plane, (one, other) = plane_with(tmp_path, 2)
    plane.serve("v1", one, other)
    created = plane.create("v2", "v1")
    one.work()
    other.report("failed", error="Adler-32 of shard 1", retry=False, code="data_loss")
    view = plane.service.view_hot_load(created.hot_load_id)
    assert (view.state, view.code, view.committed) == ("failed", "data_loss", False)
    assert plane.states() == {"a": "serving", "b": "serving"}
    assert plane.state.head == "v1"


def test_a_failed_stage_is_tried_again_after_a_while_under_another_txn(tmp_path: Path) -> None:
    plane, (one,) = plane_with(tmp_path, 1)
    created = plane.create("v1")
    first = one.task
    assert first is not None
    one.report("failed", error="timed out")
    assert one.task is None
    plane.sleep(1, one)
    assert one.task is not None and one.task.txn != first.txn
    one.work(), one.work(), one.work()
    assert plane.service.view_hot_load(created.hot_load_id).state == "completed"


def test_one_that_serves_is_woken_for_its_next_try(tmp_path: Path) -> None:
    """Its agent waits for a task; without this clock it would not hear of one before its question runs out."""
    plane, (one, other) = plane_with(tmp_path, 2)
    plane.serve("v1", one, other)
    plane.create("v2", "v1")
    one.report("failed")
    assert (plane.states()["a"], one.task) == ("serving", None)
    assert plane.service.tick() == plane.state.replicas["a"].not_before


@pytest.mark.parametrize("phase", TO_PREPARED)
def test_a_repair_under_way_does_not_count_for_the_next_hot_load(tmp_path: Path, phase: Phase) -> None:
    plane, (one, other) = plane_with(tmp_path, 2)
    plane.serve("v1", one, other)
    plane.create("v2", "v1")
    one.work(), other.work(), one.work("applying")
    other.report("failed", retry=False)
    assert one.task is not None and one.task.action == "recover"
    one.work(phase)
    plane.create("v3", "v1", operation="overwrite")
    other.work()
    assert one.task.action == "stage"
    assert one.task.identity == "v3"


def test_reports_of_an_earlier_try_are_not_accepted(tmp_path: Path) -> None:
    plane, (one,) = plane_with(tmp_path, 1)
    plane.create("v1")
    first = one.task
    one.report("failed", first)
    plane.sleep(1, one)
    assert not one.report("staged", first).accepted


def test_a_dirty_replica_is_repaired_within_the_attempt(tmp_path: Path) -> None:
    plane, (one, other) = plane_with(tmp_path, 2)
    plane.serve("v1", one, other)
    created = plane.create("v2", "v1")
    one.work(), other.work(), other.work()
    one.work("applying")
    one.report("dirty", error="digest differs")
    assert plane.states() == {"a": "dirty", "b": "prepared"}
    plane.sleep(1, one, other)
    for _ in range(3):
        one.work(), other.work()
    assert plane.service.view_hot_load(created.hot_load_id).state == "completed"
    assert plane.states() == {"a": "serving", "b": "serving"}


def test_a_dirty_replica_never_serves_while_it_stages_its_repair(tmp_path: Path) -> None:
    plane, (one, other) = plane_with(tmp_path, 2)
    plane.create("v1")
    one.work(), other.work(), one.work("applying")
    one.report("dirty")
    plane.sleep(1, one, other)
    one.work("staged")
    assert not may_serve(plane.state.replicas["a"])
    assert plane.service.view("policy").replicas[0].public_state == "updating"


def test_a_replica_that_cannot_be_brought_there_fails_the_hot_load_and_all_go_back(tmp_path: Path) -> None:
    plane, (one, other) = plane_with(tmp_path, 2)
    plane.serve("v1", one, other)
    created = plane.create("v2", "v1")
    one.work(), other.work(), other.work()
    one.work("applying")
    one.report("dirty", error="no memory", retry=False)
    assert plane.service.view_hot_load(created.hot_load_id).state == "failed"
    assert (plane.state.head, plane.states()) == ("v1", {"a": "dirty", "b": "dirty"})
    plane.sleep(1, one, other)
    assert other.task is not None and (other.task.action, other.task.identity) == ("recover", "v1")
    one.work(), other.work()
    assert plane.states() == {"a": "serving", "b": "serving"}


def test_no_announcement_while_a_replica_serves_older_weights(tmp_path: Path) -> None:
    plane, (one, other) = plane_with(tmp_path, 2, quorum=1, straggler_s=5)
    plane.serve("v1", one, other)
    plane.create("v2", "v1")
    one.work()
    plane.sleep(6, one, other)
    one.work(), plane.sleep(6, one, other), one.work()
    assert (plane.state.head, plane.state.announced) == ("v2", "v1")
    assert plane.service.view("policy").salt == "v1"
    plane.sleep(6, one, other)
    other.work()
    assert plane.service.view("policy").salt == "v2"


def test_a_hot_load_without_an_answer_for_a_stale_cache_is_not_completed(tmp_path: Path) -> None:
    plane, (one,) = plane_with(tmp_path, 1, transition_mode="BARRIER")
    plane.create("v1")
    one.work(), one.work()
    task = one.task
    assert task is not None and (task.action, task.prompt_cache, task.requests) == ("commit", "reset_all", "wait")
    one.current = Current(identity="v1")
    assert not one.report("serving", cache_reset=False).accepted
    assert plane.state.announced is None
    assert one.report("serving", cache_reset=True).accepted
    assert plane.state.announced == "v1"


def test_a_quorum_commits_without_a_replica_that_went_away_and_it_comes_back_behind(tmp_path: Path) -> None:
    plane, (one, other) = plane_with(tmp_path, 2, quorum=1)
    plane.serve("v1", one, other)
    created = plane.create("v2", "v1")
    plane.sleep(11, one)
    for _ in range(3):
        one.work()
    assert plane.service.view_hot_load(created.hot_load_id).state == "completed"
    other.register()
    assert plane.states()["b"] == "recovering"
    other.work()
    assert plane.states()["b"] == "serving" and other.current.identity == "v2"


def test_a_lost_quorum_fails_the_hot_load(tmp_path: Path) -> None:
    plane, (one, other) = plane_with(tmp_path, 2, quorum=2)
    created = plane.create("v1")
    one.work(), other.work(), one.work()
    plane.sleep(11, one)
    view = plane.service.view_hot_load(created.hot_load_id)
    assert view.state == "failed" and "quorum lost: need 2 replicas, 1 left" in view.reason
    assert plane.states() == {"a": "dirty", "b": "offline"}


def test_without_a_quorum_a_dead_replica_does_not_hold_the_living_up(tmp_path: Path) -> None:
    plane, (one, other) = plane_with(tmp_path, 2)
    created = plane.create("v1")
    one.work(), other.work(), one.work()
    assert plane.states()["a"] == "prepared"
    plane.sleep(11, one)
    one.work()
    assert plane.service.view_hot_load(created.hot_load_id).state == "completed"


def test_a_replica_that_stays_away_is_struck_off_and_may_come_back(tmp_path: Path) -> None:
    plane, (one, other) = plane_with(tmp_path, 2, forget_after_s=20)
    view = plane.serve("v1", one, other)
    plane.sleep(31, one)
    assert plane.states() == {"a": "serving"}
    assert len(plane.service.view_replicas(view.hot_load_id)) == 2
    other.register()
    assert plane.states()["b"] == "serving"


def test_a_replica_that_hangs_while_writing_times_out(tmp_path: Path) -> None:
    plane, (one, other) = plane_with(tmp_path, 2, apply_timeout_s=5)
    created = plane.create("v1")
    one.work(), other.work(), one.work(), other.work("applying")
    plane.sleep(6, one, other)
    view = plane.service.view_hot_load(created.hot_load_id)
    assert view.state == "failed" and "b: not prepared 5 s after the go" in view.reason


def test_a_replica_that_joins_is_not_waited_for_and_comes_to_the_head(tmp_path: Path) -> None:
    plane, (one,) = plane_with(tmp_path, 1)
    plane.serve("v1", one)
    created = plane.create("v2", "v1")
    joiner = Replica(plane, "j").register()
    assert joiner.task is not None and (joiner.task.action, joiner.task.identity) == ("recover", "v1")
    for _ in range(3):
        one.work()
    assert plane.service.view_hot_load(created.hot_load_id).state == "completed"
    plane.sleep(1, one, joiner)
    joiner.work()
    assert joiner.current.identity == "v2"


def test_a_replica_that_lags_gets_the_whole_chain(tmp_path: Path) -> None:
    plane, (one, other) = plane_with(tmp_path, 2, quorum=1)
    plane.serve("v0", one, other)
    plane.sleep(11, one)
    for version in range(1, 6):
        plane.serve(f"v{version}", one, base=f"v{version - 1}")
    other.register()
    task = other.task
    assert task is not None and [link.identity for link in task.chain] == [f"v{version}" for version in range(6)]
    other.work()
    assert other.current.identity == "v5" and plane.states()["b"] == "serving"


def test_a_rollback_is_a_new_hot_load_of_an_older_identity(tmp_path: Path) -> None:
    plane, (one,) = plane_with(tmp_path, 1)
    plane.serve("v1", one)
    plane.serve("v2", one, base="v1")
    view = plane.serve("v1", one)
    assert (view.state, plane.state.head, one.current.identity) == ("completed", "v1", "v1")
    assert [link.identity for link in view.chain] == ["v1"]


def test_cancel_before_the_commit_leaves_the_head_and_mends_who_wrote(tmp_path: Path) -> None:
    plane, (one, other) = plane_with(tmp_path, 2)
    plane.serve("v1", one, other)
    created = plane.create("v2", "v1")
    one.work(), other.work(), one.work()
    assert plane.service.cancel(created.hot_load_id).state == "canceled"
    assert (plane.state.head, plane.states()) == ("v1", {"a": "dirty", "b": "serving"})
    one.work()
    assert plane.states()["a"] == "serving"


def test_cancel_after_the_commit_is_refused(tmp_path: Path) -> None:
    plane, (one,) = plane_with(tmp_path, 1)
    created = plane.create("v1")
    one.work(), one.work()
    with pytest.raises(RefusedError, match=r"failed_precondition: .* is committed"):
        plane.service.cancel(created.hot_load_id)


def test_two_beats_that_disagree_with_the_ledger_are_believed(tmp_path: Path) -> None:
    plane, (one,) = plane_with(tmp_path, 1)
    plane.serve("v1", one)
    one.current = Current(identity=None)
    one.beat()
    assert plane.states()["a"] == "serving"
    one.beat()
    assert plane.states()["a"] == "lagging"
    assert one.task is not None and one.task.prompt_cache == "reset_all"


def test_beats_do_not_make_a_dirty_replica_whole(tmp_path: Path) -> None:
    plane, (one, _) = plane_with(tmp_path, 2)
    plane.create("v1")
    one.work("staged"), one.report("dirty", retry=False)
    assert plane.states()["a"] == "dirty"
    plane.sleep(2, one)
    assert plane.states()["a"] == "dirty"


def test_a_replica_that_only_paused_is_whole_when_the_attempt_is_given_up(tmp_path: Path) -> None:
    plane, (one, other) = plane_with(tmp_path, 2)
    created = plane.create("v1")
    one.work(), other.work(), one.work("pausing"), other.work("applying")
    plane.service.cancel(created.hot_load_id)
    assert plane.states() == {"a": "serving", "b": "dirty"}


def test_that_a_replica_is_dirty_is_believed_at_any_time(tmp_path: Path) -> None:
    plane, (one,) = plane_with(tmp_path, 1)
    plane.serve("v1", one)
    one.current = Current(identity="v1", clean=False)
    one.report("dirty", error="the audit found other bits")
    assert plane.states()["a"] == "dirty"


def test_an_agent_that_a_newer_one_replaced_is_told_to_stop(tmp_path: Path) -> None:
    plane, (one,) = plane_with(tmp_path, 1)
    Replica(plane, "a", epoch=2).register()
    with pytest.raises(RefusedError, match=r"aborted: a newer agent of a"):
        one.beat()


def test_an_agent_that_restarts_without_end_does_not_hold_an_attempt_for_ever(tmp_path: Path) -> None:
    plane, (one,) = plane_with(tmp_path, 1)
    created = plane.create("v1")
    for epoch in range(2, 5):
        one.epoch = epoch
        one.register()
    assert plane.service.view_hot_load(created.hot_load_id).state == "failed"


@pytest.mark.parametrize("phase", [None, "fetching", "staged"])
def test_one_that_was_lost_sight_of_gets_its_task_anew(tmp_path: Path, phase: Phase | None) -> None:
    """By another key: the agent did not do what it was told, as its reports were not accepted while it was offline."""
    plane, (one,) = plane_with(tmp_path, 1, attempts=5)
    late = Replica(plane, "b")
    plane.serve("v1", one)
    late.register()
    task = late.task
    assert task is not None
    if phase:
        late.work(phase)
    plane.sleep(11, one)
    late.register()
    again = late.task
    assert again is not None
    assert (again.action, again.identity) == ("recover", "v1")
    assert again.txn != task.txn


def test_the_same_report_again_changes_nothing(tmp_path: Path) -> None:
    plane, (one, _) = plane_with(tmp_path, 2)
    plane.create("v1")
    one.work()
    count = len(plane.kinds())
    assert one.report("staged").accepted
    assert len(plane.kinds()) == count


def test_what_the_ledger_adds_up_to_is_the_state(tmp_path: Path) -> None:
    plane, (one, other) = plane_with(tmp_path, 2)
    plane.serve("v1", one, other)
    plane.serve("v2", one, other, base="v1")
    before = plane.state
    plane.restart()
    assert plane.state == before


def test_the_barrier_opens_only_when_every_live_replica_serves_with_clean_caches(tmp_path: Path) -> None:
    plane, (one, other) = plane_with(tmp_path, 2, transition_mode="BARRIER")

    def opened() -> tuple[bool, tuple[str, ...]]:
        found = asyncio.run(plane.service.barrier("policy", "v1", 0))
        return found.ready, found.waiting_for

    plane.create("v1")
    for replica in (one, other, one, other):
        replica.work()
    one.work()
    assert opened() == (False, ("b",))
    other.current = Current(identity="v1")
    other.report("serving", cache_reset=False)
    assert opened() == (False, ("b",))
    other.report("serving", cache_reset=True)
    assert opened() == (True, ())


def test_writing_states_are_never_serving_ones() -> None:
    assert not WRITING & {"serving", "lagging", "fetching", "staged"}

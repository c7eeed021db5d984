"""Who may publish what: leases, compare-and-set, replays, immutable identities, chains."""

import asyncio
from pathlib import Path

import pytest
from scripted_replicas import NAME, Plane, Replica, plane_with

from groundhop.errors import ConflictError, InputError, RefusedError, SpaceError
from groundhop.training.hotload.control.ledger import Ledger
from groundhop.training.hotload.control.records import Configured, Deployment, HotLoad
from groundhop.training.hotload.control.rules import chain_of
from groundhop.training.hotload.control.service import Service, Snapshot
from groundhop.training.hotload.control.wire import Current, DeploymentBody, HotLoadBody, LeaseBody


@pytest.fixture
def one(tmp_path: Path) -> tuple[Plane, Replica]:
    plane, (replica,) = plane_with(tmp_path, 1)
    plane.serve("v1", replica)
    return plane, replica


def test_of_two_publishers_racing_exactly_one_commits_per_head(tmp_path: Path) -> None:
    plane, (replica,) = plane_with(tmp_path, 1)
    plane.serve("v0", replica)
    won = []
    for round_ in range(5):
        head = plane.state.head
        for publisher in ("left", "right"):
            try:
                plane.serve_with(publisher, round_, head, replica)
                won.append((round_, publisher))
            except RefusedError as error:
                assert error.code == "aborted" and "rebase" in str(error)
    assert [round_ for round_, _ in won] == list(range(5))


def test_a_hot_load_that_runs_keeps_the_other_publisher_out(tmp_path: Path) -> None:
    plane, _ = plane_with(tmp_path, 1)
    plane.create("left")
    with pytest.raises(RefusedError, match=r"failed_precondition: .* already in progress"):
        plane.create("right")


def test_every_lease_has_a_higher_epoch_than_any_before(one: tuple[Plane, Replica]) -> None:
    plane, _ = one
    first = plane.service.lease(NAME, LeaseBody(owner="me"))
    again = plane.service.lease(NAME, LeaseBody(owner="me"))
    taken = plane.service.lease(NAME, LeaseBody(owner="you", take_over=True))
    assert (first.epoch, again.epoch, taken.epoch) == (1, 2, 3)


def test_epochs_never_restart(one: tuple[Plane, Replica]) -> None:
    plane, _ = one
    plane.service.lease(NAME, LeaseBody(owner="me"))
    plane.restart()
    assert plane.service.lease(NAME, LeaseBody(owner="me")).epoch == 2


def test_a_lease_is_not_taken_from_its_owner_before_it_runs_out(one: tuple[Plane, Replica]) -> None:
    plane, _ = one
    plane.service.lease(NAME, LeaseBody(owner="me", ttl_s=5))
    with pytest.raises(RefusedError, match=r"failed_precondition: publisher me holds the lease for another 5\.0 s"):
        plane.service.lease(NAME, LeaseBody(owner="you"))
    plane.time += 5
    assert plane.service.lease(NAME, LeaseBody(owner="you")).epoch == 2


def test_a_renewal_keeps_the_epoch_and_a_stale_one_is_refused(one: tuple[Plane, Replica]) -> None:
    plane, _ = one
    epoch = plane.service.lease(NAME, LeaseBody(owner="me")).epoch
    assert plane.service.lease(NAME, LeaseBody(owner="me", epoch=epoch)).epoch == epoch
    plane.service.lease(NAME, LeaseBody(owner="you", take_over=True))
    with pytest.raises(RefusedError, match="aborted: stale publisher epoch 1"):
        plane.service.lease(NAME, LeaseBody(owner="me", epoch=epoch))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"publisher_epoch": 1}, "aborted: stale publisher epoch 1: the current one is 2"),
        ({}, "aborted: publisher me holds the lease"),
        ({"publisher_epoch": 2, "expected_head": "v0"}, "aborted: expected head v0, found v1"),
        ({"publisher_epoch": 2, "base": "v9"}, "failed_precondition: unknown predecessor v9"),
        ({"publisher_epoch": 2, "identity": "initial"}, "invalid_argument: .*reserved"),
        ({"publisher_epoch": 2, "identity": "v1", "base": "v1"}, "invalid_argument: v1 cannot build on itself"),
    ],
)
def test_what_is_not_admitted(one: tuple[Plane, Replica], more: dict[str, object], message: str) -> None:
    plane, _ = one
    for _ in range(2):
        plane.service.lease(NAME, LeaseBody(owner="me"))
    with pytest.raises(RefusedError, match=message):
        plane.create(str(more.pop("identity", "v2")), **more)  # type: ignore[arg-type]


def test_a_publisher_with_epochs_of_its_own_fences_older_ones(one: tuple[Plane, Replica]) -> None:
    plane, replica = one
    plane.create("v2", "v1", publisher_epoch=7)
    for _ in range(3):
        replica.work()
    with pytest.raises(RefusedError, match="stale publisher epoch 6"):
        plane.create("v3", "v2", publisher_epoch=6)


def test_the_same_request_again_is_the_same_hot_load(one: tuple[Plane, Replica]) -> None:
    plane, replica = one
    first = plane.create("v2", "v1", hot_load_id="h2")
    assert plane.create("v2", "v1", hot_load_id="h2").hot_load_id == first.hot_load_id
    for _ in range(3):
        replica.work()
    plane.restart()
    assert plane.create("v2", "v1", hot_load_id="h2").state == "completed"


def test_the_same_id_with_another_body_is_a_conflict(one: tuple[Plane, Replica]) -> None:
    plane, _ = one
    plane.create("v2", "v1", hot_load_id="h2")
    with pytest.raises(RefusedError, match="already_exists: hot-load h2"):
        plane.create("v3", "v1", hot_load_id="h2")


def test_an_identity_never_stands_for_two_contents(tmp_path: Path) -> None:
    plane, (replica,) = plane_with(tmp_path, 1)
    plane.create("v1", digest="d1")
    replica.work(), replica.work(), replica.work()
    with pytest.raises(RefusedError, match="aborted: identity v1 already stands for other content"):
        plane.create("v1", digest="d2")
    assert plane.create("v1", digest="d1").state == "pending"


def test_what_the_store_says_of_a_snapshot_binds(tmp_path: Path) -> None:
    async def look(config: DeploymentBody, body: HotLoadBody) -> Snapshot:
        return Snapshot("i1", "d1", 3)

    service = Service(Ledger(tmp_path / "ledger"), look=look)
    service.configure(NAME, DeploymentBody())
    plane = Plane.__new__(Plane)
    plane.service, plane.time = service, 0.0
    Replica(plane, "a").register()
    with pytest.raises(RefusedError, match="aborted: digest of v1 is d1 in the store, the request says d2"):
        plane.create("v1", digest="d2")
    plane.create("v1")
    task = Replica(plane, "a").task
    assert task is not None and (task.index_sha256, task.digest, task.version) == ("i1", "d1", 3)


@pytest.mark.parametrize(("deltas", "admitted"), [(127, True), (128, False)])
def test_a_chain_has_at_most_128_deltas(one: tuple[Plane, Replica], deltas: int, admitted: bool) -> None:
    plane, _ = one
    lengthen(plane, deltas)
    if admitted:
        assert len(plane.create("next", f"d{deltas}").chain) == 129
        return
    with pytest.raises(RefusedError, match="failed_precondition: the chain would have 129 deltas, at most 128"):
        plane.create("next", f"d{deltas}")
    assert plane.create("anew").chain[0].kind == "full"


def test_without_a_live_replica_there_is_nothing_to_load(tmp_path: Path) -> None:
    plane, _ = plane_with(tmp_path, 0)
    with pytest.raises(RefusedError, match="failed_precondition: deployment policy is not ready"):
        plane.create("v1")


def test_a_delta_on_what_all_replicas_came_with_is_admitted(tmp_path: Path) -> None:
    plane = Plane(tmp_path)
    Replica(plane, "a", current=Current(identity="v5")).register()
    assert plane.create("v6", "v5", expected_head="v5").state == "pending"


def test_a_deployment_is_not_changed_under_a_hot_load(one: tuple[Plane, Replica]) -> None:
    plane, _ = one
    plane.create("v2", "v1")
    with pytest.raises(RefusedError, match="already in progress"):
        plane.service.configure(NAME, DeploymentBody(quorum=1))


def test_a_ledger_has_one_control_plane(one: tuple[Plane, Replica]) -> None:
    plane, _ = one
    with pytest.raises(ConflictError, match="another control plane has the ledger ledger open"):
        Ledger(plane.path)


def test_a_ledger_of_another_format_is_refused(one: tuple[Plane, Replica]) -> None:
    plane, _ = one
    plane.ledger._database.execute("PRAGMA user_version=99")
    plane.ledger.close()
    with pytest.raises(InputError, match="format 99"):
        Ledger(plane.path)


def test_a_full_disk_changes_nothing(one: tuple[Plane, Replica]) -> None:
    plane, _ = one
    before = plane.state
    (pages,) = plane.ledger._database.execute("PRAGMA page_count").fetchone()
    plane.ledger._database.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(SpaceError, match="nothing was changed"):
        for number in range(1000):
            plane.service.lease(NAME, LeaseBody(owner=f"publisher-{number:0100d}"))
            before = plane.state
    assert plane.state == before
    plane.restart()
    assert plane.state == before


def test_a_saved_state_spares_reading_all_events(one: tuple[Plane, Replica], monkeypatch: pytest.MonkeyPatch) -> None:
    plane, _ = one
    monkeypatch.setattr("groundhop.training.hotload.control.ledger.SAVE_EVERY", 5)
    for _ in range(12):
        plane.service.lease(NAME, LeaseBody(owner="me"))
    before, events = plane.state, len(plane.kinds())
    (saved,) = plane.ledger._database.execute("SELECT sequence FROM states").fetchone()
    assert events - 5 <= saved <= events
    plane.restart()
    assert plane.state == before


def lengthen(plane: Plane, deltas: int) -> None:
    """Put a chain `d1 .. dN` on v1 into the state, without the work of loading it."""
    import msgspec

    state = plane.state
    link = state.committed["v1"]
    hot_loads, committed = dict(state.hot_loads), dict(state.committed)
    pattern: HotLoad = hot_loads[link]
    base = "v1"
    for number in range(1, deltas + 1):
        identity = f"d{number}"
        body = msgspec.structs.replace(pattern.body, identity=identity, kind="delta", base=base)
        hot_loads[identity] = msgspec.structs.replace(pattern, id=identity, body=body, link=link, deltas=number)
        link = committed[identity] = identity
        base = identity
    changed: Deployment = msgspec.structs.replace(
        state, hot_loads=hot_loads, committed=committed, head=base, head_id=link
    )
    plane.service._deployments[NAME] = changed
    assert len(chain_of(changed, hot_loads[link])) == deltas + 1


def test_the_first_event_of_a_deployment_is_its_configuration(tmp_path: Path) -> None:
    plane = Plane(tmp_path)
    assert plane.kinds() == [Configured.__name__]


def test_nobody_waits_longer_than_asked(one: tuple[Plane, Replica]) -> None:
    plane, _ = one
    assert not asyncio.run(plane.service.barrier(NAME, "v2", 0.01)).ready

"""The bodies that CoreWeave's and Fireworks' clients send and read, and what people see."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_replicas import NAME, Plane, Replica, plane_with

from groundhop.training.hotload.control.app import make_app
from groundhop.training.hotload.control.wire import BODY_LIMIT

COREWEAVE = "/v1alpha1/inference"
FIREWORKS = "/hot_load/v1/models/hot_load"
DEPLOYED = {"fireworks-deployment": f"accounts/me/deployments/{NAME}", "fireworks-model": "accounts/me/models/m"}
DELTA = {
    "deploymentId": NAME,
    "hotLoadId": "1b0c6c4e-0000-4000-8000-000000000002",
    "identity": "step_2",
    "type": "SNAPSHOT_TYPE_INCREMENTAL",
    "incrementalSnapshotMetadata": {
        "previousSnapshotIdentity": "step_1",
        "compressionFormat": "COMPRESSION_FORMAT_ZSTD",
        "checksumFormat": "CHECKSUM_FORMAT_ADLER32",
    },
}
FULL = {"deploymentId": NAME, "identity": "step_1", "type": "SNAPSHOT_TYPE_FULL"}


def ask(plane: Plane, method: str, path: str, token: str | None = None, **more: Any) -> httpx.Response:
    async def once() -> httpx.Response:
        transport = httpx.ASGITransport(app=make_app(plane.service, token))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path, **more)

    return asyncio.run(once())


def settle(*replicas: Replica) -> None:
    for _ in range(3):
        for replica in replicas:
            replica.work()


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Plane, Replica, Replica]:
    plane, (one, other) = plane_with(tmp_path, 2, bucket="weights", path_prefix="run1", model="m")
    return plane, one, other


# --- CoreWeave


def test_coreweave_creates_gets_and_lists(pair: tuple[Plane, Replica, Replica]) -> None:
    plane, one, other = pair
    created = ask(plane, "POST", f"{COREWEAVE}/hotLoads", json=FULL).json()["hotLoad"]
    assert created["status"]["state"] == "HOT_LOAD_STATE_PENDING"
    settle(one, other)
    got = ask(plane, "GET", f"{COREWEAVE}/hotLoads/{created['spec']['id']}").json()["hotLoad"]
    assert got["status"]["state"] == "HOT_LOAD_STATE_COMPLETED"
    assert (
        got["spec"]
        == created["spec"]
        == {
            "id": created["spec"]["id"],
            "deploymentId": NAME,
            "identity": "step_1",
            "type": "SNAPSHOT_TYPE_FULL",
            "promptCachePolicy": "PROMPT_CACHE_POLICY_PRESERVE",
            "snapshotChain": [{"identity": "step_1", "type": "SNAPSHOT_TYPE_FULL", "hotLoadId": created["spec"]["id"]}],
        }
    )
    listed = ask(plane, "GET", f"{COREWEAVE}/hotLoads", params={"parentDeploymentId": NAME}).json()
    assert listed == {"hotLoads": [got], "nextPageToken": ""}


def test_coreweave_shows_a_delta_with_its_chain_oldest_first(pair: tuple[Plane, Replica, Replica]) -> None:
    plane, one, other = pair
    plane.serve("step_1", one, other)
    spec = ask(plane, "POST", f"{COREWEAVE}/hotLoads", json=DELTA).json()["hotLoad"]["spec"]
    assert [link["identity"] for link in spec["snapshotChain"]] == ["step_1", "step_2"]
    assert spec["incrementalSnapshotMetadata"] == DELTA["incrementalSnapshotMetadata"]


def test_coreweave_replicas_go_from_pending_over_updating_to_ready(pair: tuple[Plane, Replica, Replica]) -> None:
    plane, one, other = pair
    plane.serve("step_1", one, other)
    id_ = ask(plane, "POST", f"{COREWEAVE}/hotLoads", json=DELTA).json()["hotLoad"]["spec"]["id"]

    def seen() -> list[tuple[str, str]]:
        found = ask(plane, "GET", f"{COREWEAVE}/hotLoads/{id_}/replicas").json()["replicas"]
        return [(replica["state"], replica["currentSnapshotIdentity"]) for replica in found]

    assert seen() == [("PENDING_UPDATE", "step_1")] * 2
    one.work(), other.work(), one.work("applying")
    assert seen() == [("UPDATING", "step_1"), ("PENDING_UPDATE", "step_1")]
    one.report("verifying"), one.report("prepared"), settle(other, one)
    assert seen() == [("READY", "step_2")] * 2


def test_coreweave_is_told_of_a_running_hot_load_in_its_words(pair: tuple[Plane, Replica, Replica]) -> None:
    plane, _, _ = pair
    ask(plane, "POST", f"{COREWEAVE}/hotLoads", json=FULL)
    answer = ask(plane, "POST", f"{COREWEAVE}/hotLoads", json=FULL | {"identity": "step_9"})
    assert (answer.status_code, answer.json()["code"]) == (412, "failed_precondition")
    assert "already in progress" in answer.json()["message"]


def test_coreweave_answers_a_second_create_with_already_exists(pair: tuple[Plane, Replica, Replica]) -> None:
    plane, _, _ = pair
    body = FULL | {"hotLoadId": "1b0c6c4e-0000-4000-8000-000000000001"}
    assert ask(plane, "POST", f"{COREWEAVE}/hotLoads", json=body).status_code == 200
    answer = ask(plane, "POST", f"{COREWEAVE}/hotLoads", json=body)
    assert (answer.status_code, answer.json()["code"]) == (409, "already_exists")


def test_coreweave_deployments_say_where_to_upload(pair: tuple[Plane, Replica, Replica]) -> None:
    plane, _, _ = pair
    found = ask(plane, "GET", f"{COREWEAVE}/deployments/{NAME}").json()["deployment"]
    expected = {"bucket": "weights", "pathPrefix": "run1", "transitionMode": "TRANSITION_MODE_ASYNC"}
    assert (found["spec"]["hotLoad"], found["status"]["status"]) == (expected, "STATUS_READY")


def test_coreweave_pages_hold_what_was_asked_for(pair: tuple[Plane, Replica, Replica]) -> None:
    plane, one, other = pair
    for number in range(3):
        plane.time += 1
        plane.serve(f"v{number}", one, other)
    seen, token = [], ""
    for _ in range(3):
        page = ask(plane, "GET", f"{COREWEAVE}/hotLoads", params={"maxPageSize": 1, "pageToken": token}).json()
        seen += [one["spec"]["identity"] for one in page["hotLoads"]]
        token = page["nextPageToken"]
    assert (seen, token) == (["v2", "v1", "v0"], "")


def test_coreweave_cancels(pair: tuple[Plane, Replica, Replica]) -> None:
    plane, _, _ = pair
    id_ = ask(plane, "POST", f"{COREWEAVE}/hotLoads", json=FULL).json()["hotLoad"]["spec"]["id"]
    answer = ask(plane, "POST", f"{COREWEAVE}/hotLoads/{id_}:cancel", json={})
    assert answer.json()["hotLoad"]["status"]["state"] == "HOT_LOAD_STATE_CANCELED"


def test_coreweave_is_told_why_a_hot_load_failed(pair: tuple[Plane, Replica, Replica]) -> None:
    plane, one, _ = pair
    id_ = ask(plane, "POST", f"{COREWEAVE}/hotLoads", json=FULL).json()["hotLoad"]["spec"]["id"]
    one.report("failed", error="Adler-32 of shard 2", retry=False, code="data_loss")
    status = ask(plane, "GET", f"{COREWEAVE}/hotLoads/{id_}").json()["hotLoad"]["status"]
    assert status["state"] == "HOT_LOAD_STATE_FAILED"
    assert (status["conditions"][0]["reason"], status["conditions"][0]["message"]) == (
        "DataLoss",
        "a: Adler-32 of shard 2",
    )
    found = ask(plane, "GET", f"{COREWEAVE}/hotLoads/{id_}/replicas").json()["replicas"]
    assert [(one["state"], one["errorReason"]) for one in found] == [("READY", "Adler-32 of shard 2"), ("READY", "")]


@pytest.mark.parametrize(
    "change",
    [
        {"type": "SNAPSHOT_TYPE_UNSPECIFIED"},
        {"type": "SNAPSHOT_TYPE_FULL"},
        {"incrementalSnapshotMetadata": None},
        {"identity": "a/b"},
        {"identity": "initial"},
        {"identity": ""},
        {"unknownField": 1},
        {"promptCachePolicy": "SOMETIMES"},
        {"incrementalSnapshotMetadata": {"previousSnapshotIdentity": "step_1", "compressionFormat": 7}},
    ],
)
def test_coreweave_requests_that_are_not_valid(pair: tuple[Plane, Replica, Replica], change: dict[str, Any]) -> None:
    plane, one, other = pair
    plane.serve("step_1", one, other)
    answer = ask(plane, "POST", f"{COREWEAVE}/hotLoads", json=DELTA | change)
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_argument")


# --- Fireworks


def test_fireworks_signals_and_polls(pair: tuple[Plane, Replica, Replica]) -> None:
    plane, one, other = pair
    assert ask(plane, "POST", FIREWORKS, headers=DEPLOYED, json={"identity": "version_001"}).status_code == 200
    first = ask(plane, "GET", FIREWORKS, headers=DEPLOYED).json()["replicas"]
    assert [(one["readiness"], one["current_snapshot_identity"]) for one in first] == [(False, None)] * 2
    settle(one, other)
    found = ask(plane, "GET", FIREWORKS, headers=DEPLOYED).json()["replicas"]
    assert [(one["readiness"], one["current_snapshot_identity"]) for one in found] == [(True, "version_001")] * 2


def test_fireworks_deltas_name_their_base(pair: tuple[Plane, Replica, Replica]) -> None:
    plane, one, other = pair
    plane.serve("version_001", one, other)
    body = {
        "identity": "version_002",
        "incremental_snapshot_metadata": {
            "previous_snapshot_identity": "version_001",
            "compression_format": "arc_v2",
            "checksum_format": "alder32",
        },
        "reset_prompt_cache": "new_session",
    }
    assert ask(plane, "POST", FIREWORKS, headers=DEPLOYED, json=body).status_code == 200
    assert (plane.newest.body.base, plane.newest.body.prompt_cache) == ("version_001", "preserve")


@pytest.mark.parametrize(
    ("asked", "policy"),
    [(None, "reset_all"), (True, "reset_all"), ("all", "reset_all"), (False, "preserve"), ("none", "preserve")],
)
def test_fireworks_prompt_cache_policies(pair: tuple[Plane, Replica, Replica], asked: Any, policy: str) -> None:
    plane, _, _ = pair
    body = {"identity": "v"} if asked is None else {"identity": "v", "reset_prompt_cache": asked}
    ask(plane, "POST", FIREWORKS, headers=DEPLOYED, json=body)
    assert plane.newest.body.prompt_cache == policy


def test_fireworks_signal_again_starts_nothing_new(pair: tuple[Plane, Replica, Replica]) -> None:
    plane, one, other = pair
    for _ in range(2):
        ask(plane, "POST", FIREWORKS, headers=DEPLOYED, json={"identity": "v1"})
    settle(one, other)
    assert ask(plane, "POST", FIREWORKS, headers=DEPLOYED, json={"identity": "v1"}).json()["state"] == "completed"
    assert len(plane.state.hot_loads) == 1


def test_fireworks_sees_a_replica_in_error_with_its_target(pair: tuple[Plane, Replica, Replica]) -> None:
    plane, one, other = pair
    ask(plane, "POST", FIREWORKS, headers=DEPLOYED, json={"identity": "v1"})
    one.work(), other.work(), one.work("applying"), one.report("dirty", error="digest differs")
    found = ask(plane, "GET", FIREWORKS, headers=DEPLOYED).json()["replicas"][0]
    assert found["loading_state"] == {"stage": "error", "target_snapshot_identity": "v1"}
    assert found["readiness_reason"] == "digest differs"


# --- ours, over HTTP


def test_camel_case_names_count_as_ours(pair: tuple[Plane, Replica, Replica]) -> None:
    plane, _, _ = pair
    body = {"deploymentId": NAME, "hotLoadId": "h", "identity": "v1", "kind": "full", "promptCache": "reset_all"}
    assert ask(plane, "POST", "/v1/hot_loads", json=body).json()["prompt_cache"] == "reset_all"


def test_another_body_under_the_same_id_is_409_and_the_same_is_200(pair: tuple[Plane, Replica, Replica]) -> None:
    plane, _, _ = pair
    body = {"deployment_id": NAME, "hot_load_id": "h", "identity": "v1", "kind": "full"}
    codes = [
        ask(plane, "POST", "/v1/hot_loads", json=one).status_code for one in (body, body, body | {"identity": "v2"})
    ]
    assert codes == [201, 200, 409]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/hot_loads/none"),
        ("GET", "/v1/deployments/none"),
        ("GET", f"{COREWEAVE}/hotLoads/none"),
        ("GET", "/v1/deployments/none:barrier?identity=v"),
        ("GET", "/nothing"),
        ("POST", "/v1/hot_loads/none:cancel"),
    ],
)
def test_what_is_not_there_is_404_with_a_code(pair: tuple[Plane, Replica, Replica], method: str, path: str) -> None:
    answer = ask(pair[0], method, path)
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


def test_a_token_is_asked_for_everywhere_but_for_the_page_and_the_health(pair: tuple[Plane, Replica, Replica]) -> None:
    plane, _, _ = pair
    paths = ("/", "/health", "/v1/status", FIREWORKS, f"{COREWEAVE}/hotLoads", "/v1/hot_loads", "/nothing")
    answers = {path: ask(plane, "GET", path, token="s3cret").status_code for path in paths}
    assert answers == dict.fromkeys(paths, 401) | {"/": 200, "/health": 200}
    wrong = ask(plane, "GET", "/v1/status", token="s3cret", headers={"Authorization": "Bearer s3cre"})
    assert (wrong.status_code, wrong.json()["code"]) == (401, "unauthenticated")
    right = {"Authorization": "Bearer s3cret"}
    assert ask(plane, "GET", "/v1/status", token="s3cret", headers=right).status_code == 200


def test_without_a_token_a_page_under_another_name_gets_nothing(pair: tuple[Plane, Replica, Replica]) -> None:
    answer = ask(pair[0], "GET", "/v1/status", headers={"Host": "evil.example:8765"})
    assert (answer.status_code, answer.json()["code"]) == (403, "permission_denied")


def test_bodies_are_bounded_and_json(pair: tuple[Plane, Replica, Replica]) -> None:
    plane, _, _ = pair

    async def endless() -> Any:
        for _ in range(BODY_LIMIT // 2**16 + 2):
            yield b" " * 2**16

    kinds: dict[str, Any] = {
        "announced": {
            "content": b"{}",
            "headers": {"Content-Length": str(BODY_LIMIT + 1), "Content-Type": "application/json"},
        },
        "streamed": {"content": endless(), "headers": {"Content-Type": "application/json"}},
        "plain": {"content": b"{}", "headers": {"Content-Type": "text/plain"}},
        "cut": {"content": b'{"a": ', "headers": {"Content-Type": "application/json"}},
        "deep": {"content": b"[" * 100_000, "headers": {"Content-Type": "application/json"}},
    }
    codes = {name: ask(plane, "POST", "/v1/hot_loads", **body).json()["code"] for name, body in kinds.items()}
    assert codes == dict.fromkeys(kinds, "invalid_argument")


def test_an_error_that_nobody_foresaw_shows_nothing_of_the_machine(
    pair: tuple[Plane, Replica, Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    plane, _, _ = pair

    def broken(name: str) -> None:
        raise OSError("/home/someone/secret/ledger")

    monkeypatch.setattr(plane.service, "view", broken)
    answer = ask(plane, "GET", f"/v1/deployments/{NAME}")
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    assert "secret" not in answer.text


def test_agent_epochs_are_whole_numbers_of_any_size(tmp_path: Path) -> None:
    plane = Plane(tmp_path)
    epoch = 1_764_439_000_123_456_789
    Replica(plane, "a", epoch=epoch).register()
    params = {"deployment": NAME, "epoch": str(epoch), "have": "-", "wait_s": "0"}
    assert ask(plane, "GET", "/v1/replicas/a/task", params=params).json() == {"key": "", "task": None}


def test_a_long_poll_answers_when_the_task_comes_not_later(tmp_path: Path) -> None:
    plane, (one,) = plane_with(tmp_path, 1)

    async def both() -> tuple[Any, Any]:
        waiting = asyncio.create_task(plane.service.task(NAME, "a", 1, "", 30))
        await asyncio.sleep(0)
        from groundhop.training.hotload.control.wire import HotLoadBody

        created, _ = await plane.service.create(HotLoadBody(deployment_id=NAME, identity="v1", kind="full"))
        return await asyncio.wait_for(waiting, 5), created

    reply, created = asyncio.run(both())
    assert reply.task.hot_load_id == created.hot_load_id
    assert one.task is not None


def test_the_page_asks_no_other_machine(pair: tuple[Plane, Replica, Replica]) -> None:
    page = ask(pair[0], "GET", "/")
    assert "http" not in page.text.replace("<!doctype html>", "")
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]

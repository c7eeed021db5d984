"""Replicas: other one on failure, waiting as told, giving up with what was last said."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from groundhop.agents.http_client import ReplicaClient, RequestError
from groundhop.errors import CredentialError, ServerError

DEAD = "http://127.0.0.1:9"


class Waits(list[float]):
    """Remembers what was to be slept, and sleeps not at all."""

    async def sleep(self, seconds: float) -> None:
        self.append(seconds)


@pytest.fixture
def waits() -> Waits:
    return Waits()


def post(client: ReplicaClient, replica: int = 0) -> bytes:
    async def work() -> bytes:
        try:
            return await client.post("/p", {"a": 1}, replica=replica)
        finally:
            await client.close()

    return asyncio.run(work())


def test_a_dead_replica_is_left_for_the_next_one_at_once(
    serve: Callable[..., Any], reply_with: Callable[..., Any], waits: Waits
) -> None:
    local = serve([reply_with({"ok": 1})])
    assert post(ReplicaClient([DEAD, local.url], sleep=waits.sleep)) == b'{"ok": 1}'
    assert waits == [0.0]


def test_a_busy_server_is_given_the_time_it_asks_for(
    serve: Callable[..., Any], reply_with: Callable[..., Any], waits: Waits
) -> None:
    local = serve([reply_with({}, 429, Retry_After="2"), reply_with({}, 503, Retry_After="3"), reply_with({"ok": 1})])
    post(ReplicaClient([local.url], sleep=waits.sleep))
    assert 2 <= waits[0] <= 3
    assert 3 <= waits[1] <= 4


def test_waiting_is_capped(serve: Callable[..., Any], reply_with: Callable[..., Any], waits: Waits) -> None:
    local = serve([reply_with({}, 429, Retry_After="86400"), reply_with({"ok": 1})])
    post(ReplicaClient([local.url], sleep=waits.sleep))
    assert waits == [60.0]


def test_a_server_that_never_answers_ends_with_what_it_said(
    serve: Callable[..., Any], reply_with: Callable[..., Any], waits: Waits
) -> None:
    local = serve([reply_with(b"engine is dead", 500)])
    with pytest.raises(ServerError, match="engine is dead"):
        post(ReplicaClient([local.url], attempts=3, sleep=waits.sleep))
    assert (len(local.seen), len(waits)) == (3, 2)


@pytest.mark.parametrize(
    ("status", "error"),
    [(400, RequestError), (404, RequestError), (422, RequestError), (401, CredentialError), (403, CredentialError)],
)
def test_what_no_retry_helps_is_asked_once(
    serve: Callable[..., Any], reply_with: Callable[..., Any], waits: Waits, status: int, error: type[Exception]
) -> None:
    local = serve([reply_with({}, status)])
    with pytest.raises(error):
        post(ReplicaClient([local.url], sleep=waits.sleep))
    assert (len(local.seen), waits) == (1, [])


def test_a_client_works_in_one_event_loop_after_another(
    serve: Callable[..., Any], reply_with: Callable[..., Any]
) -> None:
    local = serve([reply_with({"ok": 1})])
    client = ReplicaClient([local.url])
    for _ in range(2):
        assert asyncio.run(client.post("/p", {}, replica=0)) == b'{"ok": 1}'

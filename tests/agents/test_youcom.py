"""You.com over the wire: requests as documented, every kind of failure in its place."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from groundhop.agents.pace import Pace
from groundhop.agents.providers import Fetched, Request, page_request, search_request
from groundhop.agents.youcom import YouProvider
from groundhop.errors import CredentialError, ProviderError

HITS = {
    "results": {
        "web": [
            {"url": "https://a.example/", "title": "A", "description": "About A", "snippets": ["one", "two"], "page_age": "2024-01-02T00:00:00", "authors": [], "favicon_url": "x"},
            {"url": "https://b.example/", "title": "B", "description": "About B", "snippets": []},
        ],
        "news": [{"url": "https://c.example/", "title": "C", "description": "About C"}],
    },
    "metadata": {"query": "x", "search_uuid": "0", "latency": 0.1},
}  # fmt: skip
PAGE = [
    {
        "url": "https://a.example/",
        "title": "A",
        "markdown": "# A\n\nSee [B](https://b.example/).",
        "html": None,
        "metadata": {},
    }
]


def fetch(url: str, request: Request, attempts: int = 3) -> tuple[Fetched, list[float]]:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def work() -> Fetched:
        provider = YouProvider("secret", url=url, requests_per_s=1000.0, attempts=attempts, sleep=sleep)
        try:
            return await provider.fetch(request)
        finally:
            await provider.close()

    return asyncio.run(work()), [w for w in waits if w > 0.1]


def test_a_search_goes_out_as_documented(serve: Callable[..., Any], reply_with: Callable[..., Any]) -> None:
    local = serve([reply_with(HITS)])
    fetch(local.url, search_request("who & what?", 5))
    (seen,) = local.seen
    assert (seen.method, seen.path) == ("GET", "/v1/search?query=who+%26+what%3F&count=5")
    assert seen.headers["x-api-key"] == "secret"


def test_results_are_ranked_with_snippets_or_the_description(
    serve: Callable[..., Any], reply_with: Callable[..., Any]
) -> None:
    got, _ = fetch(serve([reply_with(HITS)]).url, search_request("x", 10))
    assert [(f.rank, f.url, f.snippets) for f in got.results] == [
        (1, "https://a.example/", ("one", "two")),
        (2, "https://b.example/", ("About B",)),
        (3, "https://c.example/", ("About C",)),
    ]
    assert got.results[0].published == "2024-01-02T00:00:00"
    assert (got.complete, len(got.raw_sha256)) == (True, 64)


def test_no_results_are_a_complete_answer(serve: Callable[..., Any], reply_with: Callable[..., Any]) -> None:
    got, _ = fetch(serve([reply_with({"results": {}, "metadata": {}})]).url, search_request("x", 3))
    assert (got.results, got.complete) == ((), True)


def test_a_page_is_asked_for_as_documented(serve: Callable[..., Any], reply_with: Callable[..., Any]) -> None:
    local = serve([reply_with(PAGE)])
    got, _ = fetch(local.url, page_request("https://a.example/"))
    (seen,) = local.seen
    assert (seen.method, seen.path) == ("POST", "/v1/contents")
    assert (seen.body["urls"], seen.body["formats"]) == (["https://a.example/"], ["markdown"])
    assert got.page is not None
    assert (got.page.title, got.page.text) == ("A", "# A\n\nSee [B](https://b.example/).")


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"  ", b'[{"url": "u", "title": "T", "markdown": ""}]', b'[{"url": "u", "markdown": null}]']
)
def test_a_page_without_text_is_a_soft_failure_and_not_kept(
    serve: Callable[..., Any], reply_with: Callable[..., Any], body: bytes
) -> None:
    got, _ = fetch(serve([reply_with(body)]).url, page_request("u"))
    assert (got.page, got.complete) == (None, False)
    assert got.note


@pytest.mark.parametrize("status", [401, 402, 403])
def test_a_refused_key_or_an_empty_account_stops_the_run_at_once(
    serve: Callable[..., Any], reply_with: Callable[..., Any], status: int
) -> None:
    local = serve([reply_with({"error": "no"}, status)])
    with pytest.raises(CredentialError):
        fetch(local.url, search_request("x", 3))
    assert len(local.seen) == 1


def test_a_request_that_makes_no_sense_is_refused_and_not_retried(
    serve: Callable[..., Any], reply_with: Callable[..., Any]
) -> None:
    local = serve([reply_with({"detail": "bad url"}, 422)])
    got, _ = fetch(local.url, page_request("ftp://x"))
    assert (got.status, got.complete, len(local.seen)) == (422, False, 1)


def test_a_full_quota_is_waited_for_as_long_as_told(serve: Callable[..., Any], reply_with: Callable[..., Any]) -> None:
    local = serve(
        [
            reply_with({}, 429, Retry_After="7"),
            reply_with({}, 429, Retry_After="Thu, 01 Jan 2099 00:00:00 GMT"),
            reply_with(HITS),
        ]
    )
    got, waits = fetch(local.url, search_request("x", 3))
    assert got.complete
    assert 7 <= waits[0] <= 8.75
    assert max(waits) <= 120.0


@pytest.mark.parametrize("status", [500, 502, 503, 504, 408])
def test_a_failing_service_is_retried_and_then_an_infrastructure_error(
    serve: Callable[..., Any], reply_with: Callable[..., Any], status: int
) -> None:
    local = serve([reply_with(b"<html>oops</html>", status)])
    with pytest.raises(ProviderError, match=str(status)):
        fetch(local.url, search_request("x", 3))
    assert len(local.seen) == 3


def test_a_service_that_recovers_is_used(serve: Callable[..., Any], reply_with: Callable[..., Any]) -> None:
    assert fetch(serve([reply_with({}, 503), reply_with(HITS)]).url, search_request("x", 3))[0].complete


def test_a_service_that_is_gone_is_an_infrastructure_error() -> None:
    with pytest.raises(ProviderError):
        fetch("http://127.0.0.1:9", search_request("x", 3))


@pytest.mark.parametrize("body", [b"<html>login</html>", b"[1, 2]", b'{"results": 3}'])
def test_an_answer_of_another_shape_is_an_infrastructure_error(
    serve: Callable[..., Any], reply_with: Callable[..., Any], body: bytes
) -> None:
    with pytest.raises(ProviderError):
        fetch(serve([reply_with(body)]).url, search_request("x", 3))


def test_no_key_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(CredentialError):
        YouProvider("")


# ---- pace


def paced(per_second: float, burst: int, callers: int) -> list[float]:
    """When each of `callers` that come at once is let through, in seconds."""
    turns: list[float] = []

    async def sleep(seconds: float) -> None:
        turns.append(seconds)

    pace = Pace(per_second, burst, clock=lambda: 100.0, sleep=sleep)

    async def work() -> None:
        for _ in range(callers):
            await pace.wait()

    asyncio.run(work())
    return [0.0] * (callers - len(turns)) + [round(t, 6) for t in turns]


def test_callers_pass_at_the_given_rate() -> None:
    assert paced(4.0, 1, 4) == [0.0, 0.25, 0.5, 0.75]


def test_a_burst_passes_at_once_and_the_rest_at_the_rate() -> None:
    assert paced(4.0, 3, 5) == [0.0, 0.0, 0.0, 0.25, 0.5]


def test_holding_stops_everybody() -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    pace = Pace(10.0, clock=lambda: 0.0, sleep=sleep)
    pace.hold(5.0)
    asyncio.run(pace.wait())
    assert slept == [5.0]

"""The replay store: many writers, one request for equal ones, failures never kept."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from groundhop.agents.providers import Fetched, Found, PageText, Request, page_request, request_hash, search_request
from groundhop.agents.replay import Mode, ReplayProvider, ReplayStore
from groundhop.errors import InputError, ProviderError


def fetched(request: Request, *, version: str = "1", text: str | None = "text", status: int = 200) -> Fetched:
    is_search = request["tool"] == "search"
    page = None if is_search or text is None else PageText(url=request["url"], title="t", text=text)
    results = (Found(rank=1, url="u", title=text or ""),) if is_search else ()
    return Fetched(
        provider="p",
        version=version,
        request=request,
        status=status,
        fetched_at=1.0,
        latency_ms=2.0,
        results=results,
        page=page,
    )


class Web:
    """Counts its requests and answers them when `gate` opens."""

    name = "p"

    def __init__(self, answer: Callable[[Request], Fetched] = fetched, version: str = "1") -> None:
        self.asked: list[Request] = []
        self.gate = asyncio.Event()
        self.version = version
        self._answer = answer

    async def fetch(self, request: Request) -> Fetched:
        self.asked.append(request)
        await self.gate.wait()
        return self._answer(request)

    async def close(self) -> None:
        pass


def ask(store: ReplayStore, mode: Mode, *requests: Request, web: Web | None = None) -> tuple[list[Any], int]:
    web = web or Web()
    web.gate.set()

    async def work() -> list[Any]:
        provider = ReplayProvider(web, store, mode)
        got = [await asyncio.gather(provider.fetch(r), return_exceptions=True) for r in requests]
        await provider.close()
        return [g[0] for g in got]

    return asyncio.run(work()), len(web.asked)


def test_fallback_asks_once_and_then_answers_from_the_store(tmp_path: Path) -> None:
    store = ReplayStore(tmp_path / "r.sqlite")
    request = search_request("x", 3)
    (first,), asked = ask(store, "fallback", request)
    (second,), again = ask(store, "fallback", request)
    assert (asked, again) == (1, 0)
    assert first == second


def test_live_always_asks_and_keeps_the_newest(tmp_path: Path) -> None:
    store = ReplayStore(tmp_path / "r.sqlite")
    _, asked = ask(store, "live", page_request("u"), page_request("u"))
    ask(store, "live", page_request("u"), web=Web(lambda r: fetched(r, text="newer")))
    assert (asked, len(store)) == (2, 1)
    kept = store.get(request_hash("p", "1", page_request("u")))
    assert kept is not None
    assert kept.page is not None
    assert kept.page.text == "newer"


def test_strict_never_asks(tmp_path: Path) -> None:
    store = ReplayStore(tmp_path / "r.sqlite")
    ask(store, "live", search_request("known", 3))
    got, asked = ask(
        store, "strict", search_request("known", 3), search_request("unknown", 3), search_request("known", 4)
    )
    assert asked == 0
    assert [type(g) for g in got] == [Fetched, ProviderError, ProviderError]


def test_another_version_of_the_index_is_another_answer(tmp_path: Path) -> None:
    store = ReplayStore(tmp_path / "r.sqlite")
    ask(store, "fallback", search_request("x", 3))
    assert ask(store, "fallback", search_request("x", 3), web=Web(version="2"))[1] == 1


def test_failures_and_unreadable_pages_are_not_kept(tmp_path: Path) -> None:
    def fail(request: Request) -> Fetched:
        raise ProviderError("503")

    store = ReplayStore(tmp_path / "r.sqlite")
    ask(store, "live", search_request("x", 3), web=Web(fail))
    ask(store, "live", page_request("empty"), web=Web(lambda r: fetched(r, text=None)))
    ask(store, "live", search_request("bad", 3), web=Web(lambda r: fetched(r, status=422)))
    assert len(store) == 0
    assert ask(store, "fallback", search_request("x", 3))[1] == 1


def test_fifty_equal_requests_are_one_request(tmp_path: Path) -> None:
    web = Web()

    async def work() -> list[Fetched]:
        provider = ReplayProvider(web, ReplayStore(tmp_path / "r.sqlite"), "fallback")
        tasks = [asyncio.create_task(provider.fetch(page_request("u"))) for _ in range(50)]
        while not web.asked:
            await asyncio.sleep(0)
        tasks[0].cancel()
        web.gate.set()
        got = await asyncio.gather(*tasks[1:])
        await provider.close()
        return got

    got = asyncio.run(work())
    assert (len(web.asked), len(got), len(set(map(id, got)))) == (1, 49, 1)


def test_a_failed_shared_request_fails_for_all_and_is_asked_anew(tmp_path: Path) -> None:
    answers = iter([ProviderError("503"), None])

    def answer(request: Request) -> Fetched:
        if error := next(answers):
            raise error
        return fetched(request)

    web = Web(answer)
    web.gate.set()

    async def work() -> list[Any]:
        provider = ReplayProvider(web, ReplayStore(tmp_path / "r.sqlite"), "fallback")
        both = await asyncio.gather(*(provider.fetch(page_request("u")) for _ in range(2)), return_exceptions=True)
        return [*both, await provider.fetch(page_request("u"))]

    got = asyncio.run(work())
    assert [type(g) for g in got] == [ProviderError, ProviderError, Fetched]
    assert len(web.asked) == 2


def test_the_key_order_of_a_request_does_not_matter() -> None:
    assert request_hash("p", "1", {"a": 1, "b": 2}) == request_hash("p", "1", {"b": 2, "a": 1})
    assert request_hash("p", "1", {"a": 1}) != request_hash("q", "1", {"a": 1})


def test_a_file_that_is_no_store_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    path.write_bytes(b"something else entirely, long enough for a header" * 30)
    with pytest.raises(InputError, match=r"r\.sqlite"):
        ReplayStore(path)


WRITER = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from groundhop.agents.providers import Fetched, PageText, page_request
from groundhop.agents.replay import ReplayStore
store, me = ReplayStore(Path(sys.argv[1])), sys.argv[2]
def put(n):
    request = page_request(f"http://h.example/{me}/{n}")
    page = PageText(url=request["url"], title="t", text=f"page {me} {n} " * 50)
    store.put(Fetched(provider="p", version="1", request=request, status=200, fetched_at=1.0, latency_ms=1.0, page=page))
with ThreadPoolExecutor(16) as pool:
    list(pool.map(put, range(int(sys.argv[3]))))
"""


def test_two_processes_of_sixteen_writers_lose_no_page_while_a_third_reads(tmp_path: Path) -> None:
    path, pages = tmp_path / "r.sqlite", 2000
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = [subprocess.Popen([*command, name, str(pages)], stderr=subprocess.PIPE) for name in ("a", "b")]
    store = ReplayStore(path)
    sizes = [len(store)]
    while any(w.poll() is None for w in writers):
        sizes.append(len(store))
    assert [w.communicate()[1] for w in writers] == [b"", b""]
    assert sizes == sorted(sizes)
    assert store.check() == "ok"
    assert sum(1 for answer in store if answer.page) == 2 * pages

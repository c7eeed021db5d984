import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import Any

import pytest

from groundhop.agents.http_client import ReplicaClient
from groundhop.config import QuestionsConfig
from groundhop.errors import ConfigError, CredentialError, ServerError
from groundhop.pipeline.chat_json import JsonModel
from groundhop.pipeline.llm_writer import LlmWriter, make_llm_writer
from groundhop.pipeline.writer import Draft, Written
from groundhop.records import Hop, Page

SEED_TEXT = "The mill guild of Ostwall sold the old pier to the railway of Varga after a long quarrel."
TARGET_TEXT = "Granite came late.\nThe town’s council — then poor — moved the lantern there in 1871.\nIt burned."
START = SEED_TEXT.index("the old pier")
HOP = Hop(
    seed="seed", target="target", anchor="the old pier", anchor_start=START, anchor_end=START + 12,
    sentence_start=0, sentence_end=len(SEED_TEXT), seed_percentile=0.5, target_percentile=0.5,
)  # fmt: skip
DRAFTED = {
    "question": "In which year did the council move the lantern to the pier that the guild sold?",
    "answer": "1871", "kind": "date", "aliases": ["the year 1871"],
    "evidence": "The town's council - then poor - moved the lantern there in 1871.", "find": ["council lantern", "1871"],
}  # fmt: skip
OBFUSCATED = {
    "question": "In which year did the council move its lantern to the structure that the mill guild of Ostwall sold to a railway?",
    "search": "mill guild of Ostwall sold to railway",
}
CHECKED = {"answer": "in 1871", "needs_both": True, "unique": True, "clear": True, "problem": ""}

Reply = tuple[int, dict[str, str], bytes]


def says(value: object, finish: str = "stop", tokens: int = 10) -> Reply:
    content = value if isinstance(value, str) or value is None else json.dumps(value)
    body = {
        "choices": [{"message": {"role": "assistant", "content": content}, "finish_reason": finish}],
        "usage": {"prompt_tokens": tokens, "completion_tokens": 1},
    }
    return 200, {}, json.dumps(body).encode()


def fails(status: int, body: str = "", **headers: str) -> Reply:
    return status, {name.replace("_", "-"): value for name, value in headers.items()}, body.encode()


@dataclass
class Server:
    """A chat-completions endpoint that answers from a script and remembers what it was asked."""

    script: list[Reply]
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


@contextmanager
def serving(*script: Reply) -> Iterator[Server]:
    server = Server(list(script))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            server.paths.append(self.path)
            server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, headers, body = server.script.pop(0) if server.script else fails(500, "script is over")
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.port = httpd.server_address[1]
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def page(key: str, title: str, text: str) -> Page:
    return Page(url=f"https://{key}", key=key, host="a.example", title=title, text=text, digest="")


def write(server: Server, attempts: int = 4, waits: list[float] | None = None) -> Written:
    async def sleep(seconds: float) -> None:
        if waits is not None:
            waits.append(seconds)

    async def main() -> Written:
        client = ReplicaClient([f"http://127.0.0.1:{server.port}/v1"], attempts=attempts, sleep=sleep)
        writer = LlmWriter(JsonModel(client, "big-model", 0.7, 500))
        try:
            return await writer.write(
                HOP, page("seed", "Guild", SEED_TEXT), page("target", "Old pier - Site", TARGET_TEXT), Random(0)
            )
        finally:
            await client.close()

    return asyncio.run(main())


def only_draft(written: Written) -> Draft:
    (draft,) = written.drafts
    return draft


def reason(*script: Reply) -> str:
    with serving(*script) as server:
        (refusal,) = write(server).refusals
        return refusal.reason


def test_three_turns_make_a_grounded_draft() -> None:
    with serving(says(DRAFTED), says(OBFUSCATED), says(CHECKED)) as server:
        written = write(server)
    draft = only_draft(written)
    assert draft.question == OBFUSCATED["question"]
    assert (
        TARGET_TEXT[draft.evidence_start : draft.evidence_end]
        == "The town’s council — then poor — moved the lantern there in 1871."
    )
    assert TARGET_TEXT[draft.answer_start : draft.answer_end] == "1871"
    assert draft.queries == (OBFUSCATED["search"], OBFUSCATED["question"])
    assert draft.cues == ("council", "lantern") and draft.aliases == ("the year 1871",)
    assert written.tokens == 33


def test_the_endpoint_is_asked_for_strict_json_in_one_conversation_and_a_fresh_check() -> None:
    with serving(says(DRAFTED), says(OBFUSCATED), says(CHECKED)) as server:
        write(server)
    draft, obfuscate, check = server.bodies
    assert server.paths == ["/v1/chat/completions"] * 3
    schema = draft["response_format"]["json_schema"]
    assert schema["strict"] is True and schema["schema"]["additionalProperties"] is False
    assert set(schema["schema"]["required"]) == set(DRAFTED)
    assert [message["role"] for message in obfuscate["messages"]] == ["user", "assistant", "user"]
    assert [message["role"] for message in check["messages"]] == ["user"]
    assert DRAFTED["question"] not in json.dumps(check["messages"])
    assert "[[the old pier]]" in draft["messages"][0]["content"] and "$" not in draft["messages"][0]["content"]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ([says(DRAFTED | {"evidence": "The town's council moved the lantern there in 1872."})], "ungrounded"),
        ([says(DRAFTED | {"evidence": "1871"})], "ungrounded"),
        ([says(DRAFTED | {"answer": "1872"})], "answer_not_in_evidence"),
        (
            [
                says(DRAFTED),
                says(OBFUSCATED | {"question": "According to the text, when did the Ostwall council move?"}),
            ],
            "not_selfcontained",
        ),
        (
            [
                says(DRAFTED),
                says(OBFUSCATED | {"question": "In which year did Ostwall move a lantern to the old pier?"}),
            ],
            "names_target",
        ),
        ([says(DRAFTED), says(OBFUSCATED), says(CHECKED | {"answer": "1890"})], "self_check"),
        ([says(DRAFTED), says(OBFUSCATED), says(CHECKED | {"answer": ""})], "self_check"),
        ([says(DRAFTED), says(OBFUSCATED), says(CHECKED | {"needs_both": False})], "self_check"),
        ([says(DRAFTED), says(OBFUSCATED), says(CHECKED | {"unique": False})], "self_check"),
        ([says("I can't."), says("I can't."), says("I can't.")], "unreadable"),
        ([says(json.dumps(DRAFTED)[:60], "length")] * 3, "unreadable"),
        ([says(DRAFTED | {"aliases": None})] * 3, "unreadable"),
        ([says({name: DRAFTED[name] for name in DRAFTED if name != "evidence"})] * 3, "unreadable"),
        ([says(None)] * 3, "unreadable"),
    ],
)
def test_what_the_pages_do_not_bear_out_is_refused_with_its_reason(script: list[Reply], expected: str) -> None:
    assert reason(*script) == expected


def test_an_unreadable_reply_is_told_so_and_asked_again_under_another_seed() -> None:
    fenced = f"<think>or {{}}</think>Here:\n```json\n{json.dumps(DRAFTED)}\n```"
    with serving(says("no JSON at all"), says(fenced), says(OBFUSCATED), says(CHECKED)) as server:
        written = write(server)
    assert only_draft(written).answer == "1871" and written.tokens == 44
    first, second = server.bodies[:2]
    assert second["messages"][-1]["content"].startswith("That reply cannot be used")
    assert first["seed"] != second["seed"]


def test_busy_and_broken_servers_are_asked_again_and_waited_for_as_they_say() -> None:
    waits: list[float] = []
    script = (fails(429, Retry_After="7"), fails(503), says(DRAFTED), says(OBFUSCATED), fails(500), says(CHECKED))
    with serving(*script) as server:
        only_draft(write(server, waits=waits))
    assert 7 <= waits[0] <= 9 and len(waits) == 3


def test_a_server_that_knows_no_schemas_is_asked_without() -> None:
    script = (fails(400, "unknown field response_format"), says(DRAFTED), says(OBFUSCATED), says(CHECKED))
    with serving(*script) as server:
        only_draft(write(server))
    assert ["response_format" in body for body in server.bodies] == [True, False, False, False]


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ([fails(503)] * 9, ServerError),
        ([fails(404, "no such model")], ServerError),
        ([(200, {}, b"<html>")], ServerError),
        ([(200, {}, b"[]")], ServerError),
        ([fails(401, "bad key")], CredentialError),
    ],
)
def test_failures_of_the_server_are_not_taken_for_the_models(script: list[Reply], error: type[Exception]) -> None:
    with serving(*script) as server, pytest.raises(error):
        write(server)


def test_a_writer_needs_an_address_a_model_and_a_key() -> None:
    def make(**fields: str) -> Callable[[], LlmWriter]:
        return lambda: make_llm_writer(QuestionsConfig(writer="llm", llm_key_env="GROUNDHOP_TEST_ABSENT", **fields))

    with pytest.raises(ConfigError, match="llm_model"):
        make(llm_url="http://127.0.0.1:1/v1")()
    with pytest.raises(CredentialError, match="GROUNDHOP_TEST_ABSENT"):
        make(llm_url="https://host.example/v1", llm_model="m")()
    assert make(llm_url="http://127.0.0.1:1/v1", llm_model="m")().name == "llm"

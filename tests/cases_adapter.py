"""The project's functions under the names that row fixtures of failure cases are checked through."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from groundhop.agents.toolcalls import parse_calls
from groundhop.judges.parse import verdict_in
from groundhop.pipeline.decontam import contaminated as overlap
from groundhop.pipeline.encoding import decode
from groundhop.pipeline.extract import extract
from groundhop.pipeline.links import anchors, parse_html
from groundhop.pipeline.llm_json import parse_fields
from groundhop.pipeline.quotes import ground
from groundhop.pipeline.robots import parse_robots
from groundhop.pipeline.urls import url_key as key_of
from groundhop.pipeline.warc import Stored
from groundhop.pipeline.warc import read_warc as read_records
from groundhop.training.hotload import commands, zstd_frames
from groundhop.training.hotload.checkpoint import open_checkpoint


def parse_tool_calls(raw_text: str, finish_reason: str) -> list[dict[str, Any]]:
    """The calls of one assistant text. Raises: MalformedCallError, a ValueError."""
    return [{"name": call.name, "arguments": call.arguments} for call in parse_calls(raw_text, finish_reason)]


def judge_verdict(judge_text: str) -> str:
    """`yes`, `no` or `unparsed`."""
    return verdict_in(judge_text)


def quote_grounded(page_text: str, quote: str) -> bool:
    """Whether the quotation stands on the page, typography aside."""
    return ground(page_text, quote) is not None


def parse_llm_json(raw: str, finish_reason: str | None) -> dict[str, Any]:
    """The object of a question writer's reply. Raises: InputError, a ValueError, unless it is whole."""
    return parse_fields(raw, finish_reason, ("question", "answer"))


def contaminated(candidate: str, benchmark_question: str, benchmark_answer: str) -> bool:
    """Whether the candidate repeats a benchmark item."""
    return overlap(candidate, benchmark_question, benchmark_answer) is not None


def robots_allowed(robots_bytes: bytes, user_agent: str, url: str) -> bool:
    """Whether a robots file lets the crawler fetch the address."""
    return parse_robots(robots_bytes).allows(user_agent, url)


def robots_delay(robots_bytes: bytes, user_agent: str) -> float | None:
    """The file's Crawl-delay for the crawler, in seconds."""
    return parse_robots(robots_bytes).delay_s(user_agent)


def url_key(url: str) -> str:
    """The name of the page behind an address."""
    return key_of(url)


def extract_links(html: str, page_url: str) -> Iterator[tuple[str, bool]]:
    """Address and nofollow of each link."""
    root = parse_html(html)
    return iter(()) if root is None else ((anchor.url, anchor.nofollow) for anchor in anchors(root, page_url))


def page_text(body_bytes: bytes, content_type: str | None) -> str:
    """The main text of a page; empty where there is none."""
    found = extract(decode(body_bytes, content_type).text, "http://page.example/")
    return "" if found is None else found.text


def read_warc(path: str) -> dict[str, bytes]:
    """The decoded bodies of a file's whole pages."""
    return {stored.url: stored.body for stored in read_records(Path(path)) if isinstance(stored, Stored)}


def zstd_decode(data: bytes) -> bytes:
    """The content of all frames. Raises: InputError, a ValueError, unless they are whole and nothing follows."""
    return zstd_frames.decode(data, limit=2**24)


def apply_delta(base_path: str, target_path: str) -> dict[str, bytes]:
    """The tensors' bytes of the base after the delta to the target."""
    with tempfile.TemporaryDirectory() as work:
        delta, out = Path(work, "step.delta"), Path(work, "out.safetensors")
        commands.diff(Path(base_path), Path(target_path), delta)
        commands.apply(Path(base_path), delta, out)
        moved = open_checkpoint(out)
        return {name: moved.bits(name).tobytes() for name in moved.specs}

"""How much of vLLM's speed is left through the agent: tokens a second of 16 rollouts against the same requests sent bare.

Both sides send the same prompts and sample the same number of tokens; the agent also renders templates, reads calls,
searches the index, keeps the replay store and writes ids, masks and log-probabilities. Runs alternate, the server's
prefix cache is emptied between them, and medians are compared. Each rollout makes `--calls` tool calls whatever the
model says, so that a model which cannot search yet is measured like one that can.

    python bench/agent_overhead.py --run runs/demo                 starts a server of the demo's model itself
    python bench/agent_overhead.py --run RUN --url http://127.0.0.1:8000 --model-folder MODEL
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from groundhop.agents.chat import Call, Reply, TokenRecord
from groundhop.agents.index import LocalIndex
from groundhop.agents.loop import Budget, solve
from groundhop.agents.model import TokenModel, make_token_model
from groundhop.agents.tokens import GENERATE_PATH
from groundhop.agents.tools import make_toolbox
from groundhop.config import SearchConfig, ServeConfig
from groundhop.serve import Servers
from groundhop.training.models import prepare

GOAL = 0.9


@dataclass
class Sent:
    """One request of a rollout and how many tokens it brought."""

    ids: list[int]
    tokens: int


class Driven:
    """A policy that samples for real and then calls tools by plan."""

    def __init__(self, model: TokenModel, calls: int, pages: Sequence[tuple[str, str]]) -> None:
        self.model, self.calls, self.pages = model, calls, pages
        self.context = model.context
        self.sent: dict[int, list[Sent]] = {}

    def open(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], *, seed: int
    ) -> "DrivenSession":
        """Begin a conversation that follows the plan."""
        return DrivenSession(self, self.model.open(messages, tools, seed=seed), seed)


class DrivenSession:
    """A session whose turns end in a search, a visit, and so on, and at last in an answer."""

    def __init__(self, driven: Driven, session: Any, seed: int) -> None:
        self.driven, self.session, self.seed = driven, session, seed
        self.turns = 0
        self.size = session.size

    async def reply(self, new: Sequence[dict[str, Any]], *, limit: int, tools: bool) -> Reply:
        """Sample a turn; say what the plan says."""
        got = await self.session.reply(new, limit=limit, tools=tools)
        record: TokenRecord = self.session.record()
        ids = list(record.ids[: len(record.ids) - got.completion_tokens])
        self.driven.sent.setdefault(self.seed, []).append(Sent(ids, got.completion_tokens))
        self.turns += 1
        if self.turns > self.driven.calls:
            return Reply("Exact Answer: x", prompt_tokens=got.prompt_tokens, completion_tokens=got.completion_tokens)
        title, url = self.driven.pages[(self.seed * 7 + self.turns) % len(self.driven.pages)]
        call = (
            Call("c", "search", {"queries": [title]})
            if self.turns % 2
            else Call("c", "visit", {"url": url, "find": title})
        )
        return Reply("", (call,), prompt_tokens=got.prompt_tokens, completion_tokens=got.completion_tokens)

    def record(self) -> TokenRecord:
        """What was really sampled."""
        return self.session.record()


async def through_agent(driven: Driven, toolbox: Any, options: argparse.Namespace) -> float:
    """Tokens a second of all rollouts through the loop."""
    driven.sent.clear()
    gate = asyncio.Semaphore(options.concurrency)
    budget = Budget(options.calls + 1, driven.context, options.turn_tokens, 3600.0)

    async def one(number: int) -> int:
        title, _ = driven.pages[number % len(driven.pages)]
        async with gate:
            got = await solve(
                f"What does the page about {title} say?", model=driven, toolbox=toolbox, budget=budget, seed=number,
                question_id=str(number), repeat=0, policy="bench",
            )  # fmt: skip
        assert got.stop == "answered", (got.stop, got.error)
        return got.usage.completion_tokens

    start = time.perf_counter()
    tokens = sum(await asyncio.gather(*(one(n) for n in range(options.rollouts))))
    return tokens / (time.perf_counter() - start)


async def bare(url: str, sent: dict[int, list[Sent]], options: argparse.Namespace) -> float:
    """Tokens a second of the same requests, nothing done between them."""
    gate = asyncio.Semaphore(options.concurrency)
    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:

        async def one(number: int) -> int:
            tokens = 0
            async with gate:
                for request in sent[number]:
                    sampling = {
                        "temperature": 1.0, "top_p": 1.0, "seed": number, "max_tokens": request.tokens,
                        "min_tokens": request.tokens, "ignore_eos": True, "detokenize": False, "logprobs": 0,
                    }  # fmt: skip
                    body = msgspec.json.encode({"token_ids": request.ids, "sampling_params": sampling})
                    answer = await client.post(
                        url + GENERATE_PATH, content=body, headers={"Content-Type": "application/json"}
                    )
                    answer.raise_for_status()
                    tokens += len(msgspec.json.decode(answer.content)["choices"][0]["token_ids"])
            return tokens

        start = time.perf_counter()
        tokens = sum(await asyncio.gather(*(one(n) for n in sorted(sent))))
        return tokens / (time.perf_counter() - start)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Alternate both sides."""
    model = make_token_model(
        [options.url], options.model_folder, temperature=1.0, top_p=1.0, max_model_len=options.context
    )
    index = LocalIndex(options.index)
    pages = sorted({(hit.title, hit.url) for word in ("the", "of", "and") for hit in index.search(word, 64)})
    driven = Driven(model, options.calls, pages)
    agent, plain = [], []
    with tempfile.TemporaryDirectory() as folder:
        toolbox = make_toolbox(
            SearchConfig(replay="live"), options.index, Path(folder) / "r.sqlite", model.count, model.control_tokens
        )
        await through_agent(driven, toolbox, options)
        for _ in range(options.repeats):
            await forget_prefixes(options.url)
            agent.append(await through_agent(driven, toolbox, options))
            await forget_prefixes(options.url)
            plain.append(await bare(options.url, driven.sent, options))
        await toolbox.close()
    await model.close()
    ratio = statistics.median(agent) / statistics.median(plain)
    requests = sum(len(own) for own in driven.sent.values())
    return {
        "agent_tokens_per_s": [round(v, 1) for v in agent],
        "bare_tokens_per_s": [round(v, 1) for v in plain],
        "ratio": round(ratio, 3),
        "goal": GOAL,
        "rollouts": options.rollouts,
        "concurrency": options.concurrency,
        "requests": requests,
    }


async def forget_prefixes(url: str) -> None:
    """Empty the server's prefix cache, or the second side would start with the first one's work done."""
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
        answer = await client.post(url + "/reset_prefix_cache")
        answer.raise_for_status()


def main() -> None:
    """Read the options, print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, type=Path, help="a run whose pages/index the tools search")
    parser.add_argument("--url", help="a running vLLM server, without /v1; else one is started")
    parser.add_argument("--model-folder", type=Path, help="its tokenizer and chat template")
    parser.add_argument("--rollouts", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--turn-tokens", type=int, default=64)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    options.index = options.run / "pages" / "index"
    options.model_folder = options.model_folder or prepare("smollm2-135m-instruct", Path("models"))
    with contextlib.ExitStack() as stack:
        if options.url is None:
            config = ServeConfig(max_model_len=options.context)
            servers = stack.enter_context(Servers.start(options.model_folder, config, options.run / "logs"))
            options.url = servers.urls[0]
        print(json.dumps(asyncio.run(measure(options)), indent=1))


if __name__ == "__main__":
    main()

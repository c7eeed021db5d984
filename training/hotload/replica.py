"""Drive one vLLM server: its development routes and our worker methods, every answer's body checked.

Routes: vLLM 0.32, `entrypoints/rl/online/api_router.py` and `entrypoints/serve/dev`; the gate's own is in `gate.py`.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx
import msgspec
from msgspec import Struct

from groundhop.errors import ServerError
from groundhop.training.hotload.gate import GATE_PATH
from groundhop.training.hotload.receiver.requests import ApplyRequest

logger = logging.getLogger(__name__)

TIMEOUT_S = 600.0
CONNECT_S = 5.0
RESET_TRIES = 5
RESET_WAIT_S = 0.1
RESUME_TRIES = 4

CachePolicy = Literal["preserve", "reset_all"]
"""What happens to keys and values of the old weights: kept, with new requests salted apart, or thrown away."""
Operation = Literal["differential", "overwrite"]
"""Whether changes fit exactly one base state, or are absolute."""
PauseMode = Literal["keep", "wait", "abort"]
"""What happens to requests in flight: frozen and continued on the new weights, drained before, or ended."""

Answer = TypeVar("Answer", bound="Told")


class Told(Struct, frozen=True, kw_only=True):
    """What a worker method answers; fields that a newer worker adds are ignored."""

    ok: bool
    error: str = ""
    digest: str = ""


class State(Told, frozen=True, kw_only=True):
    """What a worker says that it holds."""

    identity: str | None = None
    dirty: bool = False
    certified: bool = False


class Certificate(Told, frozen=True, kw_only=True):
    """How canonical tensors lie in a worker's live weights (`placement.md` 1.4)."""

    classes: dict[str, int] = {}
    overwrite_names: list[str] = []
    plan_digest: str = ""
    layout_signature: str = ""
    refused: str | None = None


class Applied(Told, frozen=True, kw_only=True):
    """What an update did."""

    changed: int = 0
    seconds_by_phase: dict[str, float] = {}


@dataclass(frozen=True, slots=True)
class Replica:
    """One server. Methods raise ServerError that names it, unless they say otherwise."""

    client: httpx.AsyncClient
    url: str
    """Base URL, without `/v1` or a slash at the end."""

    async def state(self) -> State:
        """What all workers say that they hold; dirty when one is, or when they differ."""
        answers = await self._workers("groundhop_state", State)
        first = answers[0]
        torn = any(a.dirty or (a.identity, a.digest) != (first.identity, first.digest) for a in answers)
        return msgspec.structs.replace(first, dirty=torn, certified=all(a.certified for a in answers))

    async def certify(self, checkpoint: Path | None) -> Certificate:
        """Have the placement learned and compared with `checkpoint`, or with the folder the server was started on."""
        argument = None if checkpoint is None else str(checkpoint.resolve())
        answers = await self._workers("groundhop_certify", Certificate, argument)
        self._agree(answers)
        if refused := next((a.refused for a in answers if a.refused), None):
            raise ServerError(f"{self.url} cannot take weights in place: {refused}")
        names = sorted({name for answer in answers for name in answer.overwrite_names})
        return msgspec.structs.replace(answers[0], overwrite_names=names)

    async def apply(self, request: ApplyRequest) -> Applied:
        """Write a delta into the live weights; the server must be paused. Returns when the digest is right."""
        return await self._change("groundhop_apply", request.digest, msgspec.to_builtins(request))

    async def load(self, folder: Path, identity: str, digest: str) -> Applied:
        """Load a whole checkpoint, whatever is there now; the server must be paused."""
        return await self._change("groundhop_load", digest, str(folder.resolve()), identity, digest)

    async def audit(self) -> str:
        """The digest over every live bit, read now; with "" where the workers differ."""
        digests = {answer.digest for answer in await self._workers("groundhop_digest", Told)}
        return digests.pop() if len(digests) == 1 else ""

    async def pause(self, mode: PauseMode = "keep", drain_s: float = TIMEOUT_S) -> None:
        """Make the scheduler stand still. `wait` becomes `abort` for what is not done after `drain_s`."""
        if mode == "wait":
            try:
                await self._pause("wait", drain_s)
                return
            except ServerError as error:
                logger.warning("%s does not drain: %s; ending its requests", self.url, error)
                mode = "abort"
        await self._pause(mode, TIMEOUT_S)

    async def resume(self) -> None:
        """Let it run again; asked several times, because a server that stands still for ever is the worst outcome."""
        for left in reversed(range(RESUME_TRIES)):
            try:
                await self._post("/resume")
                if not await self.is_paused():
                    return
            except ServerError:
                if not left:
                    raise
            await asyncio.sleep(0.2 * (RESUME_TRIES - left))
        raise ServerError(f"{self.url} stays paused after {RESUME_TRIES} requests to resume")

    async def is_paused(self) -> bool:
        """Whether its scheduler stands still."""
        return bool((await self._get("/is_paused")).get("is_paused"))

    async def version(self) -> str:
        """The label of the tokens it makes now."""
        return str((await self._get("/weight_info"))["weight_version"])

    async def stamp(self, version: str) -> None:
        """Label all tokens from here on; the server must be paused."""
        await self._post("/update_weight_version", json={"new_version": version})
        if (now := await self.version()) != version:
            raise ServerError(f"{self.url} calls its weights {now!r} after they were labelled {version!r}")

    async def freshen(self, policy: CachePolicy, salt: str) -> CachePolicy:
        """See to it that no new request reads keys and values of other weights; returns what was done.

        `preserve` gives requests from here on the cache salt `salt`, through the gate; without a gate it resets.
        Raises: ServerError when the cache cannot be reset: then the new weights must not be announced.
        """
        # Outputs of vision encoders are cached under no salt.
        await self._post("/reset_encoder_cache")
        if policy == "preserve" and await self._gate({"salt": salt}):
            return "preserve"
        await self._reset()
        await self._gate({"salt": None})
        return "reset_all"

    async def take_out(self, reason: str) -> None:
        """Serve nobody: refuse new requests where there is a gate, end those in flight, and stay paused."""
        if not await self._gate({"closed": reason}):
            logger.warning("%s has no gate: new requests will wait in a server that is out of service", self.url)
        await self._pause("abort", TIMEOUT_S)

    async def put_back(self) -> None:
        """Open the gate and resume."""
        await self._gate({"closed": None})
        await self.resume()

    async def alive(self) -> bool:
        """Whether it answers its health route."""
        try:
            return (await self.client.get(f"{self.url}/health", timeout=CONNECT_S)).status_code == 200
        except httpx.HTTPError:
            return False

    async def _reset(self) -> None:
        """The answer is 200 also where nothing was reset, so its body decides (vllm-project/vllm#12284)."""
        for attempt in range(RESET_TRIES):
            params = {"reset_running_requests": "true", "reset_external": "true"}
            if (await self._post("/reset_prefix_cache", params=params)).get("success") is True:
                return
            logger.warning("%s did not reset its prefix cache, try %d", self.url, attempt + 1)
            if attempt == RESET_TRIES - 2:
                # Requests that hold blocks would go on with stale keys and values: rather they end.
                await self._pause("abort", TIMEOUT_S)
            else:
                await asyncio.sleep(RESET_WAIT_S * 2**attempt)
        raise ServerError(f"{self.url} does not reset its prefix cache; it must not serve other weights with it")

    async def _pause(self, mode: PauseMode, timeout_s: float) -> None:
        # Caches are reset by `freshen`, where the answer can be checked.
        await self._post("/pause", timeout_s, params={"mode": mode, "clear_cache": "false"})
        if not await self.is_paused():
            raise ServerError(f"{self.url} runs although it was paused")

    async def _gate(self, change: Mapping[str, Any]) -> bool:
        """Tell the gate; False when the server has none."""
        response = await self._send("POST", GATE_PATH, json=dict(change))
        if response.status_code in (404, 405):
            return False
        self._check(response, GATE_PATH)
        return True

    async def _change(self, method: str, digest: str, *arguments: Any) -> Applied:
        answers = await self._workers(method, Applied, *arguments)
        for rank, answer in enumerate(answers):
            if answer.digest != digest:
                raise ServerError(f"{self.url}, worker {rank} holds {answer.digest[:12]}, promised was {digest[:12]}")
        seconds = {key: max(a.seconds_by_phase.get(key, 0.0) for a in answers) for key in answers[0].seconds_by_phase}
        return msgspec.structs.replace(answers[0], seconds_by_phase=seconds)

    def _agree(self, answers: list[Certificate]) -> None:
        if len({answer.digest for answer in answers}) != 1:
            raise ServerError(f"{self.url}: its workers hold different weights: {[a.digest[:12] for a in answers]}")

    async def _workers(self, method: str, kind: type[Answer], *arguments: Any) -> list[Answer]:
        """Call a method of every worker. Raises: ServerError for the first that failed, with its words."""
        body = {"method": method, "args": list(arguments), "timeout": TIMEOUT_S}
        results = (await self._post("/collective_rpc", json=body)).get("results") or []
        try:
            answers = [msgspec.convert(result, kind) for result in results]
        except msgspec.ValidationError as error:
            raise ServerError(f"{self.url}: {method} answered something else: {error}") from error
        if not answers:
            raise ServerError(f"{self.url}: {method} has no workers")
        for rank, answer in enumerate(answers):
            if not answer.ok:
                raise ServerError(f"{self.url}, worker {rank}: {answer.error}")
        return answers

    async def _get(self, path: str) -> dict[str, Any]:
        return self._check(await self._send("GET", path), path)

    async def _post(self, path: str, timeout_s: float = TIMEOUT_S, **content: Any) -> dict[str, Any]:
        return self._check(
            await self._send("POST", path, timeout=httpx.Timeout(timeout_s, connect=CONNECT_S), **content), path
        )

    async def _send(self, verb: str, path: str, **content: Any) -> httpx.Response:
        try:
            return await self.client.request(verb, f"{self.url}{path}", **content)
        except httpx.HTTPError as error:
            raise ServerError(f"{self.url}{path}: {type(error).__name__} {error}") from error

    def _check(self, response: httpx.Response, path: str) -> dict[str, Any]:
        if response.status_code != 200:
            raise ServerError(f"{self.url}{path} answered {response.status_code}: {response.text[:300]}")
        try:
            content = response.json() if response.content else {}
        except ValueError as error:
            raise ServerError(f"{self.url}{path} answered no JSON: {response.text[:100]!r}") from error
        return content if isinstance(content, dict) else {}


def make_client(headers: Mapping[str, str]) -> httpx.AsyncClient:
    """A client for replicas; proxies of the environment are for the web, not for them."""
    timeout = httpx.Timeout(TIMEOUT_S, connect=CONNECT_S)
    return httpx.AsyncClient(headers=dict(headers), timeout=timeout, trust_env=False)

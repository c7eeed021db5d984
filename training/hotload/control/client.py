"""Talk to the control plane: publishers (`ControlClient`, `ControlFleet`) and replica agents (`AgentClient`)."""

import os
import time
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import quote

import httpx
import msgspec
from msgspec import Struct

from groundhop.errors import CredentialError, InputError, RefusedError, ServerError
from groundhop.training.hotload.control.wire import (
    BarrierReply,
    DeploymentBody,
    DeploymentView,
    ErrorBody,
    HeartbeatBody,
    HeartbeatReply,
    HotLoadBody,
    HotLoadView,
    LeaseBody,
    LeaseReply,
    RegisterBody,
    RegisterReply,
    ReportBody,
    ReportReply,
    TaskReply,
    read_reply,
)

if TYPE_CHECKING:
    from groundhop.training.hotload.store.snapshots import SnapshotIndex

TOKEN_VARIABLE = "GROUNDHOP_CONTROL_TOKEN"
WAIT_S = 25.0
"""Of one long poll; shorter than what proxies allow."""
TRIES = 5
FIRST_DELAY_S = 0.25

Reply = TypeVar("Reply", bound=Struct)


class ControlClient:
    """A publisher's or a reader's connection. Asks again where the server is gone or busy, never where it refused.

    Raises, from every method: RefusedError (with `.code`) where the control plane declined, CredentialError for a token,
    ServerError where it could not be reached.
    """

    def __init__(self, url: str, token: str | None = None, *, timeout_s: float = 30.0) -> None:
        self._http = httpx.Client(base_url=url.rstrip("/"), headers=headers_of(token), timeout=timeout_s)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def put_deployment(self, name: str, config: DeploymentBody) -> DeploymentView:
        """Create or reconfigure a deployment."""
        return self._ask("PUT", f"/v1/deployments/{quote(name)}", DeploymentView, body=config)

    def deployment(self, name: str) -> DeploymentView:
        """Head, lease, replicas and the newest hot-loads."""
        return self._ask("GET", f"/v1/deployments/{quote(name)}", DeploymentView)

    def lease(self, name: str, body: LeaseBody) -> LeaseReply:
        """Take or renew the publisher's lease."""
        return self._ask("POST", f"/v1/deployments/{quote(name)}/publisher_lease", LeaseReply, body=body)

    def create(self, body: HotLoadBody) -> HotLoadView:
        """Start a hot-load; with the same id and body again, give the one that there is."""
        return self._ask("POST", "/v1/hot_loads", HotLoadView, body=body)

    def hot_load(self, hot_load_id: str, *, wait_s: float = 0.0) -> HotLoadView:
        """A hot-load; with `wait_s`, as soon as it is over or after that time."""
        path = f"/v1/hot_loads/{quote(hot_load_id)}"
        return self._ask("GET", path, HotLoadView, params={"wait_s": wait_s}, wait_s=wait_s)

    def cancel(self, hot_load_id: str) -> HotLoadView:
        """Give a hot-load up before its commit. It does not roll back."""
        return self._ask("POST", f"/v1/hot_loads/{quote(hot_load_id)}:cancel", HotLoadView)

    def barrier(self, name: str, identity: str, *, wait_s: float = WAIT_S) -> BarrierReply:
        """Wait until every live replica serves `identity` with clean caches; `ready` says whether it came to that."""
        params: dict[str, Any] = {"identity": identity, "wait_s": wait_s}
        path = f"/v1/deployments/{quote(name)}:barrier"
        return self._ask("GET", path, BarrierReply, params=params, wait_s=wait_s, accept=504)

    def _ask(
        self,
        method: str,
        path: str,
        kind: type[Reply],
        *,
        body: Struct | None = None,
        params: dict[str, Any] | None = None,
        wait_s: float = 0.0,
        accept: int = 200,
    ) -> Reply:
        timeout = max(wait_s + 10.0, 30.0)
        for again in range(TRIES):
            last = again == TRIES - 1
            try:
                answer = self._http.request(method, path, content=_encode(body), params=params, timeout=timeout)
            except httpx.TransportError as error:
                if last:
                    raise ServerError(f"no control plane at {self._http.base_url}: {error}") from error
            else:
                if answer.is_success or answer.status_code == accept or last or not _is_transient(answer):
                    return _reply(answer, kind, accept)
            time.sleep(FIRST_DELAY_S * 2**again)
        raise AssertionError


class ControlFleet:
    """The replicas of a deployment, as a publisher's `Fleet`: hot-loads go through the control plane."""

    def __init__(
        self,
        url: str,
        deployment: str,
        token: str | None = None,
        *,
        timeout_s: float = 1800.0,
        prompt_cache: Literal["preserve", "reset_all"] | None = None,
    ) -> None:
        self._client = ControlClient(url, token)
        self._deployment = deployment
        self._timeout_s = timeout_s
        self._prompt_cache = prompt_cache

    def hot_load(self, index: "SnapshotIndex", operation_hint: Literal["differential", "overwrite"]) -> None:
        """Bring all required replicas to a snapshot and commit it; returns when they serve it. May be called again.

        Raises: ServerError when they do not; RefusedError with code `aborted` for a publisher that another one fenced.
        """
        raise NotImplementedError

    def clean_on(self, identity: str) -> bool:
        """Whether every live replica of the deployment holds exactly `identity`, and there is one."""
        raise NotImplementedError


class AgentClient:
    """An agent's connection, for one replica. Its methods ask once; the agent's loop decides when to ask again.

    Raises, from every method: RefusedError (`.code` is `aborted` where a newer agent of this name registered, `not_found`
    where the deployment is gone), CredentialError, ServerError where the control plane could not be reached.
    """

    def __init__(self, url: str, deployment: str, name: str, epoch: int, token: str | None = None) -> None:
        self._http = httpx.AsyncClient(base_url=url.rstrip("/"), headers=headers_of(token), timeout=15.0)
        self._params = {"deployment": deployment}
        self._path = f"/v1/replicas/{quote(name)}"
        self.epoch = epoch

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def register(self, body: RegisterBody) -> RegisterReply:
        """Take charge of the replica; again after every start and whenever a heartbeat says `known` false."""
        return await self._ask("POST", "/v1/replicas:register", RegisterReply, body=body)

    async def heartbeat(self, body: HeartbeatBody) -> HeartbeatReply:
        """Say that the replica lives."""
        return await self._ask("POST", f"{self._path}:heartbeat", HeartbeatReply, body=body)

    async def task(self, have: str, *, wait_s: float = WAIT_S) -> TaskReply:
        """The standing task, as soon as its key is another than `have` or after `wait_s`."""
        params = {**self._params, "epoch": self.epoch, "have": have, "wait_s": wait_s}
        return await self._ask("GET", f"{self._path}/task", TaskReply, params=params, wait_s=wait_s)

    async def report(self, body: ReportBody) -> ReportReply:
        """Tell of a phase."""
        return await self._ask("POST", f"{self._path}:report", ReportReply, body=body)

    async def _ask(
        self,
        method: str,
        path: str,
        kind: type[Reply],
        *,
        body: Struct | None = None,
        params: dict[str, Any] | None = None,
        wait_s: float = 0.0,
    ) -> Reply:
        try:
            answer = await self._http.request(
                method, path, content=_encode(body), params=params or self._params, timeout=max(wait_s + 10.0, 15.0)
            )
        except httpx.TransportError as error:
            raise ServerError(f"no control plane at {self._http.base_url}: {error}") from error
        return _reply(answer, kind, 200)


def headers_of(token: str | None) -> dict[str, str]:
    """Request headers; without a token, the one in GROUNDHOP_CONTROL_TOKEN."""
    token = token or os.environ.get(TOKEN_VARIABLE) or None
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    return headers | ({"Authorization": f"Bearer {token}"} if token else {})


def _encode(body: Struct | None) -> bytes | None:
    return None if body is None else msgspec.json.encode(body)


def _is_transient(answer: httpx.Response) -> bool:
    return answer.status_code in (500, 502, 503)


def _reply(answer: httpx.Response, kind: type[Reply], accept: int) -> Reply:
    if answer.is_success or answer.status_code == accept:
        try:
            return read_reply(answer.content, kind)
        except InputError as error:
            raise ServerError(f"{answer.request.url.host}: {error}") from error
    try:
        found = msgspec.json.decode(answer.content, type=ErrorBody)
    except msgspec.DecodeError:
        raise ServerError(f"{answer.request.url.host} answered {answer.status_code} without a reason") from None
    if found.code in ("unauthenticated", "permission_denied"):
        raise CredentialError(f"{found.message} (set {TOKEN_VARIABLE})")
    if found.code in ("unavailable", "internal"):
        raise ServerError(found.message)
    raise RefusedError(f"{found.code}: {found.message}")

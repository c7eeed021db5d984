"""Talk to the control plane: publishers (`ControlClient`, `ControlFleet`) and replica agents (`AgentClient`)."""

import contextlib
import os
import time
import uuid
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import httpx
import msgspec
from msgspec import Struct

from groundhop.errors import ConflictError, CredentialError, FencedError, InputError, RefusedError, ServerError
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
    PromptCache,
    RegisterBody,
    RegisterReply,
    ReportBody,
    ReportReply,
    Status,
    TaskReply,
    read_reply,
)
from groundhop.training.hotload.fleet import OperationHint

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

    def status(self) -> tuple[DeploymentView, ...]:
        """All deployments."""
        return self._ask("GET", "/v1/status", Status).deployments

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
        prompt_cache: PromptCache | None = None,
    ) -> None:
        self._client = ControlClient(url, token)
        self._deployment = deployment
        self._timeout_s = timeout_s
        self._prompt_cache: PromptCache | None = prompt_cache

    def hot_load(self, index: "SnapshotIndex", operation_hint: OperationHint) -> None:
        """Bring all required replicas to a snapshot and commit it; returns when they serve it. May be called again.

        Raises: ServerError when they do not; FencedError for a publisher of an older epoch; ConflictError where the head is
        another than the delta's base, or the identity stands for other content.
        """
        end = time.monotonic() + self._timeout_s
        view = self._client.deployment(self._deployment)
        if view.open_hot_load is None and view.head == index.identity and self.clean_on(index.identity):
            return
        if view.open_hot_load is not None:
            running = self._wait(view.open_hot_load, end)
            if running.identity == index.identity and running.committed:
                return
        try:
            started = self._create(self._body(index, operation_hint))
        except ServerError as error:
            if index.base is None or "unknown predecessor" not in str(error):
                raise
            # The control plane is younger than the store. It learns of the base; agents find their way there by themselves.
            base = HotLoadBody(deployment_id=self._deployment, identity=index.base, kind="full", operation="overwrite")
            self._must_commit(self._wait(self._create(base).hot_load_id, end))
            started = self._create(self._body(index, operation_hint))
        self._must_commit(self._wait(started.hot_load_id, end))

    def clean_on(self, identity: str) -> bool:
        """Whether every live replica of the deployment holds exactly `identity`, and there is one; False when unsure."""
        try:
            view = self._client.deployment(self._deployment)
        except (RefusedError, ServerError):
            return False
        live = [replica for replica in view.replicas if replica.state not in ("offline", "recovering")]
        if not live or view.open_hot_load is not None or view.head not in (None, identity):
            return False
        return all(replica.state == "serving" and replica.current_identity == identity for replica in live)

    def _body(self, index: "SnapshotIndex", operation: OperationHint) -> HotLoadBody:
        return HotLoadBody(
            deployment_id=self._deployment,
            hot_load_id=uuid.uuid4().hex,
            identity=index.identity,
            version=index.version,
            kind=index.kind,
            base=index.base,
            operation=index.operation,
            prompt_cache=self._prompt_cache,
            publisher_epoch=index.epoch or None,
            # An overwrite mends what an attempt left that its publisher does not know the end of: the head may have moved.
            expected_head=index.base if operation == "differential" else None,
            digest=index.digest,
        )

    def _create(self, body: HotLoadBody) -> HotLoadView:
        try:
            return self._client.create(body)
        except RefusedError as error:
            if error.code == "aborted":
                kind = FencedError if "stale publisher epoch" in error.reason else ConflictError
                raise kind(error.reason) from error
            raise ServerError(error.reason) from error

    def _wait(self, hot_load_id: str, end: float) -> HotLoadView:
        while True:
            left = end - time.monotonic()
            found = self._client.hot_load(hot_load_id, wait_s=min(max(left, 0.0), WAIT_S))
            if found.finished_at is not None:
                return found
            if left <= 0:
                # Nothing may be left running that could commit behind the publisher's back.
                with contextlib.suppress(RefusedError):
                    self._client.cancel(hot_load_id)
                raise ServerError(f"{found.identity} is not on all replicas after {self._timeout_s:g} s: {found.state}")

    def _must_commit(self, found: HotLoadView) -> None:
        if not found.committed:
            raise ServerError(f"{found.identity} was not taken up: {found.reason or found.state}")


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

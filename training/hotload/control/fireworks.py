"""The `/hot_load/v1/models/hot_load` contract: POST says that a snapshot is ready, GET tells what each replica serves.

Source: Fireworks' public guide "RL rollouts with your own trainer" (docs.fireworks.ai). The deployment is named by a header;
compression and checksum are taken as told and not checked: a snapshot's own index says what its files are.
"""

from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from groundhop.training.hotload.control.admission import refuse
from groundhop.training.hotload.control.answers import read, reply, route
from groundhop.training.hotload.control.service import Service
from groundhop.training.hotload.control.wire import HotLoadBody, Identity, PromptCache, ReplicaView

PATH = "/hot_load/v1/models/hot_load"
DEPLOYMENT_HEADER = "fireworks-deployment"


class _Incremental(Struct, frozen=True, kw_only=True):
    previous_snapshot_identity: Identity
    compression_format: str = ""
    checksum_format: str = ""


class _Signal(Struct, frozen=True, kw_only=True):
    """Fields that we do not know are left alone: the contract grows, and none of them may change which weights are meant."""

    identity: Identity
    incremental_snapshot_metadata: _Incremental | None = None
    reset_prompt_cache: bool | str | None = None


def routes(service: Service) -> list[Route]:
    """The routes of the contract."""

    async def signal(request: Request) -> Response:
        name = deployment_of(request, service)
        body = to_body(await read(request, _Signal), name)
        newest = next(iter(service.list_hot_loads(name, body.identity)), None)
        if newest is not None and newest.state in ("pending", "in_progress"):
            return reply(_answer(body.identity, newest.id, newest.state))
        if newest is not None and service.find(name).head == body.identity:
            return reply(_answer(body.identity, newest.id, newest.state))
        view, _ = await service.create(body)
        return reply(_answer(body.identity, view.hot_load_id, view.state))

    async def status(request: Request) -> Response:
        view = service.view(deployment_of(request, service))
        # Clients of this contract wait for every replica that they are shown.
        live = [replica for replica in view.replicas if replica.state != "offline"]
        return reply({"replicas": [show_replica(replica) for replica in live]})

    async def hint(request: Request) -> Response:
        deployment_of(request, service)
        await read(request, _Hint)
        return reply({})

    return [route(PATH, "POST", signal), route(PATH, "GET", status), route(f"{PATH}/hint", "POST", hint)]


class _Hint(Struct, frozen=True):
    """A file is on the store. Nothing follows: agents fetch a snapshot when it is whole."""


def deployment_of(request: Request, service: Service) -> str:
    """The deployment that a header names, `accounts/A/deployments/D` or `D`; without one, the only one there is.

    Raises: RefusedError.
    """
    named = request.headers.get(DEPLOYMENT_HEADER, "").rstrip("/").rpartition("/")[2]
    if named:
        service.find(named)
        return named
    names = service.names()
    if len(names) != 1:
        raise refuse("invalid_argument", f"need the header {DEPLOYMENT_HEADER}: there are {len(names)} deployments")
    return names[0]


def to_body(asked: _Signal, deployment: str) -> HotLoadBody:
    """Our request for theirs. Raises: RefusedError, `invalid_argument`."""
    delta = asked.incremental_snapshot_metadata
    return HotLoadBody(
        deployment_id=deployment,
        identity=asked.identity,
        kind="full" if delta is None else "delta",
        base=None if delta is None else delta.previous_snapshot_identity,
        prompt_cache=_cache(asked.reset_prompt_cache),
    )


def _cache(asked: bool | str | None) -> PromptCache:
    """`all`, the contract's default, resets. `new_session` keeps running sessions' entries, as our salt per version does."""
    match asked:
        case None | True | "all":
            return "reset_all"
        case False | "none" | "new_session":
            return "preserve"
        case _:
            raise refuse("invalid_argument", "reset_prompt_cache: need all, none or new_session")


def _answer(identity: str, hot_load_id: str, state: str) -> dict[str, str]:
    return {"identity": identity, "hot_load_id": hot_load_id, "state": state}


def show_replica(view: ReplicaView) -> dict[str, Any]:
    """A replica in their words."""
    ready = view.public_state == "ready"
    stage = "error" if view.public_state == "error" else "ready" if ready else view.state
    return {
        "identity": view.name,
        "replica_id": view.name,
        "zone": view.zone,
        "readiness": ready,
        "readiness_reason": "" if ready else view.detail or view.state,
        "current_snapshot_identity": view.current_identity,
        "loading_state": {"stage": stage, "target_snapshot_identity": view.target_identity},
    }

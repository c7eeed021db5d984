"""CoreWeave's hot-load contract, `/v1alpha1/inference`, so that its client `cwtrain` drives this control plane unchanged.

Protobuf as JSON: camelCase, enumerations by their full names (integers are read too), times in RFC 3339. Source: the public
reference of the Inference API (docs.coreweave.com, `HotLoadService`) and cwtrain 1.0.2 (`infra/client.py`, `infra/models.py`).
"""

import base64
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from groundhop.training.hotload.control.admission import refuse
from groundhop.training.hotload.control.answers import read, reply, route, whole
from groundhop.training.hotload.control.records import Deployment, HotLoad
from groundhop.training.hotload.control.rules import chain_of
from groundhop.training.hotload.control.service import Service
from groundhop.training.hotload.control.wire import HotLoadBody, Identity, Kind, Name, PromptCache, ReplicaView

PREFIX = "/v1alpha1/inference"
PAGE, LARGEST_PAGE = 50, 1000

_TYPES: Mapping[object, Kind] = {
    "SNAPSHOT_TYPE_FULL": "full",
    1: "full",
    "SNAPSHOT_TYPE_INCREMENTAL": "delta",
    2: "delta",
}
_CACHES: Mapping[object, PromptCache | None] = {
    "PROMPT_CACHE_POLICY_UNSPECIFIED": None,
    0: None,
    "PROMPT_CACHE_POLICY_RESET_ALL": "reset_all",
    1: "reset_all",
    "PROMPT_CACHE_POLICY_PRESERVE": "preserve",
    2: "preserve",
}
_COMPRESSIONS = ("COMPRESSION_FORMAT_UNSPECIFIED", 0, "COMPRESSION_FORMAT_ZSTD", 1)
_CHECKSUMS = ("CHECKSUM_FORMAT_UNSPECIFIED", 0, "CHECKSUM_FORMAT_ADLER32", 1)
_KINDS = {"full": "SNAPSHOT_TYPE_FULL", "delta": "SNAPSHOT_TYPE_INCREMENTAL"}


class _Incremental(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    previous_snapshot_identity: Identity
    compression_format: str | int = 0
    checksum_format: str | int = 0


class _Create(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    deployment_id: Name
    hot_load_id: str | None = None
    identity: Identity
    type: str | int
    incremental_snapshot_metadata: _Incremental | None = None
    prompt_cache_policy: str | int = 0


class _Empty(Struct, frozen=True):
    pass


def routes(service: Service) -> list[Route]:
    """The routes of the contract."""

    async def create(request: Request) -> Response:
        asked = to_body(await read(request, _Create))
        view, replay = await service.create(asked)
        if replay:
            # The contract answers every second create with an id so; clients then get the hot-load by its id.
            raise refuse("already_exists", f"hot-load {view.hot_load_id} already exists")
        return reply({"hotLoad": show(*service.find_hot_load(view.hot_load_id))})

    async def get(request: Request) -> Response:
        return reply({"hotLoad": show(*service.find_hot_load(request.path_params["id"]))})

    async def find(request: Request) -> Response:
        name = request.query_params.get("parentDeploymentId") or None
        found, token = paginate(request, service.list_hot_loads(name, None), "hotLoads")
        shown = [show(service.find(one.body.deployment_id), one) for one in found]
        return reply({"hotLoads": shown, "nextPageToken": token})

    async def cancel(request: Request) -> Response:
        await read(request, _Empty)
        service.cancel(request.path_params["id"])
        return reply({"hotLoad": show(*service.find_hot_load(request.path_params["id"]))})

    async def replicas(request: Request) -> Response:
        views = sorted(service.view_replicas(request.path_params["id"]), key=lambda one: (one.zone, one.name))
        found, token = paginate(request, views, "replicas")
        return reply({"replicas": [show_replica(one) for one in found], "nextPageToken": token})

    async def deployment(request: Request) -> Response:
        return reply({"deployment": show_deployment(service.find(request.path_params["id"]))})

    async def deployments(request: Request) -> Response:
        found, token = paginate(request, service.names(), "items")
        return reply({"items": [show_deployment(service.find(name)) for name in found], "nextPageToken": token})

    return [
        route(f"{PREFIX}/hotLoads", "POST", create),
        route(f"{PREFIX}/hotLoads", "GET", find),
        route(f"{PREFIX}/hotLoads/{{id}}:cancel", "POST", cancel),
        route(f"{PREFIX}/hotLoads/{{id}}", "GET", get),
        route(f"{PREFIX}/hotLoads/{{id}}/replicas", "GET", replicas),
        route(f"{PREFIX}/deployments", "GET", deployments),
        route(f"{PREFIX}/deployments/{{id}}", "GET", deployment),
    ]


def to_body(asked: _Create) -> HotLoadBody:
    """Our request for theirs. Raises: RefusedError, `invalid_argument`."""
    kind = _TYPES.get(asked.type)
    if kind is None:
        raise refuse("invalid_argument", "type: need SNAPSHOT_TYPE_FULL or SNAPSHOT_TYPE_INCREMENTAL")
    if asked.prompt_cache_policy not in _CACHES:
        raise refuse("invalid_argument", "promptCachePolicy: need PROMPT_CACHE_POLICY_PRESERVE or _RESET_ALL")
    delta = asked.incremental_snapshot_metadata
    if (kind == "delta") != (delta is not None):
        raise refuse(
            "invalid_argument", "incrementalSnapshotMetadata: needed for incremental snapshots, and for them only"
        )
    if delta is not None and delta.compression_format not in _COMPRESSIONS:
        raise refuse("invalid_argument", "compressionFormat: need COMPRESSION_FORMAT_ZSTD")
    if delta is not None and delta.checksum_format not in _CHECKSUMS:
        raise refuse("invalid_argument", "checksumFormat: need CHECKSUM_FORMAT_ADLER32")
    return HotLoadBody(
        deployment_id=asked.deployment_id,
        hot_load_id=asked.hot_load_id or None,
        identity=asked.identity,
        kind=kind,
        base=None if delta is None else delta.previous_snapshot_identity,
        prompt_cache=_CACHES[asked.prompt_cache_policy],
    )


def show(deployment: Deployment, hot_load: HotLoad) -> dict[str, Any]:
    """A hot-load in their words."""
    body = hot_load.body
    spec: dict[str, Any] = {
        "id": hot_load.id,
        "deploymentId": deployment.name,
        "identity": body.identity,
        "type": _KINDS[body.kind],
        "promptCachePolicy": f"PROMPT_CACHE_POLICY_{(body.prompt_cache or 'preserve').upper()}",
        "snapshotChain": [
            {"identity": link.identity, "type": _KINDS[link.kind], "hotLoadId": link.hot_load_id}
            | (_FORMATS if link.kind == "delta" else {})
            for link in chain_of(deployment, hot_load)
        ],
    }
    if body.base is not None:
        spec["incrementalSnapshotMetadata"] = {"previousSnapshotIdentity": body.base, **_FORMATS}
    status: dict[str, Any] = {
        "state": f"HOT_LOAD_STATE_{hot_load.state.upper()}",
        "createdAt": moment(hot_load.created_at),
        "updatedAt": moment(hot_load.updated_at),
        "conditions": [_condition(hot_load)] if hot_load.reason else [],
    }
    if hot_load.finished_at is not None:
        key = "canceledAt" if hot_load.state == "canceled" else "finishedAt"
        status |= {"finishedAt": moment(hot_load.finished_at), key: moment(hot_load.finished_at)}
    return {"spec": spec, "status": status}


_FORMATS = {"compressionFormat": "COMPRESSION_FORMAT_ZSTD", "checksumFormat": "CHECKSUM_FORMAT_ADLER32"}


def _condition(hot_load: HotLoad) -> dict[str, str]:
    done = hot_load.state == "completed"
    return {
        "type": "Completed",
        "status": "STATUS_TRUE" if done else "STATUS_FALSE",
        "reason": "ReplicasCatchUp"
        if done
        else "".join(word.title() for word in hot_load.code.split("_")) or "Retrying",
        "message": hot_load.reason,
        "lastUpdateTime": moment(hot_load.updated_at),
    }


def show_replica(view: ReplicaView) -> dict[str, Any]:
    """A replica in their words."""
    times = {"startedAt": view.started_at, "finishedAt": view.finished_at, "updatedAt": view.updated_at}
    return {
        "name": view.name,
        "zone": view.zone,
        "state": view.public_state.upper(),
        "currentSnapshotIdentity": view.current_identity or "initial",
        "errorReason": view.detail,
        "transitionedAt": moment(view.updated_at),
        **{key: moment(value) for key, value in times.items() if value is not None},
    }


def show_deployment(deployment: Deployment) -> dict[str, Any]:
    """A deployment in their words: ready while a replica lives."""
    config = deployment.config
    ready = any(replica.state != "offline" for replica in deployment.replicas.values())
    mode = "TRANSITION_MODE_ASYNC" if config.transition_mode == "ASYNC" else "TRANSITION_MODE_UNSPECIFIED"
    return {
        "spec": {
            "id": deployment.name,
            "name": deployment.name,
            "model": {"name": config.model},
            "runtime": {"engine": "vllm"},
            "hotLoad": {"bucket": config.bucket, "pathPrefix": config.path_prefix, "transitionMode": mode},
            "gatewayIds": [],
        },
        "status": {"status": "STATUS_READY" if ready else "STATUS_CREATING", "conditions": []},
    }


def moment(time: float) -> str:
    """Unix time as RFC 3339 in UTC."""
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


Item = TypeVar("Item")


def paginate(request: Request, found: Sequence[Item], what: str) -> tuple[Sequence[Item], str]:
    """One page and the token of the next, empty on the last. Raises: RefusedError, `invalid_argument`."""
    size = min(whole(request, "maxPageSize", 0) or PAGE, LARGEST_PAGE)
    token = request.query_params.get("pageToken", "")
    start = 0
    if token:
        try:
            kind, _, text = base64.urlsafe_b64decode(token.encode()).decode().partition(":")
        except ValueError as error:
            raise refuse("invalid_argument", "pageToken: not one of ours") from error
        if kind != what or not text.isdigit() or len(text) > 12:
            raise refuse("invalid_argument", "pageToken: not one of ours")
        start = int(text)
    more = start + size < len(found)
    after = base64.urlsafe_b64encode(f"{what}:{start + size}".encode()).decode() if more else ""
    return found[start : start + size], after

"""The REST API of the control plane, as an ASGI application over a `Service`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from importlib import resources

import msgspec
from msgspec import Struct
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from groundhop.training.hotload.control import coreweave, fireworks
from groundhop.training.hotload.control.answers import fail, needed, number, read, reply, route, whole
from groundhop.training.hotload.control.core import LONGEST_POLL_S
from groundhop.training.hotload.control.guard import Guard
from groundhop.training.hotload.control.service import Service
from groundhop.training.hotload.control.views import view_hot_load
from groundhop.training.hotload.control.wire import (
    DeploymentBody,
    HeartbeatBody,
    HotLoadBody,
    LeaseBody,
    Name,
    RegisterBody,
    ReportBody,
    Status,
    read_body,
)

LEDGER_PAGE = 1000
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class _Named(Struct, frozen=True, forbid_unknown_fields=True):
    name: Name


def make_app(service: Service, token: str | None = None) -> Guard:
    """The application; its lifespan runs the service's clock."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        clock = asyncio.create_task(service.run())
        try:
            yield
        finally:
            clock.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await clock

    routes = [*_routes(service), *coreweave.routes(service), *fireworks.routes(service)]
    application = Starlette(routes=routes, lifespan=lifespan, exception_handlers={404: _lost, 405: _lost})
    return Guard(application, token)


def _routes(service: Service) -> list[Route]:
    return [
        *_open_routes(),
        *_deployment_routes(service),
        *_hot_load_routes(service),
        *_replica_routes(service),
    ]


def _open_routes() -> list[Route]:
    page = (resources.files("groundhop.training.hotload.control") / "page.html").read_text("utf-8")

    async def show(_: Request) -> Response:
        return HTMLResponse(page, headers=PAGE_HEADERS)

    async def health(_: Request) -> Response:
        return reply({"ok": True})

    return [route("/", "GET", show), route("/health", "GET", health)]


def _deployment_routes(service: Service) -> list[Route]:
    async def status(_: Request) -> Response:
        return reply(Status(deployments=tuple(service.view(name) for name in service.names())))

    async def put(request: Request) -> Response:
        name = read_body(msgspec.json.encode({"name": request.path_params["name"]}), _Named).name
        return reply(service.configure(name, await read(request, DeploymentBody)))

    async def get(request: Request) -> Response:
        return reply(service.view(request.path_params["name"]))

    async def lease(request: Request) -> Response:
        return reply(service.lease(request.path_params["name"], await read(request, LeaseBody)))

    async def barrier(request: Request) -> Response:
        wait_s = number(request, "wait_s", 25.0, high=LONGEST_POLL_S)
        found = await service.barrier(request.path_params["name"], needed(request, "identity"), wait_s)
        return reply(found, 200 if found.ready else 504)

    async def replicas(request: Request) -> Response:
        return reply(service.view(request.path_params["name"]).replicas)

    async def ledger(request: Request) -> Response:
        after, limit = whole(request, "after", 0), whole(request, "limit", 100, 1, LEDGER_PAGE)
        return reply(service.read_ledger(request.path_params["name"], after, limit))

    return [
        route("/v1/status", "GET", status),
        route("/v1/deployments/{name}:barrier", "GET", barrier),
        route("/v1/deployments/{name}", "PUT", put),
        route("/v1/deployments/{name}", "GET", get),
        route("/v1/deployments/{name}/publisher_lease", "POST", lease),
        route("/v1/deployments/{name}/replicas", "GET", replicas),
        route("/v1/deployments/{name}/ledger", "GET", ledger),
    ]


def _hot_load_routes(service: Service) -> list[Route]:
    async def create(request: Request) -> Response:
        found, replay = await service.create(await read(request, HotLoadBody))
        return reply(found, 200 if replay else 201)

    async def find(request: Request) -> Response:
        query = request.query_params
        found = service.list_hot_loads(query.get("deployment"), query.get("identity"))
        limit = whole(request, "limit", 50, 1, 1000)
        return reply([view_hot_load(service.find(one.body.deployment_id), one) for one in found[:limit]])

    async def get(request: Request) -> Response:
        wait_s = number(request, "wait_s", 0.0, high=LONGEST_POLL_S)
        return reply(await service.wait_hot_load(request.path_params["id"], wait_s))

    async def cancel(request: Request) -> Response:
        return reply(service.cancel(request.path_params["id"]))

    async def replicas(request: Request) -> Response:
        return reply(service.view_replicas(request.path_params["id"]))

    return [
        route("/v1/hot_loads", "POST", create),
        route("/v1/hot_loads", "GET", find),
        route("/v1/hot_loads/{id}:cancel", "POST", cancel),
        route("/v1/hot_loads/{id}", "GET", get),
        route("/v1/hot_loads/{id}/replicas", "GET", replicas),
    ]


def _replica_routes(service: Service) -> list[Route]:
    async def register(request: Request) -> Response:
        return reply(service.register(await read(request, RegisterBody)))

    async def heartbeat(request: Request) -> Response:
        body = await read(request, HeartbeatBody)
        return reply(service.heartbeat(needed(request, "deployment"), request.path_params["name"], body))

    async def task(request: Request) -> Response:
        epoch = whole(request, "epoch", 0)
        wait_s = number(request, "wait_s", 25.0, high=LONGEST_POLL_S)
        have = request.query_params.get("have", "")
        deployment, name = needed(request, "deployment"), request.path_params["name"]
        return reply(await service.task(deployment, name, epoch, have, wait_s))

    async def report(request: Request) -> Response:
        body = await read(request, ReportBody)
        return reply(service.report(needed(request, "deployment"), request.path_params["name"], body))

    return [
        route("/v1/replicas:register", "POST", register),
        route("/v1/replicas/{name}:heartbeat", "POST", heartbeat),
        route("/v1/replicas/{name}:report", "POST", report),
        route("/v1/replicas/{name}/task", "GET", task),
    ]


async def _lost(request: Request, _: Exception) -> Response:
    return fail("not_found", f"nothing answers {request.method} here")

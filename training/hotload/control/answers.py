"""Between Starlette and our bodies: bounded reading, JSON answers, errors as bodies with a code and without a path."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import get_args

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from groundhop.errors import GroundhopError, InputError, RefusedError, SpaceError
from groundhop.training.hotload.control.admission import refuse
from groundhop.training.hotload.control.wire import BODY_LIMIT, HTTP_STATUS, Body, Code, ErrorBody, read_body

logger = logging.getLogger(__name__)

_CODES: Mapping[str, Code] = dict(zip(get_args(Code), get_args(Code), strict=True))
Handler = Callable[[Request], Awaitable[Response]]


async def read(request: Request, kind: type[Body]) -> Body:
    """The request's body. Raises: InputError where it is too long or not what it should be."""
    got = bytearray()
    async for piece in request.stream():
        got += piece
        if len(got) > BODY_LIMIT:
            raise InputError(f"need a body of at most {BODY_LIMIT} bytes")
    return read_body(bytes(got), kind)


def reply(body: object, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(body), status, {"Cache-Control": "no-store"}, "application/json")


def fail(code: Code, message: str, status: int | None = None) -> Response:
    """An error answer."""
    return reply(ErrorBody(code=code, message=message), status or HTTP_STATUS[code])


def number(request: Request, name: str, default: float, low: float = 0.0, high: float = 60.0) -> float:
    """A number in the query. Raises: RefusedError, `invalid_argument`."""
    text = request.query_params.get(name)
    try:
        found = default if text is None else float(text)
    except ValueError:
        found = float("nan")
    if not low <= found <= high:
        raise refuse("invalid_argument", f"need a number from {low:g} to {high:g} for {name}")
    return found


def whole(request: Request, name: str, default: int, low: int = 0, high: int = 2**63 - 1) -> int:
    """A whole number in the query, exactly. Raises: RefusedError, `invalid_argument`."""
    text = request.query_params.get(name, str(default))
    found = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
    if not low <= found <= high:
        raise refuse("invalid_argument", f"need a whole number from {low} to {high} for {name}")
    return found


def needed(request: Request, name: str) -> str:
    """A word in the query. Raises: RefusedError, `invalid_argument`."""
    found = request.query_params.get(name)
    if not found:
        raise refuse("invalid_argument", f"need ?{name}=")
    return found


def explained(handler: Handler) -> Handler:
    """The handler, with what it raises turned into error bodies. What we did not expect is logged, not shown."""

    async def explain(request: Request) -> Response:
        try:
            return await handler(request)
        except RefusedError as error:
            return fail(_CODES.get(error.code, "internal"), error.reason)
        except InputError as error:
            return fail("invalid_argument", str(error))
        except SpaceError:
            logger.exception("control: no space")
            return fail("resource_exhausted", "no space left for the ledger or the store: nothing was changed")
        except ClientDisconnect:
            return fail("unavailable", "the client went away")
        except GroundhopError:
            logger.exception("control: %s %s", request.method, request.url.path)
            return fail("unavailable", "the ledger or the store cannot be used now; see the control plane's log")
        except Exception:
            # The one loop that must outlive its items: a bug in one request must not end the service.
            logger.exception("control: %s %s", request.method, request.url.path)
            return fail("internal", "internal error; see the control plane's log")

    return explain


def route(path: str, method: str, handler: Handler) -> Route:
    """A route whose errors are explained."""
    return Route(path, explained(handler), methods=[method])

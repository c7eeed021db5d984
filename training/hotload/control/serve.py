"""`groundhop hotload serve`: run the control plane until it is told to stop."""

import contextlib
import logging
import os
import socket
from pathlib import Path

import uvicorn

from groundhop.errors import CredentialError, ServerError
from groundhop.training.hotload.control.app import make_app
from groundhop.training.hotload.control.ledger import Ledger
from groundhop.training.hotload.control.lookup import look
from groundhop.training.hotload.control.service import Service
from groundhop.training.hotload.control.wire import DeploymentBody
from groundhop.training.hotload.loopback import is_loopback

logger = logging.getLogger(__name__)

STOP_S = 3
"""Long polls that are open when the server is stopped end after so long."""


def serve(
    ledger: Path,
    *,
    host: str,
    port: int,
    token_variable: str,
    deployment: str,
    config: DeploymentBody,
) -> None:
    """Serve `ledger` on `host:port` until SIGINT or SIGTERM; creates or reconfigures `deployment` first.

    Raises: CredentialError for a host that others can reach and no token; ConflictError where the ledger is in use;
    ServerError where the port is.
    """
    token = find_token(host, token_variable)
    with contextlib.closing(_listen(host, port)) as listener, contextlib.closing(Ledger(ledger)) as opened:
        service = Service(opened, look=look)
        if deployment not in service.names() or service.find(deployment).open is None:
            service.configure(deployment, config)
        settings = uvicorn.Config(
            make_app(service, token),
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=STOP_S,
        )
        shown = f"[{host}]" if ":" in host else host
        logger.info("control plane of deployment %s at http://%s:%d/", deployment, shown, listener.getsockname()[1])
        uvicorn.Server(settings).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    try:
        return socket.create_server((bare, port), family=family)
    except (OSError, OverflowError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise ServerError(f"cannot listen on {host}:{port}: {reason}") from error


def find_token(host: str, variable: str) -> str | None:
    """The token, if its variable is set. Raises: CredentialError where `host` is not loopback and there is none."""
    token = os.environ.get(variable) or None
    if token is None and not is_loopback(host):
        raise CredentialError(
            f"{host} can be reached by other machines: set a secret in {variable}, "
            "because whoever can talk to a control plane decides which weights are served"
        )
    return token

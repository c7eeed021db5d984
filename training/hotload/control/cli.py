"""The rows of `groundhop hotload` that belong to the control plane: `serve` and `status`."""

import argparse
import os
import sys
from pathlib import Path

ACTIONS = frozenset({"serve", "status"})
URL = "http://127.0.0.1:8765"
TOKEN_VARIABLE = "GROUNDHOP_CONTROL_TOKEN"


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the two commands."""
    serve = commands.add_parser("serve", help="run the control plane of a deployment until Ctrl-C")
    serve.add_argument("--ledger", type=Path, default=Path("hotload.ledger"), metavar="FILE", help="its only memory")
    serve.add_argument("--host", default="127.0.0.1", help="default: this machine only; others need a token")
    serve.add_argument("--port", type=int, default=8765)
    serve.add_argument("--deployment", default="default", metavar="NAME")
    serve.add_argument("--store", default="", metavar="URL", help="snapshots: a folder, file:// or s3://bucket/prefix")
    serve.add_argument("--mode", choices=("ASYNC", "BARRIER"), default="ASYNC", help="BARRIER is strictly on-policy")
    serve.add_argument(
        "--quorum", type=int, default=None, metavar="N", help="so many replicas suffice (default: all that live)"
    )
    serve.add_argument("--offline-after", type=float, default=10.0, metavar="S", help="seconds of silence")
    serve.add_argument(
        "--bucket", default="", metavar="NAME", help="told to clients that upload by themselves, as cwtrain does"
    )
    serve.add_argument("--path-prefix", default="", metavar="PREFIX")
    serve.add_argument("--token-env", default=TOKEN_VARIABLE, metavar="VARIABLE", help="holds the token")
    status = commands.add_parser("status", help="show replicas, states and versions as they change")
    status.add_argument("--control", default=URL, metavar="URL")
    status.add_argument("--deployment", default=None, metavar="NAME", help="default: all")
    status.add_argument("--once", action="store_true", help="print tab-separated lines and end, for scripts")
    status.add_argument("--token-env", default=TOKEN_VARIABLE, metavar="VARIABLE", help="holds the token")


def run(options: argparse.Namespace) -> str:
    """Run the command. Returns what to print."""
    if options.action == "serve":
        _serve(options)
        return ""
    from groundhop.training.hotload.control.client import ControlClient
    from groundhop.training.hotload.control.status import follow, show_once

    client = ControlClient(options.control, os.environ.get(options.token_env))
    if options.once or not sys.stdout.isatty():
        return show_once(client, options.deployment)
    from rich.console import Console

    follow(client, options.deployment, Console())
    return ""


def _serve(options: argparse.Namespace) -> None:
    from msgspec import ValidationError, convert

    from groundhop.errors import InputError
    from groundhop.training.hotload.control.serve import serve
    from groundhop.training.hotload.control.wire import DeploymentBody, Name

    try:
        config = convert(
            {
                "store": options.store,
                "bucket": options.bucket,
                "path_prefix": options.path_prefix,
                "transition_mode": options.mode,
                "quorum": options.quorum,
                "offline_after_s": options.offline_after,
                "heartbeat_s": min(2.0, options.offline_after / 4),
            },
            DeploymentBody,
        )
    except ValidationError as error:
        raise InputError(f"hotload serve: {error}") from error
    try:
        name: str = convert(options.deployment, Name)
    except ValidationError as error:
        wanted = "letters, digits, '.', '_', '-'"
        raise InputError(f"hotload serve: --deployment needs {wanted}, got {options.deployment!r}") from error
    serve(
        options.ledger,
        host=options.host,
        port=options.port,
        token_variable=options.token_env,
        deployment=name,
        config=config,
    )

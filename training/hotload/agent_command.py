"""The row of `groundhop hotload` that runs a replica's agent."""

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import time
from pathlib import Path

ACTIONS = frozenset({"agent"})
URL = "http://127.0.0.1:8765"


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    agent = commands.add_parser("agent", help="keep one vLLM server on the versions that a control plane commits")
    agent.add_argument("--replica", required=True, metavar="URL", help="the server, without /v1")
    agent.add_argument("--control", default=URL, metavar="URL", help=f"the control plane (default: {URL})")
    agent.add_argument(
        "--store", required=True, metavar="URL", help="snapshots: a folder, file:// or s3://bucket/prefix"
    )
    agent.add_argument(
        "--folder", type=Path, required=True, metavar="DIR", help="its own; the server must see it under the same path"
    )
    agent.add_argument("--deployment", default="default", metavar="NAME")
    agent.add_argument("--name", default=None, help="of the replica (default: this host's and the server's port)")
    agent.add_argument("--zone", default="", metavar="NAME")
    agent.add_argument(
        "--patience",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds that requests wait in a server that needs a repair",
    )
    agent.add_argument(
        "--keep-every", type=int, default=20, metavar="N", help="versions between local checkpoints; 0: none"
    )
    agent.add_argument("--token-env", default="GROUNDHOP_CONTROL_TOKEN", metavar="VARIABLE", help="the control plane's")
    agent.add_argument("--replica-token-env", default="GROUNDHOP_GUARD_TOKEN", metavar="VARIABLE", help="the server's")


def run(options: argparse.Namespace) -> str:
    """Run the agent until SIGINT or SIGTERM. Raises: GroundhopError, also when a newer agent takes over."""
    asyncio.run(_run(options))
    return ""


async def _run(options: argparse.Namespace) -> None:
    from groundhop.training.hotload.agent import Agent, Settings
    from groundhop.training.hotload.control.client import AgentClient
    from groundhop.training.hotload.journal import Journal
    from groundhop.training.hotload.replica import Replica, make_client
    from groundhop.training.hotload.store.objects import open_objects
    from groundhop.training.hotload.supply import Depot

    name = options.name or _name(options.replica)
    settings = Settings(options.deployment, name, options.zone, options.patience, options.keep_every)
    objects = open_objects(options.store)
    secret = os.environ.get(options.replica_token_env)
    client = AgentClient(
        options.control, options.deployment, name, time.time_ns(), os.environ.get(options.token_env) or None
    )
    async with make_client({"Authorization": f"Bearer {secret}"} if secret else {}) as connection:
        replica = Replica(connection, options.replica.rstrip("/"))
        journal = Journal(options.folder / "journal.json")
        agent = Agent(settings, replica, client, objects, Depot(objects, options.folder), journal)
        try:
            await _until_told(asyncio.create_task(agent.run()))
        finally:
            await client.close()


async def _until_told(work: "asyncio.Task[None]") -> None:
    """Wait for `work`, or cancel it at SIGINT and SIGTERM. What it was writing is then mended by the next agent."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, work.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await work


def _name(url: str) -> str:
    host = "".join(c if c.isalnum() or c in ".-" else "-" for c in socket.gethostname()) or "replica"
    return f"{host}-{url.rstrip('/').rpartition(':')[2]}"

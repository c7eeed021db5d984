"""The row of `groundhop hotload` that takes snapshots off a store which nobody needs any more."""

import argparse
import os

ACTIONS = frozenset({"prune"})


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command."""
    prune = commands.add_parser("prune", help="delete snapshots that no replica and no trainer needs")
    prune.add_argument("store", metavar="STORE", help="a folder, file:// or s3://bucket/prefix")
    prune.add_argument(
        "--control", default=None, metavar="URL", help="keep what the replicas of this control plane need"
    )
    prune.add_argument("--token-env", default="GROUNDHOP_CONTROL_TOKEN", metavar="VARIABLE", help="the control plane's")
    prune.add_argument(
        "--keep", nargs="+", default=[], metavar="IDENTITY", help="snapshots that replicas hold or trainers resume from"
    )
    prune.add_argument("--keep-anchors", type=int, default=2, metavar="N", help="newest full snapshots (default: 2)")
    prune.add_argument("--dry-run", action="store_true", help="say what would go")


def run(options: argparse.Namespace) -> str:
    """Run the command. Raises: MissingError where the store has no committed snapshot; GroundhopError."""
    from groundhop.errors import MissingError
    from groundhop.training.hotload.store.log import CommitLog
    from groundhop.training.hotload.store.objects import open_objects
    from groundhop.training.hotload.store.retention import prune

    keep = set(options.keep)
    if options.control is not None:
        keep |= _held(options.control, os.environ.get(options.token_env))
    objects = open_objects(options.store)
    log = CommitLog(objects)
    if log.head() is None:
        raise MissingError(f"{options.store}: no committed snapshot")
    gone = prune(objects, log, keep, set(), options.keep_anchors, dry_run=options.dry_run)
    verb = "would go" if options.dry_run else "deleted"
    return "\n".join([*gone, f"{options.store}: {len(gone)} snapshots {verb}"])


def _held(url: str, token: str | None) -> set[str]:
    """All that the replicas of a control plane hold or come to."""
    from groundhop.training.hotload.control.client import ControlClient

    client = ControlClient(url, token)
    try:
        views = client.status()
    finally:
        client.close()
    found = {name for view in views for name in (view.head, view.announced)}
    found |= {name for view in views for one in view.replicas for name in (one.current_identity, one.target_identity)}
    return {name for name in found if name is not None}

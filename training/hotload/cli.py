"""The command line of hot-load: `groundhop hotload COMMAND`. Each command's modules are imported when it runs."""

import argparse
from pathlib import Path

from groundhop.errors import GroundhopError, InputError
from groundhop.training.hotload import agent_command, prune_command
from groundhop.training.hotload.control import cli as control

ENCODINGS = ("auto", "context", "xor", "add", "overwrite", "dense")
CHECKPOINT = "a safetensors file, or a Hugging Face checkpoint folder"


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add hot-load's commands to the parser of `groundhop hotload`."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="COMMAND")
    _add_file_commands(commands)
    control.add_commands(commands)
    agent_command.add_commands(commands)
    prune_command.add_commands(commands)


def run(options: argparse.Namespace) -> str:
    """Run the command that `options` name. Returns what to print.

    Raises: GroundhopError; what the file system refuses becomes an InputError that names the file.
    """
    try:
        return _run(options)
    except GroundhopError:
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise InputError(f"{where}{error.strerror or error}") from error


def _run(options: argparse.Namespace) -> str:
    if options.action in control.ACTIONS:
        return control.run(options)
    if options.action in agent_command.ACTIONS:
        return agent_command.run(options)
    if options.action in prune_command.ACTIONS:
        return prune_command.run(options)
    from groundhop.training.hotload import commands

    match options.action:
        case "diff":
            return commands.diff(options.base, options.target, options.out, options.encoding, options.version_number)
        case "apply":
            return commands.apply(options.base, options.delta, options.out)
        case "fold":
            return commands.fold(options.deltas, options.out, options.base)
        case "inspect":
            return commands.inspect(options.delta)
        case _:
            return commands.verify(options.checkpoint, options.digest)


def _add_file_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    diff = commands.add_parser("diff", help="write the delta that leads from one checkpoint to another")
    diff.add_argument("base", type=Path, metavar="BASE", help=CHECKPOINT)
    diff.add_argument("target", type=Path, metavar="TARGET", help="the same tensors with other bits")
    diff.add_argument("out", type=Path, metavar="OUT", help="the delta file to write")
    diff.add_argument(
        "--encoding", choices=ENCODINGS, default="auto", help="default: auto, the smallest for each chunk of a tensor"
    )
    diff.add_argument(
        "--version-number", type=_version, default=1, metavar="N", help="the version that TARGET is (default: 1)"
    )
    apply = commands.add_parser("apply", help="write the checkpoint that a delta makes of another one")
    apply.add_argument("base", type=Path, metavar="BASE", help=CHECKPOINT)
    apply.add_argument("delta", type=Path, metavar="DELTA")
    apply.add_argument("out", type=Path, metavar="OUT", help="as BASE: a file, or a folder with the same shards")
    fold = commands.add_parser("fold", help="make one delta of several in a row, oldest first")
    fold.add_argument("deltas", type=Path, nargs="+", metavar="DELTA")
    fold.add_argument("out", type=Path, metavar="OUT", help="the delta file to write")
    fold.add_argument(
        "--base",
        type=Path,
        default=None,
        metavar="CHECKPOINT",
        help="what the first builds on; context encoding needs it",
    )
    inspect = commands.add_parser("inspect", help="say what a delta holds: digests, tensors, encodings, bytes")
    inspect.add_argument("delta", type=Path, metavar="DELTA")
    verify = commands.add_parser("verify", help="check a checkpoint's files and give the digest of its state")
    verify.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help=CHECKPOINT)
    verify.add_argument(
        "--digest", default=None, metavar="HEX", help="fail unless the state is this one (12 digits or more)"
    )


def _version(text: str) -> int:
    number = int(text)
    if not 0 <= number < 2**63:
        raise ValueError(text)
    return number

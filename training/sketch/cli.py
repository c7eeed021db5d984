"""The command line of sketch sync: `groundhop sketch COMMAND`. Each command's modules are imported when it runs."""

import argparse
from pathlib import Path

from groundhop.errors import GroundhopError, InputError

CHECKPOINT = "a safetensors file, or a Hugging Face checkpoint folder"


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `groundhop sketch`."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="COMMAND")
    inspect = commands.add_parser("inspect", help="say what a sketch record holds")
    inspect.add_argument("record", type=Path, metavar="RECORD")
    create = commands.add_parser("create", help="make a receiving site of a checkpoint, with FP32 masters")
    create.add_argument("site", type=Path, metavar="SITE", help="a folder that is empty or not there")
    create.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help=CHECKPOINT)
    create.add_argument("--masters", type=Path, default=None, metavar="CHECKPOINT", help="the FP32 weights of it")
    create.add_argument(
        "--modules", nargs="+", default=None, help="layers that the trainer sketches (default: LoGRA's)"
    )
    create.add_argument("--version", type=int, default=0, dest="version_number", help="of the checkpoint (default: 0)")
    apply = commands.add_parser("apply", help="bring a site to a record, and write the step as a delta file")
    apply.add_argument("site", type=Path, metavar="SITE")
    apply.add_argument("record", type=Path, metavar="RECORD")
    apply.add_argument("out", type=Path, metavar="DELTA", help="for `groundhop hotload apply`")
    apply.add_argument("--repair", type=Path, default=None, metavar="DELTA", help="where a sketch gives other bits")


def run(options: argparse.Namespace) -> str:
    """Run the command that `options` name. Returns what to print.

    Raises: GroundhopError; what the file system refuses becomes an InputError that names the file.
    """
    from groundhop.training.sketch import commands

    try:
        match options.action:
            case "inspect":
                return commands.inspect(options.record)
            case "create":
                given = options.modules, options.masters, options.version_number
                return commands.create(options.site, options.checkpoint, *given)
            case _:
                return commands.apply(options.site, options.record, options.out, options.repair)
    except GroundhopError:
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise InputError(f"{where}{error.strerror or error}") from error

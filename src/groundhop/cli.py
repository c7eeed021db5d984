"""The `groundhop` command. A stage's modules are imported only when it runs, so `--help` needs none of them."""

import argparse
import logging
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from groundhop import __version__
from groundhop.errors import GroundhopError

if TYPE_CHECKING:
    from groundhop.runs import Run

STAGES = {
    "pages": "import or crawl pages, extract text and links, build the search index",
    "graph": "rank the pages, mark the band of middling popularity, list hops",
    "questions": "write multi-hop questions and keep those that need their hops",
    "rollouts": "let a policy try each training question several times, and judge the answers",
    "buckets": "sort questions by pass rate; write SFT traces and GRPO tasks",
    "sft": "train on traces, loss on the assistant's tokens only",
    "grpo": "train on judged rollouts against live servers that take each step's weights",
    "evaluate": "compare the policies on held-out questions, or on a benchmark file",
    "report": "write report.html",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0 when done, 1 on an error of ours, 2 on wrong usage, 130 when interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser(whole={"hotload", "sketch"} & set(given)).parse_args(given)
    _set_up_logging(options.verbose)
    try:
        return _dispatch(options)
    except GroundhopError as error:
        print(f"groundhop: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("groundhop: stopped; run the same command again to go on", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dispatch(options: argparse.Namespace) -> int:
    match options.command:
        case "doctor":
            from groundhop.doctor import report

            text, healthy = report()
            print(text)
            return 0 if healthy else 1
        case "search":
            from groundhop.stages import search

            print(search(_run(options), options.query, options.visit))
        case "serve":
            from groundhop.stages import serve

            serve(_run(options), options.policy)
        case "view":
            from groundhop.view import view

            print(view(Path(options.run)))
        case "memory":
            from groundhop.training.logra.memory import read_shapes, table

            print(table(read_shapes(Path(options.model_config)), rank=options.rank, ranks=options.processes))
        case "hotload":
            from groundhop.training.hotload import cli as hotload

            if text := hotload.run(options):
                print(text)
        case "sketch":
            from groundhop.training.sketch import cli as sketch

            if text := sketch.run(options):
                print(text)
        case "run":
            return _run_all(options)
        case stage:
            return _run_stage(options, stage)
    return 0


def _run_all(options: argparse.Namespace) -> int:
    from groundhop import plan, stages

    run = _run(options)
    if options.dry_run:
        print(plan.plan(run))
        return 0
    stages.run_all(run)
    print(f"done: {run.root / 'report.html'}")
    return 0


def _run_stage(options: argparse.Namespace, stage: str) -> int:
    from groundhop import plan, stages

    run = _run(options)
    if options.dry_run:
        print(plan.plan(run, only=stage))
        return 0
    print(stages.run_stage(run, stage, options.policy, options.questions))
    return 0


def _run(options: argparse.Namespace) -> "Run":
    from groundhop.config import load
    from groundhop.runs import Run

    config = load(Path(options.config), options.set)
    return Run(Path(options.run_dir) if options.run_dir else Path("runs") / config.name, config)


def _parser(whole: Collection[str] = ()) -> argparse.ArgumentParser:
    """All commands; those of hot-load and sketch sync with their own options where `whole` names them."""
    parser = argparse.ArgumentParser(prog="groundhop", description="From web pages to a better search agent.")
    parser.add_argument("--version", action="version", version=f"groundhop {__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="show debug messages")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_config(commands.add_parser("run", help="all stages in order, each skipped where its output is complete"))
    for name, text in STAGES.items():
        command = commands.add_parser(name, help=text)
        _add_config(command)
        command.add_argument(
            "--policy",
            choices=("base", "sft", "grpo"),
            default=None,
            help="which policy's rollouts or buckets (default: base)",
        )
        command.add_argument(
            "--questions",
            default=None,
            metavar="FILE",
            help="evaluate: a JSONL of id, question, answer, aliases, or BrowseComp's CSV",
        )
    serve = commands.add_parser("serve", help="start vLLM replicas of a policy and keep them until Ctrl-C")
    _add_config(serve)
    serve.add_argument("--policy", choices=("base", "sft", "grpo"), default="base")
    search = commands.add_parser("search", help="show what the agent would see")
    search.add_argument("query", nargs="+")
    search.add_argument(
        "--visit", metavar="URL", default=None, help="visit this page with the query as `find` instead of searching"
    )
    _add_config(search, flag=True)
    view = commands.add_parser("view", help="say what a run folder holds")
    view.add_argument("run", metavar="RUN_DIR")
    weights = commands.add_parser("hotload", help="weight deltas: diff, apply, fold, inspect and verify checkpoints")
    if "hotload" in whole:
        from groundhop.training.hotload.cli import add_commands

        add_commands(weights)
    sketches = commands.add_parser("sketch", help="LoGRA steps as integer factors: read records, keep a receiving site")
    if "sketch" in whole:
        from groundhop.training.sketch.cli import add_commands as add_sketch_commands

        add_sketch_commands(sketches)
    _add_memory(commands.add_parser("memory", help="what training a model would hold in memory, with AdamW and LoGRA"))
    commands.add_parser("doctor", help="say what this machine has and lacks, and what to do about it")
    return parser


def _add_config(parser: argparse.ArgumentParser, flag: bool = False) -> None:
    if flag:
        parser.add_argument("--config", default="configs/demo.toml")
    else:
        parser.add_argument("config", metavar="CONFIG.toml")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key, e.g. --set grpo.steps=10"
    )
    parser.add_argument("--run-dir", default=None, metavar="DIR", help="where the run lives (default: runs/<name>)")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the plan with counts, costs and times, do nothing"
    )


def _add_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model-config",
        required=True,
        metavar="PATH",
        help="a model's config.json or its folder, as in configs/models",
    )
    parser.add_argument("--rank", type=int, default=256, help="rows of a LoGRA projection (default: 256)")
    parser.add_argument("--processes", type=int, default=1, help="processes that share the weights (default: 1)")


def _set_up_logging(verbose: bool) -> None:
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.logging import RichHandler

        handler: logging.Handler = RichHandler(console=Console(stderr=True), show_path=False, markup=False)
        form = "%(message)s"
    else:
        handler, form = logging.StreamHandler(), "%(asctime)s %(levelname).1s %(message)s"
    handler.setFormatter(logging.Formatter(form, datefmt="%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("groundhop").setLevel(logging.DEBUG if verbose else logging.INFO)


if __name__ == "__main__":
    sys.exit(main())

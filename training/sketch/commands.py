"""`groundhop sketch inspect | create | apply`: sketch records and the site that takes them, without a trainer and without torch.

Each returns the text to print and raises one of our errors on bad input.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

from groundhop.errors import InputError, MissingError
from groundhop.training.hotload.atomic import replacing
from groundhop.training.hotload.checkpoint import open_checkpoint
from groundhop.training.logra.memory import TARGETS
from groundhop.training.sketch.masters import named_targets
from groundhop.training.sketch.record import read_record
from groundhop.training.sketch.site import Site


def inspect(record: Path) -> str:
    """Say what a record holds."""
    read = read_record(_existing(record))
    head = read.head
    rows = [
        f"{sketch.row.name}  {sketch.row.rows}x{sketch.row.columns}  sketch from version {sketch.row.since}, "
        f"{len(sketch.row.steps)} steps, rank {'/'.join(str(step.rank) for step in sketch.row.steps)}, "
        f"{'/'.join(str(step.bits) for step in sketch.row.steps)} bits  {sketch.nbytes:,} bytes"
        for sketch in read.sketches
    ]
    for kind, delta in (("delta", read.delta), ("master", read.masters)):
        for entry in delta.entries:
            shape = "x".join(map(str, entry.shape)) or "scalar"
            rows.append(f"{entry.name}  {shape}  {kind}  {entry.tensor_delta.nbytes:,} bytes")
    return "\n".join(
        [
            f"version      {head.version}, builds on {head.base}",
            f"from state   {head.base_digest}",
            f"to state     {head.digest}",
            f"masters from {head.chain}",
            f"bytes        {record.stat().st_size:,}; sketches {len(read.sketches)}, "
            f"deltas {len(read.delta.entries)}, masters {len(read.masters.entries)}",
            *rows,
        ]
    )


def create(site: Path, checkpoint: Path, modules: Sequence[str] | None, masters: Path | None, version: int) -> str:
    """Make a site of a checkpoint. Raises: InputError where one is in the folder already, or no weight is of `modules`.

    None stands for the layers that LoGRA trains unless it is told otherwise.
    """
    if site.exists() and any(site.iterdir()):
        raise InputError(f"{site} is not empty: need a folder of its own for a site")
    weights = open_checkpoint(checkpoint)
    targets = named_targets(weights.specs, modules or TARGETS)
    made = Site.create(site, weights, targets, open_checkpoint(masters) if masters else None, version=version)
    return f"{site}: version {made.version}, {len(targets)} masters\nstate {made.digest}"


def apply(site: Path, record: Path, out: Path, repair: Path | None) -> str:
    """Bring a site to a record and write the step as a delta file. `repair`: the delta for weights whose sketch fails here.

    Raises: MissingError that names these weights where there is no `repair`.
    """

    def fetch(names: Collection[str]) -> bytes:
        if repair is None:
            raise MissingError(f"need the delta of {', '.join(names)} from the trainer: pass it with --repair")
        return _existing(repair).read_bytes()

    applied = Site(site).apply(_existing(record).read_bytes(), fetch)
    with replacing(out) as path:
        path.write_bytes(applied.delta)
    mended = f"; by delta instead of sketch: {', '.join(applied.repaired)}" if applied.repaired else ""
    return f"{out}: version {applied.version}, {len(applied.delta):,} bytes{mended}\nstate {applied.digest}"


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise MissingError(f"no file {path}")
    return path

"""Say what a run folder holds: stages, counts, drops by reason, buckets."""

import json
from collections import Counter
from pathlib import Path

from groundhop import jsonl
from groundhop.errors import MissingError
from groundhop.records import Failure
from groundhop.stages import ORDER


def view(root: Path) -> str:
    """A table of the run's stages as text. Raises: MissingError when `root` is no run folder."""
    if not (root / "manifest.json").exists():
        raise MissingError(f"{root} holds no manifest.json: it is not the folder of a run")
    lines = [f"run {root}"]
    for stage in ORDER:
        lines += _stage_lines(root / stage, stage)
    report = root / "report.html"
    lines.append(f"report: {report if report.exists() else 'not written yet'}")
    return "\n".join(lines)


def _stage_lines(folder: Path, stage: str) -> list[str]:
    if not folder.exists():
        return [f"  {stage:<14} not begun"]
    done = folder / "done.json"
    if not done.exists():
        return [f"  {stage:<14} begun, not finished: run again to go on"]
    summary = json.loads(done.read_text())
    counts = "  ".join(f"{key} {value}" for key, value in summary.items() if isinstance(value, int | float | str))
    lines = [f"  {stage:<14} {counts}"]
    drops = Counter(row.reason for row in jsonl.read_if_there(folder / "failures.jsonl", Failure))
    if drops:
        lines.append(f"  {'':<14} dropped: " + ", ".join(f"{reason} {count}" for reason, count in drops.most_common()))
    return lines

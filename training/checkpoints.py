"""Checkpoints that a killed run goes on from: only complete ones count, and a finished model appears all at once."""

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from groundhop import jsonl
from groundhop.runs import StageFolder

logger = logging.getLogger(__name__)

_COMPLETE = "complete"
_NOT_COPIED = {"config.json", "groundhop_model.json"}
_WEIGHTS = {".safetensors", ".bin", ".pth", ".gguf"}


def last_complete(folder: Path) -> Path | None:
    """The newest checkpoint in `folder` that was written to its end; half-written ones are deleted."""
    if not folder.exists():
        return None
    for path in folder.glob("checkpoint-*"):
        if not (path / _COMPLETE).exists():
            shutil.rmtree(path)
    found = sorted(folder.glob("checkpoint-*"), key=step_of)
    return found[-1] if found else None


def step_of(checkpoint: Path) -> int:
    """How many optimizer steps a checkpoint holds."""
    return int(checkpoint.name.rpartition("-")[2])


class KeepLastComplete(TrainerCallback):
    """Marks a checkpoint as complete once all of it is on the disk, and only then deletes the one before."""

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called by the trainer after it wrote a checkpoint."""
        folder = Path(args.output_dir)
        written = folder / f"checkpoint-{state.global_step}"
        for path in written.rglob("*"):
            if path.is_file():
                _flush(path)
        (written / _COMPLETE).touch()
        _flush(written)
        for path in folder.glob("checkpoint-*"):
            if path != written:
                shutil.rmtree(path)


def forget_after(folder: StageFolder, step: int) -> None:
    """Drop rows of `metrics.jsonl` that belong to optimizer steps after `step`: they will be done again."""
    path = folder.path / "metrics.jsonl"
    rows = jsonl.read_if_there(path, dict[str, Any])
    kept = [row for row in rows if int(row.get("step", 0)) <= step]
    if len(kept) < len(rows):
        jsonl.write(path, kept)


def save_model(model: Any, source: Path, target: Path) -> None:
    """Write `model` in BF16 as a Hugging Face folder, with tokenizer and template of `source`; whole or not at all."""
    work = target.with_name(target.name + ".tmp")
    shutil.rmtree(work, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(work)
    for path in sorted(source.iterdir()):
        copied = path.is_file() and path.suffix not in _WEIGHTS and not path.name.endswith(".index.json")
        if copied and path.name not in _NOT_COPIED:
            shutil.copyfile(path, work / path.name)
    _write_config(source / "config.json", work / "config.json")
    for path in work.iterdir():
        _flush(path)
    shutil.rmtree(target, ignore_errors=True)
    work.replace(target)


def _write_config(source: Path, target: Path) -> None:
    # Trainers leave settings of theirs in the model's config, such as use_cache; servers get the one they know.
    config = json.loads(source.read_text("utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = "bfloat16"
    target.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

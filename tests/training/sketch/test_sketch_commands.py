"""`groundhop sketch` on files: what a site does without a trainer, and without torch."""

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sketch_builders import TARGETS, Trainer

from groundhop.errors import InputError, MissingError
from groundhop.training.hotload.checkpoint import open_checkpoint, write_checkpoint
from groundhop.training.hotload.commands import apply as apply_delta_file
from groundhop.training.sketch import cli
from groundhop.training.sketch.sender import Sender


def command(*words: object) -> str:
    parser = argparse.ArgumentParser()
    cli.add_commands(parser)
    return cli.run(parser.parse_args([str(word) for word in words]))


def files(folder: Path, steps: int = 2) -> Trainer:
    """A checkpoint and records of the steps after it; the trainer as it stands then."""
    trainer = Trainer()
    write_checkpoint(trainer.checkpoint(), folder / "0.safetensors")
    sender = Sender(trainer.named(), trainer.checkpoint(), TARGETS)
    for number in range(1, steps + 1):
        sender.add(trainer.step())
        (folder / f"{number}.record").write_bytes(sender.send(trainer.named()).content)
    return trainer


def test_records_become_deltas_that_lead_to_the_trainers_checkpoint(tmp_path: Path) -> None:
    trainer = files(tmp_path)
    command("create", tmp_path / "site", tmp_path / "0.safetensors", "--modules", "0", "1")
    for number in (1, 2):
        command("apply", tmp_path / "site", tmp_path / f"{number}.record", tmp_path / f"{number}.delta")
        names = (f"{number - 1}.safetensors", f"{number}.delta", f"{number}.safetensors")
        apply_delta_file(*(tmp_path / name for name in names))
    held = open_checkpoint(tmp_path / "2.safetensors")
    assert all(np.array_equal(held.bits(name), bits) for name, bits in trainer.canonical().items())


def test_inspect_names_what_goes_how(tmp_path: Path) -> None:
    files(tmp_path, steps=1)
    said = command("inspect", tmp_path / "1.record")
    assert "layer.0.weight  48x400  sketch from version 0, 1 steps, rank 4, 8 bits" in said
    assert "norm.weight  64  delta" in said


def test_a_site_whose_sketch_fails_says_whose_delta_it_needs(tmp_path: Path) -> None:
    files(tmp_path)
    command("create", tmp_path / "site", tmp_path / "0.safetensors", "--modules", "0", "1")
    # Another master than the card says: the sketch cannot give the promised bits.
    masters = tmp_path / "site" / "snapshot" / "masters.safetensors"
    raw = bytearray(masters.read_bytes())
    raw[-4096:] = bytes(4096)
    masters.write_bytes(raw)
    with pytest.raises(MissingError, match=r"layer.1.weight from the trainer.*--repair"):
        command("apply", tmp_path / "site", tmp_path / "1.record", tmp_path / "1.delta")
    assert not (tmp_path / "1.delta").exists()


@pytest.mark.parametrize("wrong", ["modules", "full folder"])
def test_a_site_that_cannot_be_made_is_refused(tmp_path: Path, wrong: str) -> None:
    files(tmp_path, steps=0)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").touch()
    folder, modules = ("full", ("0", "1")) if wrong == "full folder" else ("site", ("q_proj",))
    with pytest.raises(InputError, match="not empty" if wrong == "full folder" else "no weight of q_proj"):
        command("create", tmp_path / folder, tmp_path / "0.safetensors", "--modules", *modules)


def test_a_site_needs_no_torch(tmp_path: Path) -> None:
    files(tmp_path, steps=1)
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from groundhop.training.sketch import commands\n"
        "folder = Path(sys.argv[1])\n"
        "commands.create(folder / 'site', folder / '0.safetensors', ['0', '1'], None, 0)\n"
        "print(commands.apply(folder / 'site', folder / '1.record', folder / '1.delta', None))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert "version 1" in done.stdout, done.stderr

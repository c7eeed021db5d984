"""Failure cases of other systems (area 8 of the case log) that touch files, with inputs of our own; named by their ids."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small_states import Held, changed, held_by, state, tree, write_folder

from groundhop.errors import ChecksumError, InputError
from groundhop.training.hotload import commands
from groundhop.training.hotload.bits import ITEM_BYTES, Bits, TensorSpec, bits_of
from groundhop.training.hotload.checkpoint import open_checkpoint, write_checkpoint
from groundhop.training.hotload.cli import ENCODINGS
from groundhop.training.hotload.delta import read_delta

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def of(**tensors: tuple[str, Bits]) -> Held:
    sizes = {name: raw.nbytes // ITEM_BYTES[kind] for name, (kind, raw) in tensors.items()}
    specs = {name: TensorSpec(name=name, dtype=kind, shape=(sizes[name],)) for name, (kind, _) in tensors.items()}
    return Held(specs, {name: raw for name, (_, raw) in tensors.items()})


def step(folder: Path, base: Held, target: Held, encoding: str = "auto") -> tuple[Path, Path, Path]:
    """Write both states and the delta between them."""
    paths = folder / "base.safetensors", folder / "target.safetensors", folder / "step.delta"
    write_checkpoint(base, paths[0])
    write_checkpoint(target, paths[1])
    commands.diff(*paths, encoding)  # type: ignore[arg-type]
    return paths


# C8-01: changes found by comparing values miss swapped zeros and send NaN for ever.


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_c8_01_exactly_the_elements_whose_bits_differ_are_sent(tmp_path: Path, encoding: str) -> None:
    every = np.arange(65536, dtype=np.uint16)
    swaps = {0x0000: 0x8000, 0x8000: 0x0000, 0x7FC1: 0x7FA1, 0xFF80: 0x7F80, 0x0001: 0x0000, 0xFFFF: 0x7FFF}
    after = every.copy()
    after[list(swaps)] = list(swaps.values())
    base = of(
        bf=("BF16", every), half=("F16", every), wide=("F32", every.astype(np.uint32) << 16), still=("F16", every)
    )
    target = of(
        bf=("BF16", after), half=("F16", after), wide=("F32", after.astype(np.uint32) << 16), still=("F16", every)
    )
    a, b, delta = step(tmp_path, base, target, encoding)
    commands.apply(a, delta, tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == b.read_bytes()
    if encoding != "dense":
        sent = {entry.name: entry.changed for entry in read_delta(delta).entries}
        assert sent == {"bf": len(swaps), "half": len(swaps), "wide": len(swaps)}


# C8-03: differences of values, added back, are not exact.


@pytest.mark.parametrize("encoding", ["add", "xor", "context"])
def test_c8_03_any_pattern_may_become_any_other(tmp_path: Path, encoding: str) -> None:
    random = np.random.default_rng(11)
    every = np.arange(65536, dtype=np.uint16)
    words = random.integers(0, 2**32, 5000, dtype=np.uint32)
    base = of(a=("BF16", every), b=("F32", words))
    target = of(a=("BF16", random.permutation(every)), b=("F32", words ^ random.permutation(words)))
    a, b, delta = step(tmp_path, base, target, encoding)
    commands.apply(a, delta, tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == b.read_bytes()


# C8-04: a crash between two tensors, and the same delta again on what is left.

KILLED = """
import os, signal, sys
from pathlib import Path
from groundhop.training.hotload.checkpoint import open_checkpoint, write_checkpoint
from groundhop.training.hotload.delta import read_delta
from groundhop.training.hotload.moved import Moved
base, delta, out, last = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
class Killed(Moved):
    left = last
    def bits(self, name):
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().bits(name)
source = open_checkpoint(base)
write_checkpoint(Killed(source, read_delta(delta)), out, like=source)
"""


@pytest.mark.parametrize("in_place", [False, True])
def test_c8_04_killed_between_two_tensors_and_run_again(tmp_path: Path, in_place: bool) -> None:
    base, target, delta = step(tmp_path, state(), changed(state()), "xor")
    before, out = base.read_bytes(), base if in_place else tmp_path / "out.safetensors"
    for last in (1, 3):
        script = [sys.executable, "-c", KILLED, base, delta, out, str(last)]
        assert subprocess.run(script, check=False, env={**os.environ, "NUMBA_NUM_THREADS": "1"}).returncode == -9
        assert base.read_bytes() == before
    commands.apply(base, delta, out)
    assert out.read_bytes() == target.read_bytes()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_c8_04_a_copy_that_another_tool_left_half_moved_goes_the_rest_of_the_way(tmp_path: Path, encoding: str) -> None:
    base, after = state(), changed(state())
    _, target, delta = step(tmp_path, base, after, encoding)
    half = base.copy()
    for name in sorted(base.specs):
        half.held[name] = after.held[name]
        write_checkpoint(half, tmp_path / "half.safetensors")
        commands.apply(tmp_path / "half.safetensors", delta, tmp_path / "out.safetensors")
        assert (tmp_path / "out.safetensors").read_bytes() == target.read_bytes()


def test_c8_04_a_tensor_torn_in_the_middle_is_refused(tmp_path: Path) -> None:
    base, after = state(), changed(state(), share=0.3)
    _, _, delta = step(tmp_path, base, after, "xor")
    torn = base.copy()
    torn.held[EMBEDDING][:100] = after.held[EMBEDDING][:100]
    write_checkpoint(torn, tmp_path / "torn.safetensors")
    with pytest.raises(ChecksumError):
        commands.apply(tmp_path / "torn.safetensors", delta, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


# C8-06: a delta on the wrong base, and the same delta again.


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_c8_06_a_missed_version_is_refused_and_a_second_delivery_changes_nothing(tmp_path: Path, encoding: str) -> None:
    version = [state(), changed(state(), seed=1), changed(changed(state(), seed=1), seed=2)]
    base, target, delta = step(tmp_path, version[1], version[2], encoding)
    write_checkpoint(version[0], tmp_path / "older.safetensors")
    with pytest.raises(ChecksumError, match=open_checkpoint(base).digest[:12]):
        commands.apply(tmp_path / "older.safetensors", delta, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()
    assert "held it already" in commands.apply(target, delta, tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == target.read_bytes()


def test_c8_06_the_missed_deltas_in_order_lead_there(tmp_path: Path) -> None:
    versions = [state(), changed(state(), seed=1), changed(changed(state(), seed=1), seed=2)]
    write_checkpoint(versions[0], tmp_path / "here.safetensors")
    for number in (1, 2):
        folder = tmp_path / str(number)
        _, target, delta = step(folder, versions[number - 1], versions[number])
        commands.apply(tmp_path / "here.safetensors", delta, tmp_path / "here.safetensors")
        assert (tmp_path / "here.safetensors").read_bytes() == target.read_bytes()


# C8-08: tied embeddings.


def test_c8_08_one_storage_under_two_names_is_written_under_both(tmp_path: Path) -> None:
    weights = state(tied=True)
    weights.held[HEAD] = weights.held[EMBEDDING]
    write_checkpoint(weights, tmp_path / "x.safetensors")
    opened = open_checkpoint(tmp_path / "x.safetensors")
    assert opened.bits(HEAD).tobytes() == opened.bits(EMBEDDING).tobytes() == weights.held[EMBEDDING].tobytes()


@pytest.mark.parametrize("receiver", [True, False], ids=["receiver holds both", "receiver holds one"])
@pytest.mark.parametrize("made_from", [(True, True), (True, False), (False, True), (False, False)])
def test_c8_08_a_head_that_one_side_does_not_store_stays_tied(tmp_path: Path, made_from, receiver: bool) -> None:
    _, _, delta = step(tmp_path, state(made_from[0]), changed(state(made_from[1])))
    folder = write_folder(state(receiver), tmp_path / "receiver")
    commands.apply(folder, delta, tmp_path / "out")
    assert held_by(open_checkpoint(tmp_path / "out")) == held_by(changed(state(receiver)))


def untied() -> Held:
    weights = state(tied=True)
    weights.held[HEAD] = weights.held[HEAD].copy()
    weights.held[HEAD][5] ^= 1
    return weights


def test_c8_08_a_head_that_is_not_tied_is_not_made_up(tmp_path: Path) -> None:
    for base, target in ((untied(), state()), (state(), untied())):
        with pytest.raises(InputError, match=r"lm_head\.weight"):
            step(tmp_path, base, target)


def test_c8_08_a_delta_that_unties_the_head_needs_a_receiver_that_stores_it(tmp_path: Path) -> None:
    _, _, delta = step(tmp_path, state(tied=True), untied())
    write_checkpoint(state(), tmp_path / "one.safetensors")
    with pytest.raises(InputError, match=r"unties 'lm_head\.weight'"):
        commands.apply(tmp_path / "one.safetensors", delta, tmp_path / "out.safetensors")


# C8-09: transposed and sliced tensors.


def layouts(whole):
    return {"t": whole.T, "columns": whole[:, 1:3], "rows": whole[::2], "all": whole}


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("kind", ["float32", "float16", "int8", "bfloat16"])
def test_c8_09_what_is_written_are_the_row_major_values(tmp_path: Path, library: str, kind: str) -> None:
    torch = pytest.importorskip("torch")
    if library == "numpy" and kind == "bfloat16":
        pytest.skip("numpy has no bfloat16")
    plain = torch.arange(12, dtype=getattr(torch, kind)).reshape(3, 4)
    names = {"float32": "F32", "float16": "F16", "int8": "I8", "bfloat16": "BF16"}
    tensors = layouts(plain if library == "torch" else plain.numpy())
    specs = {name: TensorSpec(name=name, dtype=names[kind], shape=tuple(t.shape)) for name, t in tensors.items()}
    write_checkpoint(Held(specs, {name: bits_of(t) for name, t in tensors.items()}), tmp_path / "x.safetensors")
    load_file = pytest.importorskip("safetensors.torch").load_file
    got = {name: tensor.float().flatten().tolist() for name, tensor in load_file(tmp_path / "x.safetensors").items()}
    assert got == {
        "t": [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11],
        "columns": [1, 2, 5, 6, 9, 10],
        "rows": [0, 1, 2, 3, 8, 9, 10, 11],
        "all": list(range(12)),
    }


# C8-20: a step that changes nothing.


def test_c8_20_a_step_without_changes_is_a_small_delta_that_moves_the_version(tmp_path: Path) -> None:
    folder = write_folder(state(), tmp_path / "base")
    commands.diff(folder, folder, tmp_path / "d", version=8)
    read = read_delta(tmp_path / "d")
    assert (read.version, read.entries, read.base_digest) == (8, (), read.digest)
    assert (tmp_path / "d").stat().st_size < 300
    commands.apply(folder, tmp_path / "d", tmp_path / "out")
    assert tree(tmp_path / "out") == tree(folder)

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_states import Held, changed, held_by, state, tree, write_folder

from groundhop.cli import main
from groundhop.training.hotload.bits import TensorSpec
from groundhop.training.hotload.checkpoint import open_checkpoint, write_checkpoint
from groundhop.training.hotload.cli import ENCODINGS
from groundhop.training.hotload.delta import read_delta

Groundhop = Callable[..., str]


@pytest.fixture
def groundhop(capsys: pytest.CaptureFixture[str]) -> Groundhop:
    """Run `groundhop hotload ...`; gives what it prints."""

    def run(*arguments: object, code: int = 0) -> str:
        assert main(["hotload", *map(str, arguments)]) == code
        printed = capsys.readouterr()
        return printed.out if code == 0 else printed.err

    return run


def file(weights: Held, path: Path) -> Path:
    write_checkpoint(weights, path)
    return path


def chain(folder: Path, length: int, groundhop: Groundhop, encoding: str = "auto") -> tuple[list[Path], list[Path]]:
    """Checkpoints v0 ... v`length` and the deltas between them; some changes of a step are taken back by the next."""
    states, deltas = [file(state(), folder / "v0.safetensors")], []
    for number in range(1, length + 1):
        target = folder / f"v{number}.safetensors"
        weights = state() if number == 3 else changed(state(), seed=number)
        states.append(file(weights, target))
        deltas.append(folder / f"v{number}.delta")
        groundhop("diff", states[-2], target, deltas[-1], "--encoding", encoding, "--version-number", number)
    return states, deltas


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("share", [0.02, 0.4, 1.0])
def test_apply_of_diff_gives_the_target_file_byte_for_byte(tmp_path: Path, groundhop, encoding, share) -> None:
    base, target = file(state(), tmp_path / "a.safetensors"), file(changed(state(), share), tmp_path / "b.safetensors")
    groundhop("diff", base, target, tmp_path / "d", "--encoding", encoding)
    groundhop("apply", base, tmp_path / "d", tmp_path / "c.safetensors")
    assert (tmp_path / "c.safetensors").read_bytes() == target.read_bytes()


@pytest.mark.parametrize("encoding", ["auto", "context"])
def test_folders_of_other_sharding_meet_in_their_tensors(tmp_path: Path, groundhop, encoding) -> None:
    base = write_folder(state(), tmp_path / "base", shards=3)
    target = file(changed(state()), tmp_path / "target.safetensors")
    groundhop("diff", base, target, tmp_path / "d", "--encoding", encoding)
    groundhop("apply", base, tmp_path / "d", tmp_path / "out")
    assert tree(tmp_path / "out") == tree(write_folder(changed(state()), tmp_path / "wanted", shards=3))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["BF16", "F16", "F32", "U8", "F64", "F8_E4M3"]),
    values=st.lists(st.tuples(st.binary(min_size=8, max_size=8), st.binary(min_size=8, max_size=8)), max_size=40),
    encoding=st.sampled_from(ENCODINGS),
)
def test_any_bits_of_any_type_survive(tmp_path: Path, groundhop, kind, values, encoding) -> None:
    before, after = (np.frombuffer(b"".join(pair[side] for pair in values), np.uint8) for side in (0, 1))
    shape = (before.size // {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}.get(kind, 1),)
    spec = TensorSpec(name="w", dtype=kind, shape=shape)
    base, target = (
        file(Held({"w": spec}, {"w": raw.view(spec.unit)}), tmp_path / f"{name}.safetensors")
        for name, raw in (("a", before), ("b", after))
    )
    groundhop("diff", base, target, tmp_path / "d", "--encoding", encoding)
    groundhop("apply", base, tmp_path / "d", tmp_path / "c.safetensors")
    assert held_by(open_checkpoint(tmp_path / "c.safetensors")) == {"w": after.tobytes()}


@pytest.mark.parametrize("encoding", ["auto", "xor", "add", "overwrite"])
def test_a_fold_applied_once_gives_what_each_delta_gives(tmp_path: Path, groundhop, encoding) -> None:
    states, deltas = chain(tmp_path, 4, groundhop, encoding)
    groundhop("fold", *deltas, tmp_path / "all.delta", "--base", states[0])
    groundhop("apply", states[0], tmp_path / "all.delta", tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == states[-1].read_bytes()
    assert (read_delta(tmp_path / "all.delta").version, read_delta(deltas[-1]).digest) == (
        4,
        read_delta(tmp_path / "all.delta").digest,
    )


def test_a_fold_of_deltas_that_do_not_follow_is_refused(tmp_path: Path, groundhop) -> None:
    states, deltas = chain(tmp_path, 3, groundhop)
    said = groundhop("fold", deltas[0], deltas[2], tmp_path / "x", "--base", states[0], code=1)
    assert said.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_inspect_says_versions_digests_counts_and_encodings(tmp_path: Path, groundhop) -> None:
    base = file(state(), tmp_path / "a.safetensors")
    after = state()
    after.held["model.scales"][[2, 7]] ^= 1
    target = file(after, tmp_path / "b.safetensors")
    groundhop("diff", base, target, tmp_path / "d", "--encoding", "overwrite", "--version-number", 7)
    said = groundhop("inspect", tmp_path / "d")
    row = next(line for line in said.splitlines() if line.startswith("model.scales"))
    assert row.split()[:7] == ["model.scales", "U8", "3x11", "33", "2", "6.061", "%"]
    assert row.split()[-1] == "overwrite"
    assert "version      7\n" in said
    assert open_checkpoint(base).digest in said
    assert open_checkpoint(target).digest in said


def test_verify_gives_the_digest_and_refuses_another(tmp_path: Path, groundhop) -> None:
    folder = write_folder(state(), tmp_path / "a")
    digest = open_checkpoint(folder).digest
    assert groundhop("verify", folder, "--digest", digest[:16]).endswith(f"state {digest}\n")
    assert digest in groundhop("verify", folder, "--digest", "0" * 64, code=1)


def a_delta(folder: Path, groundhop: Groundhop) -> tuple[Path, Path]:
    base = write_folder(state(), folder / "base")
    groundhop("diff", base, file(changed(state()), folder / "t.safetensors"), folder / "d")
    return base, folder / "d"


def test_every_flipped_byte_of_a_delta_is_refused_and_nothing_is_touched(tmp_path: Path, groundhop) -> None:
    base, delta = a_delta(tmp_path, groundhop)
    write_folder(state(seed=1), tmp_path / "out")
    before, whole = tree(tmp_path / "out"), delta.read_bytes()
    random = np.random.default_rng(3)
    for place in [*range(40), *random.choice(len(whole), 40, replace=False)]:
        broken = bytearray(whole)
        broken[place] ^= int(random.integers(1, 256))
        delta.write_bytes(broken)
        assert groundhop("apply", base, delta, tmp_path / "out", code=1).count("\n") == 1
    assert tree(tmp_path / "out") == before


def test_a_delta_that_was_cut_off_is_refused(tmp_path: Path, groundhop) -> None:
    base, delta = a_delta(tmp_path, groundhop)
    whole = delta.read_bytes()
    for length in range(0, len(whole), 97):
        delta.write_bytes(whole[:length])
        groundhop("apply", base, delta, tmp_path / "out", code=1)
    assert not (tmp_path / "out").exists()


def other_shape(weights: Held) -> Held:
    spec = TensorSpec(name="model.scales", dtype="U8", shape=(11, 3))
    return Held({**weights.specs, "model.scales": spec}, weights.held)


def other_type(weights: Held) -> Held:
    spec = TensorSpec(name="model.layers.0.norm.weight", dtype="BF16", shape=(65,))
    return Held({**weights.specs, "model.layers.0.norm.weight": spec}, weights.held)


def one_missing(weights: Held) -> Held:
    return Held({name: spec for name, spec in weights.specs.items() if name != "model.scales"}, weights.held)


@pytest.mark.parametrize("make", [other_shape, other_type, one_missing])
def test_checkpoints_of_other_tensors_are_refused_by_name(tmp_path: Path, groundhop, make) -> None:
    base, target = file(state(), tmp_path / "a.safetensors"), file(make(state()), tmp_path / "b.safetensors")
    said = groundhop("diff", base, target, tmp_path / "d", code=1)
    assert ("model.scales" in said or "model.layers.0.norm.weight" in said, said.count("\n")) == (True, 1)
    assert not (tmp_path / "d").exists()


def test_an_input_is_never_the_output(tmp_path: Path, groundhop) -> None:
    base, delta = a_delta(tmp_path, groundhop)
    before = tree(tmp_path)
    groundhop("diff", base, tmp_path / "t.safetensors", tmp_path / "t.safetensors", code=1)
    groundhop("diff", base, tmp_path / "t.safetensors", base / "config.json", code=1)
    groundhop("diff", base, tmp_path / "t.safetensors", base, code=1)
    groundhop("fold", delta, delta, code=1)
    assert tree(tmp_path) == before


def test_apply_may_write_over_its_own_base(tmp_path: Path, groundhop) -> None:
    base, delta = a_delta(tmp_path, groundhop)
    groundhop("apply", base, delta, base)
    assert held_by(open_checkpoint(base)) == held_by(changed(state()))


def test_what_is_absent_or_no_delta_is_said_in_one_line(tmp_path: Path, groundhop) -> None:
    base, delta = a_delta(tmp_path, groundhop)
    for arguments in (
        ("apply", base, tmp_path / "none", tmp_path / "x"),
        ("apply", tmp_path / "none", delta, tmp_path / "x"),
        ("apply", base, base, tmp_path / "x"),
        ("apply", delta, delta, tmp_path / "x"),
        ("inspect", base / "config.json"),
        ("verify", delta),
        ("verify", tmp_path / "none"),
        ("diff", base, tmp_path / "none", tmp_path / "x"),
        ("fold", tmp_path / "none", tmp_path / "x"),
    ):
        assert groundhop(*arguments, code=1).count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_a_full_disk_ends_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    write_checkpoint(state(), tmp_path / "a.safetensors")
    write_checkpoint(changed(state()), tmp_path / "b.safetensors")
    main(["hotload", "diff", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors"), str(tmp_path / "d")])

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    command = [sys.executable, "-B", "-m", "groundhop.cli", "hotload", "apply", "a.safetensors", "d", "out.safetensors"]
    ended = subprocess.run(
        command, cwd=tmp_path, preexec_fn=small_files, capture_output=True, text=True, check=False, env=_few_threads()
    )
    assert (ended.returncode, ended.stderr.count("\n"), "File too large" in ended.stderr) == (1, 1, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors", "d"]


def test_diff_and_apply_load_neither_torch_nor_the_safetensors_library(tmp_path: Path) -> None:
    write_checkpoint(state(), tmp_path / "a.safetensors")
    script = (
        "import sys; from groundhop.cli import main\n"
        "main(['hotload','diff','a.safetensors','a.safetensors','d'])\n"
        "main(['hotload','apply','a.safetensors','d','b.safetensors'])\n"
        "print(sorted({'torch', 'safetensors', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True, env=_few_threads()
    )
    assert ended.stdout.splitlines()[-1] == "[]"


def _few_threads() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}

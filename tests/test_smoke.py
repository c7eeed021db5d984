"""The whole run with a tiny random model and real vLLM, once undisturbed and once killed -9 in every stage."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from groundhop import jsonl
from groundhop.records import Rollout, Verdict
from groundhop.stages import ORDER

ROOT = Path(__file__).parents[1]
PATIENCE_S = 420.0

# Sampled text may differ in the last bit with the batch it was sampled in, so of these stages counts are compared;
# everything else must be equal byte for byte.
SAMPLED = {"rollouts-base", "rollouts-sft", "buckets-base", "buckets-sft", "grpo", "evaluate"}


def start(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "groundhop.cli", "run", "configs/smoke.toml", "--run-dir", str(folder)]
    log = (folder.parent / f"{folder.name}.log").open("ab")
    return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)


def finish(folder: Path) -> None:
    process = start(folder)
    code = process.wait(timeout=PATIENCE_S)
    log = (folder.parent / f"{folder.name}.log").read_text(errors="replace")
    assert code == 0, log[-4000:]


def kill_in(folder: Path, stage: str) -> bool:
    """Start the run and kill it -9 once `stage` was begun; whether that came before the stage was done."""
    process = start(folder)
    begun, done = folder / stage / "config.json", folder / stage / "done.json"
    end = time.monotonic() + PATIENCE_S
    while not begun.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.3)
    caught = not done.exists()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return caught


def servers_of(folder: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"vllm" in line and str(folder).encode() in line + _environment(entry):
                found.append(int(entry.name))
    return found


def _environment(entry: Path) -> bytes:
    try:
        return (entry / "environ").read_bytes()
    except OSError:
        return b""


def digests(folder: Path) -> dict[str, str]:
    stages = json.loads((folder / "manifest.json").read_text())["stages"]
    return {
        name: digest
        for stage, facts in stages.items()
        if stage not in SAMPLED
        for name, digest in facts["files"].items()
        if "checkpoint" not in name
    }


def counts(path: Path, kind: type[Rollout] | type[Verdict]) -> Counter[tuple[str, int]]:
    return Counter((row.question_id, row.repeat) for row in jsonl.read(path, kind))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smoke") / "undisturbed"
    folder.mkdir()
    finish(folder)
    return folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("smoke") / "killed"
    folder.mkdir()
    caught = [stage for stage in ORDER if kill_in(folder, stage)]
    finish(folder)
    return folder, caught


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_goes_through_every_stage_and_leaves_a_report(undisturbed: Path) -> None:
    assert all((undisturbed / stage / "done.json").exists() for stage in ORDER)
    assert "<html" in (undisturbed / "report.html").read_text()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_killed_in_every_stage_ends_with_the_same_records(
    undisturbed: Path, killed: tuple[Path, list[str]]
) -> None:
    folder, caught = killed
    assert len(caught) >= 5
    assert digests(folder) == digests(undisturbed)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stage", ["rollouts-base", "rollouts-sft", "evaluate/base", "evaluate/sft", "evaluate/grpo"])
def test_kills_neither_lose_nor_double_a_rollout(undisturbed: Path, killed: tuple[Path, list[str]], stage: str) -> None:
    for name, kind in (("rollouts.jsonl", Rollout), ("verdicts.jsonl", Verdict)):
        wanted = counts(undisturbed / stage / name, kind)
        assert set(wanted.values()) == {1}
        assert counts(killed[0] / stage / name, kind) == wanted


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_grpo_steps_are_committed_once_and_stamped_with_the_version_served(
    undisturbed: Path, killed: tuple[Path, list[str]]
) -> None:
    for folder in (undisturbed, killed[0]):
        rows = [json.loads(line) for line in (folder / "grpo" / "steps.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [1, 2]
        assert len({row["version"] for row in rows}) == 2


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_server_is_left_behind(undisturbed: Path, killed: tuple[Path, list[str]]) -> None:
    assert servers_of(undisturbed) + servers_of(killed[0]) == []

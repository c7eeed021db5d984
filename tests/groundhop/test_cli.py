"""The command answers at once, in one line when something is wrong, with the right exit code."""

import subprocess
import sys
from pathlib import Path

import pytest

from groundhop.cli import STAGES, main
from groundhop.config import load
from groundhop.plan import plan
from groundhop.runs import Run
from groundhop.stages import ORDER

ROOT = Path(__file__).parents[2]


def test_help_names_every_stage() -> None:
    done = subprocess.run([sys.executable, "-m", "groundhop.cli", "--help"], capture_output=True, text=True, check=True)
    assert all(stage in done.stdout for stage in STAGES)


@pytest.mark.parametrize("stage", STAGES)
def test_a_missing_config_is_one_line_and_exit_code_1(stage: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([stage, "nowhere.toml"]) == 1
    assert capsys.readouterr().err.strip() == "groundhop: no config file nowhere.toml"


def test_wrong_usage_is_exit_code_2() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["swim"])
    assert caught.value.code == 2


def test_an_unknown_key_on_the_command_line_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(ROOT / "configs" / "smoke.toml"), "--set", "grpo.stepz=3", "--dry-run"]) == 1
    assert "stepz" in capsys.readouterr().err


def test_a_stage_without_its_input_says_which_stage_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", str(ROOT / "configs" / "smoke.toml"), "--run-dir", str(tmp_path)]) == 1
    assert "groundhop pages" in capsys.readouterr().err


def test_the_plan_names_every_stage_and_does_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", load(ROOT / "configs" / "demo.toml"))
    text = plan(run)
    assert all(stage in text for stage in ORDER)
    assert [path.name for path in run.root.iterdir()] == []


def test_a_paid_provider_shows_up_as_cost_in_the_plan(tmp_path: Path) -> None:
    run = Run(tmp_path, load(ROOT / "configs" / "demo.toml", ["search.provider=you"]))
    assert "$" in plan(run)


def test_view_refuses_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(tmp_path)]) == 1
    assert "manifest.json" in capsys.readouterr().err

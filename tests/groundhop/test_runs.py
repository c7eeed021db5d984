"""A run's folder refuses to mix records of two configs."""

import contextlib
import json
from pathlib import Path

import pytest

from groundhop.config import GrpoConfig, PagesConfig, RunConfig
from groundhop.errors import ConfigError, MissingError
from groundhop.runs import Run, sha256_of


def test_a_config_that_changed_under_a_stage_is_refused_with_the_key(tmp_path: Path) -> None:
    Run(tmp_path, RunConfig(name="x")).open("pages", ("seed", "pages"))
    with pytest.raises(ConfigError, match=r"pages\.min_chars"):
        Run(tmp_path, RunConfig(name="x", pages=PagesConfig(min_chars=7))).open("pages", ("seed", "pages"))


@pytest.mark.parametrize(("key", "refused"), [("seed", True), ("sft.max_grad_norm", False)])
def test_a_folder_without_a_key_that_came_since_is_taken_to_have_its_default(
    tmp_path: Path, key: str, refused: bool
) -> None:
    config = RunConfig(name="x", seed=7)
    Run(tmp_path, config).open("sft", ("seed", "sft"))
    stamp = tmp_path / "sft" / "config.json"
    stamp.write_text(json.dumps({name: value for name, value in json.loads(stamp.read_text()).items() if name != key}))
    with pytest.raises(ConfigError, match=key) if refused else contextlib.nullcontext():
        Run(tmp_path, config).open("sft", ("seed", "sft"))


def test_a_change_that_does_not_matter_to_a_stage_is_allowed(tmp_path: Path) -> None:
    Run(tmp_path, RunConfig(name="x")).open("pages", ("seed", "pages"))
    folder = Run(tmp_path, RunConfig(name="x", grpo=GrpoConfig(steps=99))).open("pages", ("seed", "pages"))
    assert not folder.done


def test_an_unfinished_stage_is_named_when_its_output_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="groundhop rollouts CONFIG"):
        Run(tmp_path, RunConfig(name="x")).look("rollouts-sft").output("rollouts.jsonl")


def test_failures_are_kept_and_counted_by_reason(tmp_path: Path) -> None:
    folder = Run(tmp_path, RunConfig(name="x")).open("pages", ("seed",))
    folder.fail("a", "thin")
    folder.fail("b", "thin", "12 characters")
    assert folder.drops == {"thin": 2}
    assert len((folder.path / "failures.jsonl").read_text().splitlines()) == 2


def test_the_manifest_names_every_file_with_its_digest(tmp_path: Path) -> None:
    run = Run(tmp_path, RunConfig(name="x"))
    folder = run.open("pages", ("seed",))
    (folder.path / "pages.jsonl").write_text("{}\n")
    run.stamp("pages", {"pages": 1})
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["stages"]["pages"]["files"]["pages/pages.jsonl"] == sha256_of(folder.path / "pages.jsonl")

"""A wrong config stops the run with the file's name and the key."""

from pathlib import Path

import pytest

from groundhop.config import RunConfig, convert, flatten, load, to_tree
from groundhop.errors import ConfigError, MissingError


def config_file(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('name = "x"\n[grpo]\nstep = 3', "step"),
        ('name = "x"\n[grpo]\nsteps = "three"', "$.grpo.steps"),
        ('name = "x"\n[grpo]\nsteps = 0', "$.grpo.steps"),
        ('name = "x"\n[graph]\nband = [0.9, 0.1]', "band"),
        ('name = "x"\n[judge]\nkind = "oracle"', "$.judge.kind"),
        ("name = 'x'\nname = 'y'", "not TOML"),
        ("seed = 1", "name"),
    ],
)
def test_a_wrong_config_names_file_and_key(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(config_file(tmp_path, text))
    assert named in str(caught.value)
    assert "run.toml" in str(caught.value)


def test_an_absent_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"nowhere\.toml"):
        load(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("grpo.steps=10", "grpo.steps", 10),
        ("model.name=Qwen/Qwen3-4B", "model.name", "Qwen/Qwen3-4B"),
        ("graph.band=[0.2, 0.5]", "graph.band", [0.2, 0.5]),
    ],
)
def test_overrides_reach_their_key(tmp_path: Path, override: str, key: str, value: object) -> None:
    config = load(config_file(tmp_path, 'name = "x"'), [override])
    assert flatten(to_tree(config))[key] == value


@pytest.mark.parametrize("override", ["grpo.stepz=10", "grpo.steps", "name.deeper=1"])
def test_a_wrong_override_is_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError):
        load(config_file(tmp_path, 'name = "x"'), [override])


def test_a_config_survives_the_way_through_plain_values() -> None:
    config = RunConfig(name="x", seed=3)
    assert convert(to_tree(config), "again") == config

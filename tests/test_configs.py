from pathlib import Path

import pytest

from groundhop.config import load

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_each_shipped_config_loads_under_its_own_name(path: Path) -> None:
    assert load(path).name == path.stem


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_each_shipped_config_leaves_the_model_room_for_the_conversation(path: Path) -> None:
    config = load(path)
    final_answer = config.agent.turn_tokens
    assert config.agent.max_tokens + final_answer <= config.serve.max_model_len


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_each_shipped_config_samples_rollouts_from_the_policy_that_it_trains(path: Path) -> None:
    config = load(path)
    assert (config.agent.temperature, config.agent.top_p) == (config.grpo.temperature, 1.0)

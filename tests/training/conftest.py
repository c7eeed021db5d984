"""A tiny random model, made once for all tests of training."""

from pathlib import Path

import pytest

from groundhop.training.models import prepare


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare("tiny-random", tmp_path_factory.mktemp("models"))

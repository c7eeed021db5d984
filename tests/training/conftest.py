"""What the tests of training share: a tiny random model, made once, and the builders of `scripted.py`."""

import sys
from pathlib import Path

import pytest

from groundhop.training.models import prepare

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare("tiny-random", tmp_path_factory.mktemp("models"))

"""What the control plane's tests share: `scripted_replicas.py` beside this file, and folders in memory."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

MEMORY = Path("/dev/shm")


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: a ledger waits for the disk at every event, which is no test's subject."""
    if not MEMORY.is_dir():
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(prefix="groundhop-", dir=MEMORY))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)

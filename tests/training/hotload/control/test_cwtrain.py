"""cwtrain, unchanged, against the control plane, a real S3 server and replicas that restore every snapshot bit for bit.

Needs a Python that has cwtrain: `python3.12 -m venv V && V/bin/pip install cwtrain`, then GROUNDHOP_CWTRAIN_PYTHON=V/bin/python.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from restoring import DEPLOYMENT, Restoring, control_plane
from store_servers import KEYS, use_s3

from groundhop.training.hotload.checkpoint import open_checkpoint
from groundhop.training.hotload.control.client import ControlClient
from groundhop.training.hotload.store.objects import open_objects

HERE = Path(__file__).parent
PYTHON = os.environ.get("GROUNDHOP_CWTRAIN_PYTHON", "")
STORE = "s3://weights/run1"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="GROUNDHOP_CWTRAIN_PYTHON names no Python with cwtrain (3.12 or newer)"),
]


def test_cwtrain_publishes_full_and_delta_meets_conflicts_and_rolls_back(
    tmp_path: Path, s3_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_s3(s3_server, monkeypatch)
    open_objects("s3://weights").put("ready", b"")
    with control_plane(tmp_path / "ledger", STORE) as url:
        replicas = [Restoring(url, STORE, name, tmp_path / name) for name in ("a", "b")]
        for replica in replicas:
            replica.start()
        script = [PYTHON, str(HERE / "cwtrain_drive.py"), url, DEPLOYMENT, s3_server, str(tmp_path / "trainer")]
        environment = {**os.environ, **KEYS, "COREWEAVE_API_TOKEN": "unused", "PYTHONPATH": ""}
        done = subprocess.run(script, capture_output=True, text=True, env=environment, timeout=500, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        view = ControlClient(url).deployment(DEPLOYMENT)
        for replica in replicas:
            replica.stopping = True
            replica.join()
    assert json.loads(done.stdout) == {
        "access": "s3://weights/run1/",
        "full": "COMPLETED",
        "delta": ["COMPLETED", ["weight_v000001", "weight_v000002"]],
        "conflict in the store": ["model.safetensors"],
        "conflict in the deployment": "failed_precondition",
        "rollback": ["COMPLETED", "weight_v000002"],
        "the same id again": True,
    }
    trained = {
        identity: open_checkpoint(tmp_path / "trainer" / folder).digest
        for identity, folder in (("weight_v000001", "one"), ("weight_v000002", "two"), ("weight_v000003", "other"))
    }
    assert [replica.served for replica in replicas] == [trained, trained]
    assert (view.head, view.announced) == ("weight_v000002", "weight_v000002")

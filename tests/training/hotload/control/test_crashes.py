"""The real server, killed with -9 after each event of a hot-load: what a start finds leads to the same end."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from crashes import free_port

HERE = Path(__file__).parent
pytestmark = pytest.mark.slow


def test_a_hot_load_ends_the_same_wherever_the_control_plane_is_killed(tmp_path: Path) -> None:
    script = [sys.executable, str(HERE / "crashes.py"), str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    ends = {
        (run["state"], run["head"], run["announced"], *map(tuple, run["replicas"]), tuple(run["commits"]))
        for run in runs
    }
    assert ends == {("completed", "v2", "v2", ("a", "serving", "v2"), ("b", "serving", "v2"), ("v1", "v2"))}
    # Every event was died after once, and the last run met none to die after.
    assert [run["deaths"] for run in runs] == [1] * (len(runs) - 1) + [0]
    before_commit = [run for run in runs if "Aborted" in run["kinds"]]
    assert 10 <= len(before_commit) < len(runs) - 1


def test_the_command_is_killed_and_found_as_it_was(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "groundhop.cli", "hotload", "serve", "--port", str(port)]
    command += ["--ledger", str(tmp_path / "ledger"), "--deployment", "d"]
    heads = []
    for _ in range(2):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        # The line that says where it listens comes before it does; then the port answers.
        assert f":{port}/" in process.stderr.readline()
        heads.append(_ask(port, process))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stderr.close()
    assert heads[0] == heads[1] == 1


def _ask(port: int, process: "subprocess.Popen[str]") -> int:
    while process.poll() is None:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
                client.post("/v1/deployments/d/publisher_lease", json={"owner": "me", "epoch": None})
                entries = client.get("/v1/deployments/d/ledger", params={"limit": 1}).json()
            return int(entries[0]["sequence"])
        except httpx.ConnectError:
            continue
    raise AssertionError("it ended")

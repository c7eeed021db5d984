"""Starting and stopping servers: nothing is left behind, nothing is open to strangers, failures say what to do."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from groundhop import serve, watchdog
from groundhop.config import ServeConfig
from groundhop.errors import ConfigError, CredentialError, MissingError, ServerError
from groundhop.serve import Replica, Servers
from groundhop.training.hotload.guard import TOKEN_VARIABLE, TokenGuard

SLEEPER = "import subprocess, sys, time; subprocess.Popen(['sleep', '300']); print('up', flush=True); time.sleep(300)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPER}"
PARENT = """
import os, subprocess, sys
from groundhop import watchdog
command = [sys.executable, "-I", watchdog.__file__, str(os.getpid()), "0.2", sys.executable, "-c", sys.argv[1]]
subprocess.Popen(command, start_new_session=True).wait()
"""


def start_parent(program: str) -> tuple["subprocess.Popen[str]", list[psutil.Process]]:
    """A process that runs `program` under the watchdog, and all of its descendants."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "up\n"
    return parent, psutil.Process(parent.pid).children(recursive=True)


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=30)
    return all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


@pytest.mark.parametrize("program", [SLEEPER, STUBBORN])
def test_children_and_grandchildren_end_when_the_parent_is_killed_with_9(program: str) -> None:
    parent, family = start_parent(program)
    assert len(family) == 3
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert gone(family)


@pytest.mark.parametrize("program", [SLEEPER, STUBBORN])
def test_children_and_grandchildren_end_when_the_watchdog_is_told_to_stop(program: str) -> None:
    parent, family = start_parent(program)
    family[0].send_signal(signal.SIGTERM)
    assert gone(family)
    parent.wait()


def test_the_command_ends_when_the_watchdog_itself_is_killed_with_9() -> None:
    parent, family = start_parent(SLEEPER)
    family[0].send_signal(signal.SIGKILL)
    ended = gone(family[:2])
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    parent.wait()
    assert ended


def test_the_watchdog_gives_the_commands_status() -> None:
    assert watchdog.main([str(psutil.Process().ppid()), "1", sys.executable, "-c", "raise SystemExit(7)"]) == 7


def replica(program: str, log: Path, port: int = 1) -> Replica:
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=out, stderr=out, start_new_session=True)
    return Replica(3, f"http://127.0.0.1:{port}", process, log)


def test_an_early_death_shows_the_end_of_the_log_and_what_to_do(tmp_path: Path) -> None:
    program = "import sys; sys.exit('a line\\nNo available memory for the cache blocks')"
    servers = Servers([replica(program, tmp_path / "replica-3.log")], None)
    with pytest.raises(ServerError, match="replica 3 ended with status 1") as caught:
        servers._wait(60)
    assert "serve.kv_cache_bytes" in str(caught.value)
    assert "a line" in str(caught.value)


def test_a_server_that_does_not_get_ready_is_named(tmp_path: Path) -> None:
    servers = Servers([replica("import time; time.sleep(300)", tmp_path / "replica-3.log")], None)
    with servers, pytest.raises(ServerError, match=r"was not ready after 0 s \(serve\.ready_s\)"):
        servers._wait(0.01)


def test_stop_kills_what_does_not_listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "GRACE_S", -2.9)
    log = tmp_path / "log"
    servers = Servers([replica(STUBBORN, log)], None)
    while "up" not in log.read_text():
        time.sleep(0.01)
    family = [psutil.Process(servers._replicas[0].process.pid)]
    family += family[0].children(recursive=True)
    servers.stop()
    servers.stop()
    assert gone(family)


def test_ports_of_replicas_differ_and_are_free() -> None:
    with contextlib.ExitStack() as held:
        ports = serve._hold_ports(ServeConfig(replicas=8), held)
    assert len(set(ports)) == 8


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken, contextlib.ExitStack() as held:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)):
            serve._hold_ports(ServeConfig(port=port), held)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "example.org"])
def test_other_machines_are_served_with_a_token_only(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServeConfig(host=host, token_env="GROUNDHOP_TEST_TOKEN")
    monkeypatch.delenv("GROUNDHOP_TEST_TOKEN", raising=False)
    with pytest.raises(CredentialError, match="GROUNDHOP_TEST_TOKEN"):
        serve.find_token(config)
    monkeypatch.setenv("GROUNDHOP_TEST_TOKEN", "s")
    assert serve.find_token(config) == "s"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.0.1"])
def test_loopback_needs_no_token(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GROUNDHOP_TEST_TOKEN", raising=False)
    assert serve.find_token(ServeConfig(host=host, token_env="GROUNDHOP_TEST_TOKEN")) is None


def test_the_token_is_in_no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Command lines can be read by every user of a machine."""
    monkeypatch.setenv("GROUNDHOP_TEST_TOKEN", "sesame")
    config = ServeConfig(host="0.0.0.0", token_env="GROUNDHOP_TEST_TOKEN")
    assert "sesame" not in " ".join(serve.command_of(Path("m"), config, "cpu", 1))
    assert serve.environment_of(0, config, "cpu", serve.find_token(config))[TOKEN_VARIABLE] == "sesame"


def status(path: str, header: str | None) -> int:
    """What the guard with the token `sesame` answers to a request."""
    sent: list[Any] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [] if header is None else [(b"authorization", header.encode())]
    asyncio.run(TokenGuard(app)({"type": "http", "path": path, "headers": headers}, None, send))  # type: ignore[arg-type]
    return int(sent[0]["status"])


@pytest.mark.parametrize("path", ["/v1/models", "/pause", "/collective_rpc", "/inference/v1/generate", "//health", "/"])
@pytest.mark.parametrize("header", [None, "", "Bearer ", "Bearer sesam", "sesame", "Bearer sesame2"])
def test_every_route_needs_the_token(path: str, header: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "sesame")
    assert (status(path, header), status(path, "Bearer sesame"), status("/health", header)) == (401, 200, 200)


def test_without_a_token_nothing_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert status("/pause", None) == 200


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
def test_replicas_share_the_cores(replicas: int) -> None:
    cores = [4, 5, 6, 7]
    shares = [serve.cores_of(number, replicas, cores) for number in range(replicas)]
    assert all(shares)
    assert {core for share in shares for core in share} == set(cores)
    assert replicas > len(cores) or sorted(core for share in shares for core in share) == cores


@pytest.mark.parametrize(("wished", "threads"), [(None, 4), ("2", 2), ("9", 4), ("0", 4), ("x", 4)])
def test_threads_follow_the_environment_downwards(wished: str | None, threads: int) -> None:
    assert serve.threads_of(4, wished) == threads


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"has no config\.json"):
        Servers.start(tmp_path, ServeConfig(), tmp_path / "logs")


def test_extra_arguments_come_last() -> None:
    """So that they win."""
    assert serve.command_of(Path("m"), ServeConfig(extra=("--seed", "3")), "gpu", 1)[-2:] == ["--seed", "3"]


@pytest.mark.parametrize(
    ("replicas", "parallel", "expected"),
    [(7, 1, ["1", "2", "3", "4", "5", "6", "7"]), (3, 2, ["2,3", "4,5", "6,7"]), (8, 1, list("01234567"))],
)
def test_replicas_fill_a_node_from_its_last_gpu_and_leave_the_first_to_the_trainer(
    monkeypatch: pytest.MonkeyPatch, replicas: int, parallel: int, expected: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    config = ServeConfig(replicas=replicas, tensor_parallel=parallel)
    given = [serve.environment_of(n, config, "gpu", None)["CUDA_VISIBLE_DEVICES"] for n in range(replicas)]
    assert given == expected

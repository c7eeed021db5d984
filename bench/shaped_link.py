"""An S3 server, and a link of a given speed in front of it: a proxy that lets so many bytes a second through."""

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import httpx

from groundhop.training.hotload.store.objects import Objects, open_objects

BUCKET = "bench"
PIECE_BYTES = 32 * 1024
START_S = 60.0
FLAGS = (
    "server -ip=127.0.0.1 -ip.bind=127.0.0.1 -dir={folder} -s3 -master.port={0} -master.port.grpc={1} "
    "-volume.port={2} -volume.port.grpc={3} -volume.max=20 -master.volumeSizeLimitMB=1024 -filer.port={4} "
    "-filer.port.grpc={5} -s3.port={6} -s3.port.grpc={7} -s3.port.iceberg=0 -s3.port.lance=0 -s3.iam=false"
)


class Link:
    """A TCP proxy to `port`; `mbit` megabits a second in each direction, all connections together."""

    def __init__(self, port: int, mbit: float) -> None:
        self._port, self._rate = port, mbit * 1e6 / 8
        self.bytes = 0
        """That went through so far, both ways."""
        self._free = {"up": 0.0, "down": 0.0}
        """When the last piece so far will have left."""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        starting = asyncio.start_server(self._serve, "127.0.0.1", 0)
        server = asyncio.run_coroutine_threadsafe(starting, self._loop).result(10)
        self.port = int(server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            # A client that is not hung up on would wait for its whole time limit.
            writer.close()
            return
        ways = self._pass(reader, there[1], "up"), self._pass(there[0], writer, "down")
        await asyncio.gather(*ways, return_exceptions=True)

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Literal["up", "down"]
    ) -> None:
        try:
            while data := await reader.read(PIECE_BYTES):
                # One piece after the other, whichever connection it belongs to.
                self._free[way] = max(self._free[way], time.monotonic()) + len(data) / self._rate
                self.bytes += len(data)
                if (wait := self._free[way] - time.monotonic()) > 0.002:
                    await asyncio.sleep(wait)
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[int]:
    """A SeaweedFS that takes any credentials, with a bucket; gives its S3 port."""
    command = shutil.which("weed") or str(Path(sys.executable).with_name("weed"))
    folder.mkdir(parents=True)
    ports = _free_ports(8)
    with (folder.parent / "seaweed.log").open("wb") as log:
        process = subprocess.Popen(
            [command, *FLAGS.format(*ports, folder=folder).split()], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        _make_bucket(ports[6])
        yield ports[6]
    finally:
        process.kill()
        process.wait()


def store_at(port: int, prefix: str) -> Objects:
    """The bucket through `port`."""
    environment = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true"}
    os.environ.update(environment | {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"})
    return open_objects(f"s3://{BUCKET}/{prefix}")


def _make_bucket(port: int) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.put(f"http://127.0.0.1:{port}/{BUCKET}", trust_env=False).status_code == 200:
                return
        time.sleep(0.2)
    raise TimeoutError(f"SeaweedFS is not ready after {START_S:.0f} s")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]

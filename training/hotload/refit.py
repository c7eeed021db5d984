"""Put a trainer's new weights into running servers: the changed bits only, checked by digest, stamped with a version.

The simple path: trainer and servers share a file system, and all replicas of a list move together.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

from groundhop.errors import ChecksumError, InputError, ServerError
from groundhop.training.hotload import sparse
from groundhop.training.hotload.sparse import Delta
from groundhop.training.hotload.state import State, bits_of, digest_of, read_checkpoint, write_checkpoint

logger = logging.getLogger(__name__)

TIMEOUT_S = 600.0
TORN = "torn"
"""Version label of a replica whose weights nobody knows; tokens of this version must not be trained on."""
TIED_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class RefitResult:
    """One move of all servers to new weights."""

    version: str
    changed: int
    total: int
    """Elements that changed, of how many."""
    bytes: int
    """Size of the delta file."""
    seconds: float
    digest: str
    """Of the whole state that all replicas hold."""


class Refitter(Protocol):
    """Brings new weights to the servers of a policy; returns when all of them sample from these weights."""

    async def refit(self, named: Iterable[tuple[str, Any]]) -> RefitResult:
        """Send what changed in `named` (all of a model's parameters, torch tensors of any float type).

        Raises: ServerError that names the replica that does not hold the new weights.
        """
        ...


def make_refitter(
    urls: Sequence[str],
    folder: Path,
    baseline: Path,
    first_version: int,
    headers: Mapping[str, str] | None = None,
) -> Refitter:
    """A refitter for servers at `urls` (without `/v1`) that hold the checkpoint in `baseline`.

    Deltas go to `folder`; the first refit is version `first_version`. A resumed run passes one more than the last version
    it used, so that a version never names two states.
    """
    return FileRefitter(urls, folder, baseline, first_version, headers or {})


class FileRefitter:
    """A `Refitter` that hands deltas over as files."""

    def __init__(
        self, urls: Sequence[str], folder: Path, baseline: Path, first_version: int, headers: Mapping[str, str]
    ) -> None:
        self._urls = list(urls)
        self._folder = folder
        self._baseline = baseline
        self._next = first_version
        self._headers = dict(headers)
        self._state = read_checkpoint(baseline)

    async def refit(self, named: Iterable[tuple[str, Any]]) -> RefitResult:
        """See `Refitter`. The baseline moves on only when every replica holds the new bits."""
        start = time.monotonic()
        version = str(self._next)
        self._next += 1
        delta = step(self._state, named, version)
        path = self._folder / f"version-{version}.delta"
        size = sparse.write(path, delta)
        moved = Mover(self._folder / f"version-{version}", lambda folder: self._write_whole(delta, folder))
        try:
            await _on_all(self._urls, self._headers, lambda replica: moved.move(replica, path, delta))
        finally:
            moved.clean()
        self._state.patch(delta)
        for old in self._folder.glob("version-*.delta"):
            if old != path:
                old.unlink()
        changed, total = sparse.totals(delta, {name: bits.size for name, bits in self._state.bits.items()})
        return RefitResult(version, changed, total, size, time.monotonic() - start, delta.target)

    def _write_whole(self, delta: Delta, folder: Path) -> None:
        target = State(
            {n: b.copy() for n, b in self._state.bits.items()}, self._state.shapes, dict(self._state.digests)
        )
        target.patch(delta)
        write_checkpoint(target, folder, self._baseline)


class Mover:
    """Moves one replica by a delta, or by the whole checkpoint when that fails."""

    def __init__(self, whole: Path, write_whole: Callable[[Path], None]) -> None:
        self._whole = whole
        self._write_whole = write_whole

    async def move(self, replica: "Replica", path: Path, delta: Delta) -> None:
        """Pause, apply, stamp, resume. Raises: ServerError when the whole checkpoint does not help either."""
        async with replica.paused():
            try:
                await replica.call("groundhop_apply_delta", path, delta.target)
            except ServerError as error:
                logger.warning("refit %s: %s; loading the whole checkpoint instead", delta.version, error)
                if not self._whole.exists():
                    self._write_whole(self._whole)
                await replica.load(self._whole, delta.target)
            await replica.stamp(delta.version)

    def clean(self) -> None:
        """Remove the whole checkpoint, if one was needed."""
        shutil.rmtree(self._whole, ignore_errors=True)


class Replica:
    """The routes of one server that this path needs; vLLM's development API."""

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self._client = client
        self.url = url

    def paused(self) -> "_Paused":
        """A block in which the scheduler stands still; requests in flight stay and are recomputed afterwards."""
        return _Paused(self)

    async def call(self, method: str, path: Path, digest: str) -> None:
        """Call a method of all workers with a path. Raises: ServerError when one does not end with `digest`."""
        body = {"method": method, "args": [str(path.resolve())], "timeout": TIMEOUT_S}
        answers = (await self.post("/collective_rpc", json=body)).json()["results"]
        for rank, answer in enumerate(answers):
            if not answer["ok"]:
                raise ServerError(f"{self.url}, worker {rank}: {answer['error']}")
            if answer["digest"] != digest:
                raise ServerError(
                    f"{self.url}, worker {rank} holds {answer['digest'][:12]}, promised was {digest[:12]}"
                )

    async def load(self, folder: Path, digest: str) -> None:
        """Load a whole checkpoint; on failure the replica is labelled `torn`. Raises: ServerError."""
        try:
            await self.call("groundhop_load_checkpoint", folder, digest)
        except ServerError:
            await self.stamp(TORN)
            raise

    async def stamp(self, version: str) -> None:
        """Label all tokens from here on."""
        await self.post("/update_weight_version", json={"new_version": version})

    async def post(self, route: str, **content: Any) -> httpx.Response:
        """POST to the server. Raises: ServerError that names it."""
        try:
            response = await self._client.post(f"{self.url}{route}", **content)
        except httpx.HTTPError as error:
            raise ServerError(f"{self.url}{route}: {type(error).__name__} {error}") from error
        if response.status_code != 200:
            raise ServerError(f"{self.url}{route} answered {response.status_code}: {response.text[:300]}")
        return response


class _Paused:
    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    async def __aenter__(self) -> None:
        try:
            # Pausing this way throws keys and values of the old weights away, also of the requests in flight.
            await self._replica.post("/pause", params={"mode": "keep", "clear_cache": "true"})
        except BaseException:
            await self._resume()
            raise

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self._resume(quiet=kind is not None)

    async def _resume(self, quiet: bool = True) -> None:
        # Shielded, so that a cancelled refit does not leave a server that stands still for ever.
        try:
            await asyncio.shield(self._replica.post("/resume"))
        except ServerError:
            if not quiet:
                raise
            logger.warning("could not resume %s", self._replica.url)


async def load_checkpoint(
    urls: Sequence[str], folder: Path, version: str, headers: Mapping[str, str] | None = None
) -> str:
    """Bring all replicas, whatever they hold, to the checkpoint in `folder`, and label it `version`. Returns its digest.

    Switches running servers between policies, and brings fresh ones to where a killed run was.
    Raises: ServerError that names the replica that does not hold it.
    """
    digest = (await asyncio.to_thread(read_checkpoint, folder)).digest

    async def load(replica: Replica) -> None:
        async with replica.paused():
            await replica.load(folder, digest)
            await replica.stamp(version)

    await _on_all(urls, headers or {}, load)
    return digest


def step(state: State, named: Iterable[tuple[str, Any]], version: str) -> Delta:
    """The delta from `state` to the tensors in `named`, which must be the checkpoint's, each once.

    A tied output head that only one side has is left out; it must equal the embedding.
    Raises: InputError where names or sizes differ.
    """
    digests = dict(state.digests)
    patches = []
    seen: set[str] = set()
    extra: dict[str, str] = {}
    for name, tensor in named:
        bits = bits_of(tensor)
        if name in seen or name in extra:
            raise InputError(f"the trainer gave {name} twice")
        if name not in state.bits:
            extra[name] = sparse.digest_bits(bits)
            continue
        seen.add(name)
        patch = sparse.diff(name, state.bits[name], bits)
        if patch is not None:
            patches.append(patch)
            digests[name] = patch.digest
    patches += _tied_patches(state, digests, patches, seen, extra)
    patches.sort(key=lambda patch: patch.name)
    return Delta(version, state.digest, digest_of(digests, state.shapes), tuple(patches))


def _tied_patches(
    state: State, digests: dict[str, str], patches: Sequence[sparse.Patch], seen: set[str], extra: Mapping[str, str]
) -> list[sparse.Patch]:
    """Check the names that only one side has; gives the head's patch where the checkpoint has it and the trainer not."""
    for name, digest in extra.items():
        if name != TIED_HEAD:
            raise InputError(f"the trainer has {name}, which the checkpoint has not")
        if digest != digests.get(EMBEDDING):
            raise InputError(f"{TIED_HEAD} is not in the checkpoint, so it is tied, but it differs from {EMBEDDING}")
    missing = sorted(set(state.bits) - seen)
    if missing == [TIED_HEAD] and state.digests[TIED_HEAD] == state.digests.get(EMBEDDING):
        digests[TIED_HEAD] = digests[EMBEDDING]
        return [
            sparse.Patch(TIED_HEAD, patch.size, patch.positions, patch.values, patch.digest)
            for patch in patches
            if patch.name == EMBEDDING
        ]
    if missing:
        raise InputError(f"the trainer did not give {len(missing)} of the checkpoint's tensors, first {missing[0]}")
    return []


async def _on_all(
    urls: Sequence[str], headers: Mapping[str, str], action: Callable[[Replica], Awaitable[None]]
) -> None:
    """Act on all replicas at once; each is brought to an end before the first failure is raised."""
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, headers=dict(headers)) as client:
        outcomes = await asyncio.gather(*(action(Replica(client, url)) for url in urls), return_exceptions=True)
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    known = [failure for failure in failures if isinstance(failure, (ServerError, ChecksumError))]
    if len(known) == len(failures) > 0:
        raise ServerError("; ".join(str(failure) for failure in failures)) from failures[0]
    if failures:
        raise next(failure for failure in failures if failure not in known)

"""Publishing from anybody's training loop:

    publisher = start_publisher("s3://weights/run-7", Path("hotload"), "models/base", run_id="run-7", urls=SERVERS)
    for batch in batches:
        ...                                             # a training step
        publisher.publish(model.named_parameters())     # returns when all servers sample from the new weights

Ranks of an FSDP2 job give their publisher (rank 0) or None to `ranks.RankPublisher` and call that one instead.
"""

import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from groundhop.errors import InputError
from groundhop.training.hotload.checkpoint import open_checkpoint
from groundhop.training.hotload.fleet import Fleet, NoFleet
from groundhop.training.hotload.named import Named
from groundhop.training.hotload.publisher import Publisher
from groundhop.training.hotload.store.index import Layout
from groundhop.training.hotload.store.objects import Objects, open_objects


def start_publisher(
    store: str | Path,
    folder: Path,
    source: str | Path | Named,
    *,
    run_id: str,
    urls: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
    control: tuple[str, str] | None = None,
    token: str | None = None,
    owner: str | None = None,
    layout: Layout = "groundhop",
    anchor_every: int = 20,
    devices: Collection[str] = (),
) -> Publisher:
    """A publisher that stands on the last committed version, and goes on from it after a kill.

    `store`: a path or `s3://...`. `folder`: on a local disk, kept between restarts. `source`: the checkpoint that the servers were
    started on, or the trainer's tensors. `urls`: servers that are moved from here; or `control`: address and deployment of a
    control plane, with its `token`; neither: the store only. `devices`: as ("cuda",), compares tensors there, see `Publisher`.
    Raises: ConflictError while another owner publishes; InputError, MissingError for a source that does not fit.
    """
    objects = open_objects(store)
    publisher = Publisher(
        objects,
        folder,
        make_fleet(objects, folder, urls, headers or {}, control, token),
        run_id=run_id,
        owner=owner or socket.gethostname(),
        layout=layout,
        anchor_every=anchor_every,
        devices=devices,
    )
    publisher.start(
        source if isinstance(source, Iterable) and not isinstance(source, str) else open_checkpoint(Path(source))
    )
    return publisher


def make_fleet(
    objects: Objects,
    folder: Path,
    urls: Sequence[str],
    headers: Mapping[str, str],
    control: tuple[str, str] | None,
    token: str | None,
) -> Fleet:
    """Servers at known addresses, those of a control plane, or none. Raises: InputError for both."""
    match (bool(urls), control):
        case (True, None):
            from groundhop.training.hotload.direct import DirectFleet

            return DirectFleet(urls, headers, folder / "replicas", objects)
        case (False, (url, deployment)):
            from groundhop.training.hotload.control.client import ControlFleet

            return ControlFleet(url, deployment, token)
        case (False, None):
            return NoFleet()
        case _:
            raise InputError("need servers or a control plane, not both")

"""Look a snapshot up in the deployment's store before its hot-load is admitted: is it whole, and which content is it?"""

import asyncio
import logging

from groundhop.errors import ChecksumError, GroundhopError, InputError, MissingError
from groundhop.training.hotload.control.admission import refuse
from groundhop.training.hotload.control.service import Snapshot
from groundhop.training.hotload.control.wire import DeploymentBody, HotLoadBody
from groundhop.training.hotload.store.index import decode_index, index_key, index_sha256
from groundhop.training.hotload.store.objects import Objects, open_objects

logger = logging.getLogger(__name__)


async def look(config: DeploymentBody, body: HotLoadBody) -> Snapshot | None:
    """What the store says; None where the deployment names no store.

    Raises: RefusedError, `failed_precondition` for an index or a part that is missing or has another size, `data_loss` for
    an index that is damaged, `unavailable` where the store does not answer. Bytes of parts are the agents' to check.
    """
    if not config.store:
        return None
    return await asyncio.to_thread(_look, config.store, body.identity)


def _look(store: str, identity: str) -> Snapshot:
    try:
        objects = open_objects(store)
        raw = objects.get(index_key(identity))
        index = decode_index(raw, identity, objects)
        for part in (*index.parts, *index.files):
            _check_size(objects, part.key, part.size)
    except MissingError as error:
        raise refuse(
            "failed_precondition", f"snapshot {identity} is not whole: a file is missing in the store"
        ) from error
    except (InputError, ChecksumError) as error:
        raise refuse(
            "data_loss", f"snapshot {identity} cannot be read: its index is damaged or of another format"
        ) from error
    except (GroundhopError, OSError) as error:
        if hasattr(error, "code"):
            raise
        # The message may name folders and hosts of this machine.
        logger.exception("control: the store")
        raise refuse("unavailable", "the snapshot store cannot be read now; see the control plane's log") from error
    return Snapshot(index_sha256(raw), index.digest, index.version)


def _check_size(objects: Objects, key: str, size: int) -> None:
    found = objects.size(key)
    if found != size:
        raise refuse("failed_precondition", f"{key} has {found} bytes in the store, its index says {size}")

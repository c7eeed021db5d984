"""The same receiver as a weight transfer engine of vLLM: `--weight-transfer-config '{"backend": "groundhop"}'`.

`/init_weight_transfer_engine` certifies, `/update_weights` takes an `ApplyRequest` (or `folder`, `identity` and `digest` of a
whole checkpoint), `/finish_weight_update` labels the tokens only of a model that is clean.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from groundhop.errors import PlacementError
from groundhop.training.hotload.receiver.requests import ApplyRequest
from groundhop.training.hotload.receiver.vllm_service import VllmService, service_of

BACKEND = "groundhop"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What the model claims to hold."""

    checkpoint: str | None = None
    """A folder; by default the one the server was started on."""
    identity: str = ""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One hot-load."""

    request: dict[str, Any] | None = None
    """An `ApplyRequest`."""
    folder: str = ""
    """A whole checkpoint instead."""
    identity: str = ""
    digest: str = ""


class GroundhopEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Applies deltas in place."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    @property
    def _service(self) -> VllmService:
        return service_of(self.model, self.vllm_config)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Certify."""
        self._service.certify(init_info.checkpoint, init_info.identity)

    def start_weight_update(self) -> None:
        """Nothing to prepare: until the first write the model stays as it is."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one update; the device is synchronised where it was written."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Apply or load. Raises: what is wrong, in words; the model says whether it is dirty."""
        if update_info.folder:
            self._service.load(update_info.folder, update_info.identity, update_info.digest)
        else:
            self._service.apply(msgspec.convert(update_info.request, ApplyRequest))

    def finish_weight_update(self) -> None:
        """Let the new label be set. Raises: PlacementError for a dirty model."""
        if self._service.dirty:
            raise PlacementError(f"not finished: {self._service.dirty}")

    def shutdown(self) -> None:
        """Nothing is held open."""


def register() -> None:
    """Make the engine known to vLLM, once."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, GroundhopEngine)

"""vLLM worker extension that takes changed weights in place; loaded with `--worker-extension-cls`.

Each worker keeps the checkpoint's tensors as bits in host memory. A delta is applied and verified there first; only a state
with the promised digest reaches the live model, through the model's own loader. Nothing here may be called while the
scheduler runs: `refit` pauses it around every call.
"""

import logging
from pathlib import Path
from typing import Any

import torch

from groundhop.errors import GroundhopError
from groundhop.training.hotload import sparse
from groundhop.training.hotload.receiver.vllm_engine import register
from groundhop.training.hotload.receiver.vllm_packing import keep_weights, pack_again
from groundhop.training.hotload.receiver.vllm_service import service_of
from groundhop.training.hotload.receiver.vllm_worker import PlacementReceiver
from groundhop.training.hotload.state import State, read_checkpoint, tensor_of

logger = logging.getLogger("vllm.groundhop")

keep_weights()
register()


class WeightReceiver(PlacementReceiver):
    """Methods that vLLM adds to each worker; called by name through `collective_rpc`."""

    groundhop_held: State | None = None
    """What the live model holds, in checkpoint coordinates; read at the first call."""
    groundhop_torn: bool = False
    """Whether a load broke off half way, so that nobody knows what the live model holds."""

    def groundhop_apply(self, request: dict[str, Any]) -> dict[str, Any]:
        """See `PlacementReceiver`."""
        self._groundhop_leave_host_copy()
        return super().groundhop_apply(request)

    def groundhop_load(self, folder: str, identity: str, digest: str) -> dict[str, Any]:
        """See `PlacementReceiver`."""
        self._groundhop_leave_host_copy()
        return super().groundhop_load(folder, identity, digest)

    def groundhop_apply_delta(self, path: str) -> dict[str, Any]:
        """Move to the state that the delta file at `path` leads to, or stay as before and say why."""
        return self._groundhop_do(lambda: self._groundhop_move(Path(path)))

    def groundhop_load_checkpoint(self, folder: str) -> dict[str, Any]:
        """Load a whole checkpoint, whatever the model holds now."""
        return self._groundhop_do(lambda: self._groundhop_reload(read_checkpoint(Path(folder))))

    def _groundhop_leave_host_copy(self) -> None:
        """The two ways to change weights do not know of each other: after the other one only a whole load helps."""
        self.groundhop_torn, self.groundhop_held = True, None

    def _groundhop_do(self, action: Any) -> dict[str, Any]:
        service_of(self.model_runner.get_model(), self.model_runner.vllm_config).forget()  # type: ignore[attr-defined]
        try:
            action()
            return {"ok": True, "digest": self._groundhop_known().digest, "error": ""}
        except Exception as error:
            logger.exception("groundhop: weights were refused")
            kept = self.groundhop_held.digest if self.groundhop_held is not None else ""
            return {"ok": False, "digest": kept, "error": f"{type(error).__name__}: {error}"}

    def _groundhop_known(self) -> State:
        if self.groundhop_torn:
            raise GroundhopError("the live weights are torn by a failed load; only a whole checkpoint mends them")
        if self.groundhop_held is None:
            folder = Path(self.model_runner.vllm_config.model_config.model)  # type: ignore[attr-defined]
            self.groundhop_held = read_checkpoint(folder)
        return self.groundhop_held

    def _groundhop_move(self, path: Path) -> None:
        delta = sparse.read(path)
        held = self._groundhop_known()
        undo = _undo_of(held, delta)
        moved = held.digest != delta.target
        held.patch(delta)
        if not moved:
            return
        try:
            names = [patch.name for patch in delta.patches]
            self._groundhop_load(held, names)
        except Exception as error:
            held.patch(undo)
            self._groundhop_reload(held)
            raise GroundhopError(f"loading version {delta.version} failed, the weights before it are back") from error

    def _groundhop_load(self, state: State, names: list[str]) -> None:
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        with torch.no_grad():
            model.load_weights((name, tensor_of(state.bits[name], state.shapes[name])) for name in names)
        pack_again()

    def _groundhop_reload(self, state: State) -> None:
        self.groundhop_torn, self.groundhop_held = True, None
        tensors = ((name, tensor_of(bits, state.shapes[name])) for name, bits in state.bits.items())
        self.model_runner.reload_weights(weights_iterator=tensors)  # type: ignore[attr-defined]
        pack_again()
        self.groundhop_torn, self.groundhop_held = False, state


def _undo_of(state: State, delta: sparse.Delta) -> sparse.Delta:
    patches = tuple(
        sparse.Patch(p.name, p.size, p.positions, state.bits[p.name][p.positions], state.digests[p.name])
        for p in delta.patches
        if p.name in state.bits and state.bits[p.name].size == p.size
    )
    return sparse.Delta(f"before {delta.version}", delta.target, delta.base, patches)

"""Methods for vLLM's workers, called by name through `collective_rpc`. None of them raises: the answer says what went wrong.

Nothing here may be called while the scheduler runs: the caller pauses it around every call that changes weights.
"""

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from groundhop.training.hotload.receiver.requests import ApplyRequest
from groundhop.training.hotload.receiver.vllm_service import VllmService, service_of

logger = logging.getLogger("vllm.groundhop")

Answer = dict[str, Any]


class PlacementReceiver:
    """What vLLM adds to each worker."""

    def groundhop_certify(self, checkpoint: str | None = None, identity: str = "") -> Answer:
        """Learn and prove where the checkpoint's tensors lie; `checkpoint` is a folder, by default the server's own."""

        def run(service: VllmService) -> Answer:
            made = service.certify(checkpoint, identity).certificate
            return {
                "classes": made.counts,
                "overwrite_names": made.overwrite_names,
                "partial_names": sorted(n for n, p in made.plan.tensors.items() if p.kind != "SKIP" and not p.whole),
                "unfed": list(made.unfed),
                "plan_digest": made.plan.digest,
                "layout_signature": made.plan.layout_signature,
            }

        return self._groundhop_answer(run)

    def groundhop_state(self) -> Answer:
        """Say what the worker holds, without looking."""
        return self._groundhop_answer(lambda service: {})

    def groundhop_apply(self, request: dict[str, Any]) -> Answer:
        """Write delta files into the live weights (`ApplyRequest`)."""

        def run(service: VllmService) -> Answer:
            done = service.apply(msgspec.convert(request, ApplyRequest))
            return {"changed": done.changed, "seconds_by_phase": done.seconds_by_phase}

        return self._groundhop_answer(run)

    def groundhop_load(self, folder: str, identity: str, digest: str) -> Answer:
        """Load a whole checkpoint, whatever the model holds now; mends a dirty model."""
        return self._groundhop_answer(lambda service: {"loaded": service.load(folder, identity, digest)})

    def groundhop_digest(self) -> Answer:
        """Read every live bit; `digest` is then what the model holds indeed."""
        return self._groundhop_answer(lambda service: {"audited": service.audit()})

    def _groundhop_answer(self, run: Callable[[VllmService], Answer]) -> Answer:
        service = service_of(
            self.model_runner.get_model(),  # type: ignore[attr-defined]
            self.model_runner.vllm_config,  # type: ignore[attr-defined]
        )
        error, more = "", {}
        try:
            more = run(service)
        except Exception as failure:
            logger.exception("groundhop: weights were refused")
            error = f"{type(failure).__name__}: {failure}"
        return {
            "ok": not error,
            "error": error,
            "identity": service.identity or None,
            "digest": service.digest,
            "dirty": bool(service.dirty),
            "dirty_reason": service.dirty,
            "certified": service.live is not None,
            "refused": service.refused or None,
            **more,
        }

"""One vLLM worker's weights: which engines are refused, what is derived from weights, whole loads as the floor."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from groundhop.errors import ChecksumError, PlacementError, ServerError
from groundhop.training.hotload.checkpoint import Checkpoint, open_checkpoint
from groundhop.training.hotload.receiver.layout import refuse_emptied
from groundhop.training.hotload.receiver.live import LiveModel
from groundhop.training.hotload.receiver.placement import tensor_of
from groundhop.training.hotload.receiver.process_group import gather
from groundhop.training.hotload.receiver.ranks import Ranks, alone
from groundhop.training.hotload.receiver.recorder import key_of
from groundhop.training.hotload.receiver.requests import Applied, ApplyRequest, Hook
from groundhop.training.hotload.receiver.vllm_packing import pack_again, packing_hooks

logger = logging.getLogger("vllm.groundhop")

ATTRIBUTE = "groundhop_service"
PACKED_ONCE = ("w13_weight", "_cpu_unpacked_conv_weight")
"""Attributes of fused experts and of causal convolutions."""
SELF_DRAFTING = ("ngram", "suffix")
"""Speculative methods without a second model."""


class VllmService:
    """Certifies a worker's model, changes it, and says what it holds."""

    live: LiveModel | None = None
    """None before a certificate, and for engines that are refused."""
    refused: str = ""
    """Why changes in place are refused."""

    def __init__(self, model: Any, config: Any) -> None:
        self._model, self._config = model, config
        self._ranks = Ranks(exchange_of(config))
        self._loaded = ("", "")
        """Identity and digest of the last whole load where there is no certificate."""

    @property
    def identity(self) -> str:
        """What the model holds; empty when it is not known under a name."""
        return self.live.identity if self.live is not None else self._loaded[0]

    @property
    def digest(self) -> str:
        """Digest of what the model holds; empty when not known."""
        return self.live.digest if self.live is not None else self._loaded[1]

    @property
    def dirty(self) -> str:
        """Why nobody may say that the model holds `identity`; empty when clean."""
        return self._ranks.dirty

    def certify(self, folder: str | None, identity: str = "") -> LiveModel:
        """Certify against a checkpoint folder, by default the one the server was started on. Raises: PlacementError."""
        if self.dirty:
            raise PlacementError(f"dirty ({self.dirty}): load a whole checkpoint first")
        self.live = None
        try:
            self._certify(self._open(folder or self._config.model_config.model), identity)
        except Exception as error:
            self.refused = str(error)
            raise
        assert self.live is not None
        return self.live

    def apply(self, request: ApplyRequest) -> Applied:
        """See `LiveModel.apply`. Raises: PlacementError also without a certificate."""
        if self.live is None:
            raise PlacementError(self.refused or "certify first: nobody knows what this model holds")
        return self.live.apply(request)

    def audit(self) -> str:
        """See `LiveModel.audit`. Raises: PlacementError without a certificate."""
        if self.live is None:
            raise PlacementError(self.refused or "certify first: nobody knows what this model holds")
        return self.live.audit()

    def load(self, folder: str, identity: str, digest: str) -> str:
        """Load a whole checkpoint through the engine's own reload, whatever is there now; returns the digest.

        The model is certified again afterwards. An engine that is refused holds the checkpoint too, but unproven.
        Raises: before anything changes, ChecksumError for another checkpoint than promised and PlacementError for a model that
        vLLM cannot reload; what reloading raises, and then the model is dirty.
        """
        checkpoint = self._open(folder, digest)
        self._ranks.together(lambda: refuse_packed(self._model))
        self.live, self.refused = None, ""
        self._ranks.dirty = f"a whole load of {identity} is not complete"
        self._ranks.together(lambda: self._reload(checkpoint))
        try:
            self._certify(checkpoint, identity)
        except (PlacementError, ServerError) as error:
            self.refused = str(error)
            logger.warning("groundhop: loaded %s, but cannot take changes in place: %s", identity, error)
        self._loaded = (identity, digest)
        self._ranks.dirty = ""
        return digest

    def _open(self, folder: str, digest: str = "") -> Checkpoint:
        found: list[Checkpoint] = []

        def open_it() -> None:
            found.append(open_checkpoint(Path(folder)))
            if digest and found[0].digest != digest:
                raise ChecksumError(f"{folder} holds {found[0].digest[:12]}, promised was {digest[:12]}")

        self._ranks.together(open_it)
        return found[0]

    def _certify(self, checkpoint: Checkpoint, identity: str) -> None:
        def look() -> None:
            refuse_config(self._config)
            refuse_packed(self._model)

        self._ranks.together(look)
        self.live = LiveModel(
            self._model,
            self._model.load_weights,
            checkpoint,
            hooks=lambda targets: [
                *packing_hooks(self._model, targets),
                *derived_hooks(self._model, targets, self._config.model_config.dtype),
            ],
            ranks=self._ranks,
            identity=identity,
        )
        self.refused = ""
        made = self.live.certificate
        logger.info("groundhop: placed %s; not fed: %s", made.counts, ", ".join(made.unfed) or "nothing")
        for name, reason in made.reasons.items():
            logger.info("groundhop: %s goes through the loader: %s", name, reason)

    def _reload(self, checkpoint: Checkpoint) -> None:
        # Loaders may keep or change what they are given, and the mapped file cannot be written.
        tensors = ((n, tensor_of(spec, checkpoint.bits(n).copy())) for n, spec in checkpoint.specs.items())
        with torch.no_grad():
            initialize_layerwise_reload(self._model)
            self._model.load_weights(tensors)
            finalize_layerwise_reload(self._model, self._config.model_config)
        pack_again()


def service_of(model: Any, config: Any) -> VllmService:
    """The one service of a model, so that worker methods and the transfer engine agree on what it holds."""
    service: VllmService | None = vars(model).get(ATTRIBUTE)
    if service is None:
        service = VllmService(model, config)
        # Not by setattr: torch.nn.Module looks for parameters and modules in what it is given.
        vars(model)[ATTRIBUTE] = service
    return service


def refuse_config(config: Any) -> None:
    """Raise PlacementError for an engine whose live weights are not a placement of the checkpoint's."""
    parallel, cache = config.parallel_config, config.cache_config
    speculative, offload = config.speculative_config, config.offload_config
    for refused, reason in (
        (config.model_config.quantization, f"weights are quantised ({config.model_config.quantization})"),
        (str(cache.cache_dtype).startswith("fp8"), "scales of an FP8 key-value cache are not in the checkpoint"),
        (parallel.enable_eplb, "EPLB moves experts while the server runs"),
        (config.lora_config, "LoRA wraps and merges layers"),
        (speculative and speculative.method not in SELF_DRAFTING, "a draft model may share or copy weights"),
        (offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0, "weights are offloaded"),
        (
            parallel.enable_expert_parallel and parallel.data_parallel_size > 1,
            "experts are spread over data-parallel ranks, which are updated one by one",
        ),
    ):
        if refused:
            raise PlacementError(f"{reason}; load whole checkpoints instead")


def refuse_packed(model: Any) -> None:
    """Raise PlacementError for a model that vLLM itself cannot reload: neither changes nor whole loads would be right."""
    refuse_emptied(model)
    for name, module in model.named_modules():
        # vLLM 0.32 packs these for its CPU kernels when the server starts. Its reload leaves experts unpacked, and the
        # views of convolutions that kernels read keep the old weights.
        if current_platform.is_cpu() and any(hasattr(module, sign) for sign in PACKED_ONCE):
            raise PlacementError(f"{name} is packed for a CPU kernel and not rightly packed again; restart the server")


def derived_hooks(model: torch.nn.Module, targets: Mapping[int, int], dtype: torch.dtype) -> Iterator[Hook]:
    """What makes copies of weights again that attention layers and their kernels keep, e.g. absorbed projections.

    The new values go into the tensors that were there: CUDA graphs hold their addresses.
    """
    for module in model.modules():
        if not is_deferred_attention_layer(module):
            continue
        copies = [
            (holder, name, value)
            for holder in (module, getattr(module, "impl", None))
            for name, value in vars(holder or object).items()
            if isinstance(value, torch.Tensor) and value.ndim >= 2 and key_of(value) not in targets
            if name != "kv_cache" and value.is_floating_point() and value.numel()
        ]
        fed = {targets[key_of(p)] for p in module.parameters() if p.numel() and key_of(p) in targets}
        if copies and fed:
            yield Hook(frozenset(fed), _derive_again(module, copies, dtype))


def _derive_again(module: Any, copies: Sequence[tuple[Any, str, Any]], dtype: Any) -> Callable[[], None]:
    def run() -> None:
        module.process_weights_after_loading(dtype)
        for holder, name, tensor in copies:
            fresh = getattr(holder, name)
            if fresh is not tensor:
                tensor.copy_(fresh)
                setattr(holder, name, tensor)

    return run


def exchange_of(config: Any) -> Callable[[bytes], Sequence[bytes]]:
    """What the tensor- and pipeline-parallel workers of one replica tell each other with."""
    parallel = config.parallel_config
    if parallel.tensor_parallel_size * parallel.pipeline_parallel_size == 1:
        return alone

    def exchange(mine: bytes) -> list[bytes]:
        row = gather([mine], get_tp_group().world_size, get_tp_group().cpu_group)
        return gather(row, get_pp_group().world_size, get_pp_group().cpu_group)

    return exchange

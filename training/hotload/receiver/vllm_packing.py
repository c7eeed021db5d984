"""Keep `weight` of linear layers alive on vLLM's CPU build, which packs it for its kernels and empties the parameter.

Imported before the model loads. Eager servers pack a copy and pack again after each change; a compiled graph may have
caught the packed handle, so compiled ones run on the plain weight, up to two times slower at low concurrency.
"""

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from weakref import WeakSet

import torch
import vllm.model_executor.layers.utils as vllm_layers
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform

from groundhop.training.hotload.receiver.recorder import key_of
from groundhop.training.hotload.receiver.requests import Hook

logger = logging.getLogger("vllm.groundhop")

_packed: "WeakSet[torch.nn.Module]" = WeakSet()
_pack = vllm_layers.dispatch_cpu_unquantized_gemm


def _dispatch_and_keep(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Stand-in for vLLM's CPU dispatch that leaves `layer.weight` whole."""
    if layer.weight.is_meta or layer.weight.ndim != 2:
        _pack(layer, remove_weight)
    elif layer in _packed or _is_eager():
        _pack(layer, False)
        _packed.add(layer)
    else:
        layer.cpu_linear = torch.nn.functional.linear  # pyright: ignore[reportArgumentType]


def _is_eager() -> bool:
    """Whether the model that is being loaded will not be compiled; reloads, where vLLM does not say, count as compiled."""
    config = get_current_vllm_config_or_none()
    return config is not None and bool(config.model_config.enforce_eager)


def keep_weights() -> None:
    """Put the stand-in in place, on the CPU only."""
    if current_platform.is_cpu() and vllm_layers.dispatch_cpu_unquantized_gemm is not _dispatch_and_keep:
        vllm_layers.dispatch_cpu_unquantized_gemm = _dispatch_and_keep
        logger.info("groundhop: linear layers keep their weights, so that new ones can be loaded in place")


def pack_again() -> None:
    """Pack every layer again after a whole load."""
    for layer in list(_packed):
        _pack(layer, False)


def packing_hooks(model: torch.nn.Module, targets: Mapping[int, int]) -> Iterator[Hook]:
    """What packs a layer of `model` again after its weight changed."""
    mine = set(model.modules())
    for layer in list(_packed):
        if layer in mine and key_of(layer.weight) in targets:
            yield Hook(frozenset([targets[key_of(layer.weight)]]), partial(_pack, layer, False))

"""Real vLLM model classes with a few thousand weights, in this process and on the CPU, as one or two tensor-parallel ranks."""

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from small_states import Held

from groundhop.training.hotload.bits import Bits, TensorSpec
from groundhop.training.hotload.delta import encode_tensor, prints_of, write_delta
from groundhop.training.hotload.fingerprint import state_digest

Result = TypeVar("Result")
HIDDEN, LAYERS, VOCAB, HEADS, HEAD, EXPERTS, INNER, EXPERT_INNER = 64, 2, 100, 4, 16, 4, 96, 32

COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}
QWEN = COMMON | {"head_dim": HEAD}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": QWEN | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3_moe": QWEN
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": EXPERT_INNER,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
    "deepseek_v2": COMMON
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": HEADS,
        "moe_intermediate_size": EXPERT_INNER,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": False,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 2 * HEAD,
        "qk_rope_head_dim": HEAD,
        "v_head_dim": 2 * HEAD,
        "tie_word_embeddings": False,
    },
    "mamba2": {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "hidden_size": HIDDEN,
        "num_heads": 8,
        "head_dim": HEAD,
        "state_size": HEAD,
        "expand": 2,
        "n_groups": 1,
        "conv_kernel": 4,
        "chunk_size": 16,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB,
        "use_bias": False,
        "use_conv_bias": True,
        "hidden_act": "silu",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
}


def shapes(kind: str) -> dict[str, tuple[int, ...]]:
    """The tensors of the Hugging Face checkpoint."""
    found: dict[str, tuple[int, ...]] = {}
    trunk = "backbone" if kind == "mamba2" else "model"
    found[f"{trunk}.embed{'dings' if kind == 'mamba2' else '_tokens'}.weight"] = (VOCAB, HIDDEN)
    if kind == "mamba2":
        found = {"backbone.embeddings.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        before = f"{trunk}.layers.{layer}"
        parts = _mamba() if kind == "mamba2" else _transformer(kind, layer)
        found |= {f"{before}.{name}": shape for name, shape in parts.items()}
    found["backbone.norm_f.weight" if kind == "mamba2" else "model.norm.weight"] = (HIDDEN,)
    if kind != "qwen3":
        found["lm_head.weight"] = (VOCAB, HIDDEN)
    return found


def _mamba() -> dict[str, tuple[int, ...]]:
    inner, conv = 2 * HIDDEN, 2 * HIDDEN + 2 * HEAD
    return {
        "norm.weight": (HIDDEN,),
        "mixer.A_log": (8,),
        "mixer.D": (8,),
        "mixer.dt_bias": (8,),
        "mixer.conv1d.weight": (conv, 1, 4),
        "mixer.conv1d.bias": (conv,),
        "mixer.in_proj.weight": (inner + conv + 8, HIDDEN),
        "mixer.norm.weight": (inner,),
        "mixer.out_proj.weight": (HIDDEN, inner),
    }


def _transformer(kind: str, layer: int) -> dict[str, tuple[int, ...]]:
    found = {"input_layernorm.weight": (HIDDEN,), "post_attention_layernorm.weight": (HIDDEN,)}
    if kind == "deepseek_v2":
        attention = {
            "q_proj.weight": (HEADS * 3 * HEAD, HIDDEN),
            "kv_a_proj_with_mqa.weight": (32 + HEAD, HIDDEN),
            "kv_a_layernorm.weight": (32,),
            "kv_b_proj.weight": (HEADS * 4 * HEAD, 32),
            "o_proj.weight": (HIDDEN, HEADS * 2 * HEAD),
        }
    else:
        attention = {
            "q_proj.weight": (HEADS * HEAD, HIDDEN),
            "k_proj.weight": (2 * HEAD, HIDDEN),
            "v_proj.weight": (2 * HEAD, HIDDEN),
            "q_norm.weight": (HEAD,),
            "k_norm.weight": (HEAD,),
            "o_proj.weight": (HIDDEN, HEADS * HEAD),
        }
    found |= {f"self_attn.{name}": shape for name, shape in attention.items()}
    if kind == "qwen3" or (kind == "deepseek_v2" and layer == 0):
        return found | _mlp("mlp", INNER)
    found["mlp.gate.weight"] = (EXPERTS, HIDDEN)
    for expert in range(EXPERTS):
        found |= _mlp(f"mlp.experts.{expert}", EXPERT_INNER)
    return found | (_mlp("mlp.shared_experts", EXPERT_INNER) if kind == "deepseek_v2" else {})


def _mlp(before: str, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{before}.gate_proj.weight": (inner, HIDDEN),
        f"{before}.up_proj.weight": (inner, HIDDEN),
        f"{before}.down_proj.weight": (HIDDEN, inner),
    }


def random_state(kind: str, seed: int = 0) -> Held:
    """A BF16 checkpoint of normal weights."""
    random = np.random.default_rng(seed)
    specs = {name: TensorSpec(name=name, dtype="BF16", shape=shape) for name, shape in shapes(kind).items()}
    return Held(specs, {name: bf16(random.normal(0, 0.05, spec.shape)) for name, spec in specs.items()})


def changed(before: Held, share: float = 0.05, seed: int = 9) -> Held:
    """A copy with about `share` of each tensor's elements changed by a few steps, at least one."""
    after, random = before.copy(), np.random.default_rng(seed)
    for bits in after.held.values():
        places = random.choice(bits.size, max(1, int(bits.size * share)), replace=False)
        bits[places] += random.integers(1, 5, places.size).astype(bits.dtype)
    return after


def bf16(values: Any) -> Bits:
    """The upper halves of float32: values cut to BF16."""
    cut: Bits = (np.asarray(values, dtype=np.float32).reshape(-1).view(np.uint32) >> 16).astype(np.uint16)
    return cut


class FakeGroup:
    """A tensor-parallel group as loaders see it, each thread being another rank."""

    world_size = 1
    real: Any = None
    local = threading.local()

    @property
    def rank_in_group(self) -> int:
        return getattr(self.local, "rank", 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


GROUP = FakeGroup()
CONFIG_LOCK = threading.Lock()


def prepare() -> None:
    """Make vLLM ready to build models in this process, once."""
    if GROUP.real is not None:
        return
    pytest.importorskip("vllm")
    import tempfile

    import vllm.distributed.parallel_state as state
    import vllm.model_executor.models.registry as registry
    from vllm.config import VllmConfig, set_current_vllm_config

    # Asking a model class about itself in a fresh process takes longer than all else here.
    registry._run_in_subprocess = lambda function: function()
    with set_current_vllm_config(VllmConfig()):
        file = tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115
        state.init_distributed_environment(1, 0, f"file://{file.name}", 0, "gloo")
        state.initialize_model_parallel(1, 1)
    GROUP.real = state._TP
    state._TP = GROUP


def build(kind: str, folder: Path, ranks: int = 1, rank: int = 0, **changes: Any) -> Any:
    """An empty model, as one rank of `ranks`."""
    return build_with_config(kind, folder, ranks, rank, **changes)[0]


def build_with_config(kind: str, folder: Path, ranks: int = 1, rank: int = 0, **changes: Any) -> tuple[Any, Any]:
    """The same, with vLLM's configuration."""
    prepare()
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[kind] | changes))
    arguments = EngineArgs(
        model=str(folder), dtype="bfloat16", enforce_eager=True, max_model_len=64, skip_tokenizer_init=True
    )
    GROUP.world_size, GROUP.local.rank = ranks, rank
    config = arguments.create_engine_config()
    config.parallel_config.tensor_parallel_size = ranks
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        return initialize_model(config), config


def load(model: Any, state: Held) -> None:
    """What a cold start does with a checkpoint."""
    import torch

    from groundhop.training.hotload.receiver.placement import tensor_of

    with torch.no_grad():
        model.load_weights((name, tensor_of(spec, state.held[name].copy())) for name, spec in state.specs.items())


def everything(model: Any) -> dict[str, bytes]:
    """Every bit of every parameter and buffer."""
    from groundhop.training.hotload.bits import bits_of
    from groundhop.training.hotload.receiver.layout import tensors_of

    return {name: bits_of(tensor).tobytes() for name, tensor in tensors_of(model)}


class Barrier:
    """What ranks tell each other, for ranks that are threads."""

    def __init__(self, ranks: int) -> None:
        self._said: list[bytes] = [b""] * ranks
        self._barrier = threading.Barrier(ranks, timeout=60)

    def of(self, rank: int) -> Callable[[bytes], Sequence[bytes]]:
        def exchange(mine: bytes) -> Sequence[bytes]:
            self._said[rank] = mine
            self._barrier.wait()
            said = list(self._said)
            self._barrier.wait()
            return said

        return exchange


def on_ranks(ranks: int, action: Callable[[int], Result]) -> list[Result]:
    """Run `action(rank)` for all ranks at the same time. Raises: the first error."""

    def one(rank: int) -> Result:
        GROUP.local.rank = rank
        return action(rank)

    if ranks == 1:
        return [one(0)]
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


def digest(state: Held) -> str:
    return state_digest(state.specs, prints_of(state))


def step(path: Path, old: Held, new: Held, encoding: str = "add", also: Any = None) -> dict[str, Any]:
    """A delta file from `old` to `new`, and the request that goes with it. `also`: positions by name, sent in any case."""
    deltas = []
    for name, spec in new.specs.items():
        extra = None if also is None else also.get(name, np.zeros(0, np.int64))
        delta = encode_tensor(spec, old.held[name], new.held[name], encoding=encoding, also=extra)  # type: ignore[arg-type]
        deltas += [] if delta is None or (extra is not None and not delta.chunks) else [delta]
    write_delta(path, deltas, version=1, base_digest=digest(old), digest=digest(new))
    return {
        "txn": path.name,
        "identity": path.stem,
        "version": 1,
        "parts": (str(path),),
        "base_digest": digest(old),
        "digest": digest(new),
        "operation": "overwrite" if encoding in ("overwrite", "dense") or also is not None else "differential",
    }

"""What vLLM's workers answer, on a real model after all that a cold start does to it, packed weights included."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_states import Held

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import tiny_vllm as tiny  # noqa: E402
from tiny_vllm import changed  # noqa: E402

from groundhop.errors import ChecksumError, PlacementError  # noqa: E402
from groundhop.training.hotload.checkpoint import write_checkpoint  # noqa: E402
from groundhop.training.hotload.receiver.layout import storages_of  # noqa: E402
from groundhop.training.hotload.receiver.recorder import key_of  # noqa: E402
from groundhop.training.hotload.receiver.vllm_service import derived_hooks  # noqa: E402

pytestmark = [pytest.mark.slow]


class Replica:
    """A worker of one rank, its checkpoint folder, and what it holds."""

    def __init__(self, kind: str, folder: Path, state: Held | None = None) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        import groundhop.training.hotload.vllm_plugin as plugin

        self.state, self.folder = state or tiny.random_state(kind), folder
        self.model, self.config = tiny.build_with_config(kind, folder / "v0")
        self.save(self.state, "v0")
        tiny.load(self.model, self.state)
        with set_current_vllm_config(self.config):
            process_weights_after_loading(self.model, self.config.model_config, torch.device("cpu"))
        self.worker = plugin.WeightReceiver()
        self.worker.model_runner = SimpleNamespace(get_model=lambda: self.model, vllm_config=self.config)  # type: ignore[attr-defined]

    def save(self, state: Held, name: str) -> str:
        write_checkpoint(state, self.folder / f"{name}.safetensors")
        return str(self.folder / f"{name}.safetensors")

    def certify(self) -> dict[str, Any]:
        return self.worker.groundhop_certify(str(self.folder / "v0.safetensors"), "v0")


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Replica]:
    yield Replica("qwen3", tmp_path)


def test_packed_layers_compute_with_the_new_weights(replica: Replica, tmp_path: Path) -> None:
    certified = replica.certify()
    assert (certified["error"], certified["classes"]) == ("", {"XOR": 24})
    new = changed(replica.state, 0.1)
    request = tiny.step(tmp_path / "v1", replica.state, new)
    answer = replica.worker.groundhop_apply(request)
    assert (answer["ok"], answer["digest"], answer["identity"]) == (True, tiny.digest(new), "v1")
    assert replica.worker.groundhop_digest()["digest"] == tiny.digest(new)
    given = torch.ones(3, tiny.HIDDEN, dtype=torch.bfloat16)
    layers = [made.model.model.layers[1].mlp.gate_up_proj for made in (replica, Replica("qwen3", tmp_path / "n", new))]
    mine, fresh = (layer.cpu_linear(given, layer.weight, None) for layer in layers)
    assert torch.equal(mine, fresh)


def test_absorbed_projections_are_made_again_where_they_were() -> None:
    """An attention layer and its kernel keep copies of weights; CUDA graphs hold the copies' addresses."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    class Absorbed(torch.nn.Module, AttentionLayerBase):
        def __init__(self) -> None:
            super().__init__()
            self.kv_b_proj = torch.nn.Linear(2, 3, bias=False)
            self.impl = SimpleNamespace(packed=torch.zeros(3, 2))
            self.process_weights_after_loading(torch.float32)

        def process_weights_after_loading(self, dtype: Any) -> None:
            self.W_UV = (self.kv_b_proj.weight.detach() * 2).to(dtype)
            self.impl.packed = -self.W_UV

        def get_attn_backend(self) -> Any:
            raise NotImplementedError

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            raise NotImplementedError

    model = torch.nn.ModuleList([Absorbed(), torch.nn.Linear(2, 2)])
    _, targets = storages_of(model)
    (hook,) = derived_hooks(model, targets, torch.float32)
    assert hook.storages == {targets[key_of(model[0].kv_b_proj.weight)]}
    held, packed = model[0].W_UV, model[0].impl.packed
    model[0].kv_b_proj.weight.data.fill_(3)
    hook.run()
    assert (model[0].W_UV is held, model[0].impl.packed is packed) == (True, True)
    assert (held.unique().tolist(), packed.unique().tolist()) == ([6.0], [-6.0])


def test_every_answer_says_what_the_worker_holds(replica: Replica) -> None:
    before = replica.worker.groundhop_state()
    replica.certify()
    after = replica.worker.groundhop_state()
    assert (before["ok"], before["certified"], before["digest"]) == (True, False, "")
    assert (after["certified"], after["digest"], after["identity"], after["dirty"]) == (
        True,
        tiny.digest(replica.state),
        "v0",
        False,
    )


def test_no_method_raises(replica: Replica) -> None:
    answers = [
        replica.worker.groundhop_apply({"txn": 1}),
        replica.worker.groundhop_digest(),
        replica.worker.groundhop_load("/nowhere", "v9", "0" * 64),
        replica.worker.groundhop_certify("/nowhere"),
    ]
    assert [answer["ok"] for answer in answers] == [False] * 4
    assert "certify first" in answers[1]["error"]
    assert all(answer["dirty"] is False for answer in answers)


def test_a_whole_load_mends_a_dirty_model(replica: Replica) -> None:
    replica.certify()
    weight = dict(replica.model.named_parameters())["model.layers.0.mlp.down_proj.weight"]
    weight.data.view(torch.int16)[0, 0] ^= 1
    assert replica.worker.groundhop_digest()["dirty"] is True
    new = changed(replica.state, 0.1)
    path = replica.save(new, "v2")
    answer = replica.worker.groundhop_load(path, "v2", tiny.digest(new))
    assert (answer["error"], answer["dirty"], answer["certified"], answer["identity"]) == ("", False, True, "v2")
    assert replica.worker.groundhop_digest()["digest"] == tiny.digest(new)
    assert tiny.everything(replica.model) == tiny.everything(Replica("qwen3", replica.folder / "new", new).model)


def test_another_checkpoint_than_promised_is_refused_before_it_is_loaded(replica: Replica) -> None:
    replica.certify()
    path = replica.save(changed(replica.state), "v2")
    answer = replica.worker.groundhop_load(path, "v2", "0" * 64)
    assert (answer["ok"], answer["dirty"], answer["identity"]) == (False, False, "v0")
    assert replica.worker.groundhop_digest()["digest"] == tiny.digest(replica.state)


def test_the_transfer_engine_shares_what_the_worker_holds(replica: Replica, tmp_path: Path) -> None:
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    engine = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend="groundhop"), replica.config, torch.device("cpu"), replica.model
    )
    engine.init_transfer_engine(engine.parse_init_info({"checkpoint": replica.save(replica.state, "v0")}))
    new = changed(replica.state, 0.1)
    engine.start_weight_update()
    engine.update_weights({"request": tiny.step(tmp_path / "v1", replica.state, new)})
    engine.finish_weight_update()
    assert replica.worker.groundhop_state()["digest"] == tiny.digest(new)
    engine.update_weights(
        {"folder": replica.save(replica.state, "v0"), "identity": "v0", "digest": tiny.digest(replica.state)}
    )
    assert replica.worker.groundhop_digest()["digest"] == tiny.digest(replica.state)
    with pytest.raises(ChecksumError):
        engine.update_weights({"request": tiny.step(tmp_path / "v3", new, changed(new))})
    engine._service._ranks.dirty = "half written"
    with pytest.raises(PlacementError, match="not finished: half written"):
        engine.finish_weight_update()


REFUSALS: dict[str, Callable[[Any], None]] = {
    "quantised": lambda config: setattr(config.model_config, "quantization", "fp8"),
    "FP8 key-value cache": lambda config: setattr(config.cache_config, "cache_dtype", "fp8_e4m3"),
    "EPLB": lambda config: setattr(config.parallel_config, "enable_eplb", True),
    "LoRA": lambda config: setattr(config, "lora_config", SimpleNamespace()),
    "draft model": lambda config: setattr(config, "speculative_config", SimpleNamespace(method="eagle")),
    "offloaded": lambda config: setattr(config.offload_config.uva, "cpu_offload_gb", 1.0),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_engines_whose_weights_are_no_placement_are_refused_by_name(replica: Replica, reason: str) -> None:
    REFUSALS[reason](replica.config)
    answer = replica.certify()
    assert (answer["ok"], reason in answer["error"], answer["certified"]) == (False, True, False)
    assert reason in replica.worker.groundhop_state()["refused"]


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v2", "mamba2"])
def test_models_that_vllm_cannot_reload_on_this_machine_are_refused_untouched(kind: str, tmp_path: Path) -> None:
    """Its CPU kernels pack experts, absorbed projections and convolutions, and its reload leaves them wrong."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("GPU kernels keep these weights")
    replica = Replica(kind, tmp_path)
    before = tiny.everything(replica.model)
    new = changed(replica.state, 0.1)
    answers = [
        replica.certify(),
        replica.worker.groundhop_load(replica.save(new, "v2"), "v2", tiny.digest(new)),
    ]
    assert [(answer["ok"], answer["dirty"]) for answer in answers] == [(False, False)] * 2
    assert all("packed" in answer["error"] for answer in answers)
    assert tiny.everything(replica.model) == before

"""Engines of a few lines, each with one peculiarity of real ones: what is certified, as what, and what is refused by name."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_states import Held

torch = pytest.importorskip("torch")

from tiny_vllm import bf16, changed, digest, everything, step  # noqa: E402

from groundhop.errors import PlacementError  # noqa: E402
from groundhop.training.hotload.bits import TensorSpec  # noqa: E402
from groundhop.training.hotload.receiver.certify import certify  # noqa: E402
from groundhop.training.hotload.receiver.live import LiveModel, sampled  # noqa: E402
from groundhop.training.hotload.receiver.placement import tensor_of  # noqa: E402
from groundhop.training.hotload.receiver.requests import ApplyRequest  # noqa: E402

Loader = Callable[[Any, str, Any], None]


def state(dtype: str = "BF16", **shapes: tuple[int, ...]) -> Held:
    random = np.random.default_rng(1)
    specs = {name: TensorSpec(name=name, dtype=dtype, shape=shape) for name, shape in shapes.items()}
    made = {name: random.normal(0, 1, spec.size).astype(np.float32) for name, spec in specs.items()}
    return Held(specs, {n: bf16(v) if dtype == "BF16" else v.view(np.uint32) for n, v in made.items()})


class Toy(torch.nn.Module):
    """A model of plain parameters whose loader is `loader(model, name, tensor)` for each tensor."""

    def __init__(self, loader: Loader, **parameters: Any) -> None:
        super().__init__()
        self.loader = loader
        for name, value in parameters.items():
            self.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))

    def load_weights(self, tensors: Iterable[tuple[str, Any]]) -> None:
        for name, tensor in tensors:
            self.loader(self, name, tensor)


def plain(model: Any, name: str, tensor: Any) -> None:
    getattr(model, name).copy_(tensor)


def cold(model: Toy, held: Held) -> Toy:
    with torch.no_grad():
        model.load_weights((n, tensor_of(spec, held.held[n].copy())) for n, spec in held.specs.items())
    return model


def zeros(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.zeros(shape, dtype=dtype)


def served(model: Toy, held: Held) -> LiveModel:
    return LiveModel(model, model.load_weights, held)


def check_delta(make: Callable[[], Toy], held: Held, tmp_path: Path, encoding: str = "add") -> LiveModel:
    """Certify, apply a delta, compare with a dense load."""
    model, new = cold(make(), held), changed(held, 0.2)
    live = served(model, held)
    live.apply(ApplyRequest(**step(tmp_path / "v1", held, new, encoding), verify="full"))
    assert everything(model) == everything(cold(make(), new))
    assert live.digest == digest(new)
    return live


def test_a_widened_tensor_is_cast_and_proven_by_casting_back(tmp_path: Path) -> None:
    live = check_delta(lambda: Toy(plain, w=zeros(6, dtype=torch.float32)), state(w=(6,)), tmp_path, "xor")
    assert (live.certificate.counts, live.certificate.overwrite_names) == ({"CAST": 1}, ["w"])
    assert not live.plan.tensors["w"].kept


def test_a_narrowed_tensor_is_kept_beside_the_model(tmp_path: Path) -> None:
    live = check_delta(lambda: Toy(plain, w=zeros(6)), state("F32", w=(6,)), tmp_path)
    assert (live.certificate.counts, live.plan.tensors["w"].kept) == ({"CAST": 1}, True)


def test_weights_that_cannot_be_read_back_may_not_be_kept_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groundhop.training.hotload.receiver.certify.KEPT_BYTES", 8)
    held = state("F32", w=(6,))
    with pytest.raises(PlacementError, match="Publish in the type that the engine serves"):
        served(cold(Toy(plain, w=zeros(6)), held), held)


def test_a_nan_in_a_cast_tensor_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    held = state(w=(6,))
    live = served(cold(Toy(plain, w=zeros(6, dtype=torch.float32)), held), held)
    new = held.copy()
    new.held["w"][2] = 0x7FA1
    with pytest.raises(PlacementError, match="NaN"):
        live.apply(ApplyRequest(**step(tmp_path / "v1", held, new)))
    assert (live.dirty, live.audit()) == ("", digest(held))


def fused(model: Any, name: str, tensor: Any) -> None:
    """Two tensors in one, the second transposed and assigned, as Mamba and Mixtral do."""
    if name == "a":
        model.ab.narrow(0, 0, 4).copy_(tensor)
    else:
        model.ab.data[4:7] = tensor.t()


def test_fused_transposed_and_assigned_tensors_are_plain_copies(tmp_path: Path) -> None:
    live = check_delta(lambda: Toy(fused, ab=zeros(8, 5)), state(a=(4, 5), b=(5, 3)), tmp_path, "context")
    assert live.certificate.counts == {"XOR": 2}


def test_a_tail_that_is_not_constant_is_refused() -> None:
    held, model = state(a=(4, 5), b=(5, 3)), Toy(fused, ab=zeros(8, 5))
    model.ab.data[7, 1] = 1.0
    with pytest.raises(PlacementError, match="ab: 5 of its 40 elements come from no checkpoint tensor"):
        served(cold(model, held), held)


def chained(model: Any, name: str, tensor: Any) -> None:
    model.w.copy_(tensor)
    model.w.copy_(-torch.exp(model.w.float()))


def shifted(model: Any, name: str, tensor: Any) -> None:
    model.w.copy_(tensor + 1)


def collected(model: Any, name: str, tensor: Any) -> None:
    """Experts that are stacked in Python and written when the last is there."""
    model.seen = {**getattr(model, "seen", {}), name: tensor}
    if len(model.seen) == 2:
        model.w.copy_(torch.stack([model.seen["a"], model.seen["b"]]))
        model.seen = {}


@pytest.mark.parametrize("loader", [chained, shifted])
def test_computed_tensors_go_through_the_loader(loader: Loader, tmp_path: Path) -> None:
    live = check_delta(lambda: Toy(loader, w=zeros(6, dtype=torch.float32)), state(w=(6,)), tmp_path)
    assert live.certificate.counts == {"OPAQUE": 1}


def test_tensors_that_feed_one_another_are_loaded_together(tmp_path: Path) -> None:
    live = check_delta(lambda: Toy(collected, w=zeros(2, 6)), state(a=(6,), b=(6,)), tmp_path)
    assert list(live.plan.groups().values()) == [["a", "b"]]


def test_a_tensor_that_the_loader_skips_is_followed_by_its_promise(tmp_path: Path) -> None:
    def loader(model: Any, name: str, tensor: Any) -> None:
        if name == "w":
            model.w.copy_(tensor)

    live = check_delta(lambda: Toy(loader, w=zeros(6)), state(w=(6,), unused=(4,)), tmp_path)
    assert live.certificate.counts == {"XOR": 1, "SKIP": 1}


def tied() -> Toy:
    model = Toy(plain, head=zeros(4, 3), embed=zeros(4, 3))
    model.head = model.embed
    return model


def test_a_head_that_the_engine_tied_moves_with_the_embedding(tmp_path: Path) -> None:
    held = state(embed=(4, 3))
    held = Held(
        {"embed": held.specs["embed"], "head": TensorSpec(name="head", dtype="BF16", shape=(4, 3))},
        {"embed": held.held["embed"], "head": held.held["embed"].copy()},
    )
    model, new = cold(tied(), held), changed(held, 0.2)
    new.held["head"] = new.held["embed"].copy()
    live = served(model, held)
    live.apply(ApplyRequest(**step(tmp_path / "v1", held, new, "xor")))
    assert (everything(model), live.audit()) == (everything(cold(tied(), new)), digest(new))
    apart = new.copy()
    apart.held["head"][0] ^= 1
    with pytest.raises(PlacementError, match="must stay equal"):
        live.apply(ApplyRequest(**step(tmp_path / "v2", new, apart)))
    assert live.audit() == digest(new)


def test_a_layout_that_a_kernel_rearranged_is_refused() -> None:
    """As block layouts of fused experts are; loading into it again would scramble it."""
    held = state(w=(4, 6))
    model = cold(Toy(plain, w=zeros(4, 6)), held)
    model.w.data.copy_(model.w.data.reshape(6, 4).t().contiguous())
    before = everything(model)
    with pytest.raises(PlacementError, match=r"w: live bits differ .* its kernel rearranges"):
        served(model, held)
    assert everything(model) == before


def test_a_loader_that_replaces_storages_is_refused_and_undone() -> None:
    def loader(model: Any, name: str, tensor: Any) -> None:
        model.w.data = tensor.clone()

    held = state(w=(6,))
    model = cold(Toy(loader, w=zeros(6)), held)
    before, pointer = everything(model), model.w.data_ptr()
    with pytest.raises(PlacementError, match="replaces storages"):
        served(model, held)
    assert (everything(model), model.w.data_ptr()) == (before, pointer)


def test_a_parameter_that_was_emptied_is_named() -> None:
    """As CPU builds do that pack weights for their kernels."""
    held = state(w=(6,))
    with pytest.raises(PlacementError, match="w was emptied after loading"):
        served(Toy(plain, w=zeros(0)), held)


def test_a_loader_that_fails_on_a_live_model_is_refused_with_its_words() -> None:
    def loader(model: Any, name: str, tensor: Any) -> None:
        assert model.w.shape == tensor.shape, "not its shape"

    held = state(v=(6,))
    with pytest.raises(PlacementError, match=r"cannot take v on the live model: AssertionError: not its shape"):
        served(Toy(loader, w=zeros(4)), held)


def test_a_model_that_holds_other_weights_is_refused() -> None:
    held = state(w=(6,))
    with pytest.raises(PlacementError, match="w: live bits differ"):
        served(cold(Toy(plain, w=zeros(6)), changed(held, 0.2)), held)


def test_certifying_writes_nothing_even_where_the_loader_fails_half_way() -> None:
    def loader(model: Any, name: str, tensor: Any) -> None:
        model.w.fill_(7)
        raise RuntimeError("half way")

    held = state(w=(6,))
    model = cold(Toy(plain, w=zeros(6)), held)
    model.loader = loader
    before = everything(model)
    with pytest.raises(PlacementError, match="half way"):
        certify(model, model.load_weights, held)
    assert everything(model) == before


def test_a_loader_may_not_write_to_what_it_is_given() -> None:
    def loader(model: Any, name: str, tensor: Any) -> None:
        model.w.copy_(tensor.mul_(2))

    held = state(w=(6,))
    before = held.held["w"].tobytes()
    with pytest.raises(PlacementError, match="changes the tensors that it is given"):
        served(Toy(loader, w=zeros(6)), held)
    assert held.held["w"].tobytes() == before


def test_plans_are_equal_where_layouts_are() -> None:
    held = state(w=(6,))
    one, other = (served(cold(Toy(plain, w=zeros(6)), held), held).plan for _ in range(2))
    wider = served(cold(Toy(plain, w=zeros(2, 3)), state(w=(2, 3))), state(w=(2, 3))).plan
    assert (one.digest, one.layout_signature) == (other.digest, other.layout_signature)
    assert (one.guard != other.guard, one.digest != wider.digest) == (True, True)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 2**24 + 1, 49152 * 576 * 2, 2**40 + 1])
def test_the_bytes_that_are_looked_at_lie_within_their_storage_however_large_it_is(size: int) -> None:
    found = sampled(size)
    assert found.numel() == min(64, size)
    assert found.unique().numel() == found.numel()
    assert all(0 <= index < size for index in found.tolist())

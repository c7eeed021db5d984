"""Real vLLM model classes take deltas in place: every bit of every parameter and buffer is a dense reload's."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_states import Held

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import tiny_vllm as tiny  # noqa: E402
from tiny_vllm import changed  # noqa: E402

from groundhop.errors import ChecksumError, InputError, PlacementError, ServerError  # noqa: E402
from groundhop.training.hotload.receiver.live import LiveModel  # noqa: E402
from groundhop.training.hotload.receiver.ranks import Ranks  # noqa: E402
from groundhop.training.hotload.receiver.requests import ApplyRequest, Hook  # noqa: E402

pytestmark = [pytest.mark.slow]


@dataclass
class Engine:
    """The ranks of a replica and what they hold."""

    kind: str
    folder: Path
    state: Held
    models: list[Any]
    lives: list[LiveModel]
    fresh: list[Any]
    """The same classes, for dense loads."""

    def apply(self, request: dict[str, Any], verify: str = "touched") -> list[Any]:
        asked = ApplyRequest(**request, verify=verify)
        return tiny.on_ranks(len(self.lives), lambda rank: self.lives[rank].apply(asked))

    def audit(self) -> list[str]:
        return tiny.on_ranks(len(self.lives), lambda rank: self.lives[rank].audit())

    def oracle(self, state: Held) -> list[dict[str, bytes]]:
        """Every bit after a dense load of `state`."""

        def one(rank: int) -> dict[str, bytes]:
            tiny.load(self.fresh[rank], state)
            return tiny.everything(self.fresh[rank])

        return tiny.on_ranks(len(self.fresh), one)

    def bits(self) -> list[dict[str, bytes]]:
        return [tiny.everything(model) for model in self.models]


def engine(kind: str, ranks: int, folder: Path, state: Held | None = None) -> Engine:
    state = state or tiny.random_state(kind)
    models = [tiny.build(kind, folder, ranks, rank) for rank in range(ranks)]
    fresh = [tiny.build(kind, folder, ranks, rank) for rank in range(ranks)]
    talk = tiny.Barrier(ranks)

    def one(rank: int) -> LiveModel:
        tiny.load(models[rank], state)
        before = tiny.everything(models[rank])
        live = LiveModel(models[rank], models[rank].load_weights, state, ranks=Ranks(talk.of(rank)), identity="v0")
        assert tiny.everything(models[rank]) == before
        return live

    return Engine(kind, folder, state, models, tiny.on_ranks(ranks, one), fresh)


CASES = [(kind, ranks) for kind in tiny.CONFIGS for ranks in (1, 2)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    kind, ranks = request.param
    return engine(kind, ranks, tmp_path_factory.mktemp(f"{kind}-{ranks}"))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Engine]:
    """One rank of Mamba, which has all classes of tensors but CAST."""
    yield engine("mamba2", 1, tmp_path)


EXPECTED = {"qwen3": 24, "qwen3_moe": 45, "deepseek_v2": 36, "mamba2": 21}


def test_classes_are_those_that_were_found_by_hand(served: Engine) -> None:
    """`placement.md` 1.3: all are plain copies but Mamba's `A_log`."""
    opaque = 2 if served.kind == "mamba2" else 0
    for live in served.lives:
        wanted = {"XOR": EXPECTED[served.kind] - opaque} | ({"OPAQUE": opaque} if opaque else {})
        assert live.certificate.counts == wanted
        assert all("A_log" in name for name in live.certificate.reasons)


@pytest.mark.parametrize("encoding", ["add", "xor", "context", "overwrite", "dense"])
def test_a_delta_in_place_equals_a_dense_reload(served: Engine, encoding: str, tmp_path: Path) -> None:
    old, new = served.state, changed(served.state, 0.03, seed=len(encoding))
    served.apply(tiny.step(tmp_path / "v1", old, new, encoding), "full" if encoding == "xor" else "touched")
    served.state = new
    assert served.bits() == served.oracle(new)
    assert {live.digest for live in served.lives} == set(served.audit()) == {tiny.digest(new)}


def test_the_oracle_sees_a_delta_that_was_left_out(served: Engine) -> None:
    """Else equality above would mean nothing."""
    wrong = served.oracle(changed(served.state, 0.03, seed=99))
    for mine, other in zip(served.bits(), wrong, strict=True):
        assert sum(mine[name] != other[name] for name in mine) >= 15


def test_special_bits_are_carried(served: Engine, tmp_path: Path) -> None:
    """-0.0, a NaN's payload and subnormals go through plain copies as they are."""
    new = served.state.copy()
    name = next(name for name in new.specs if name.endswith(("o_proj.weight", "out_proj.weight")))
    new.held[name][:4] = [0x8000, 0x7FC1, 0x0001, 0xFF81]
    served.apply(tiny.step(tmp_path / "v1", served.state, new, "xor"))
    served.state = new
    assert served.bits() == served.oracle(new)


def test_every_element_is_where_a_probe_finds_it(served: Engine) -> None:
    """Load each element's number, digit by digit (0 to 255 are exact in BF16), and read where it went."""
    specs = {n: spec for n, spec in served.state.specs.items() if "A_log" not in n}
    passes: list[dict[str, np.ndarray]] = []
    found: list[list[dict[str, Any]]] = []
    for digit in range(2):
        numbers = {n: np.arange(spec.size) // 256**digit % 256 for n, spec in specs.items()}
        passes.append(numbers)
        held = {n: tiny.bf16(numbers[n]) if n in numbers else served.state.held[n] for n in served.state.specs}

        def one(rank: int, held: dict[str, Any] = held) -> dict[str, Any]:
            tiny.load(served.fresh[rank], Held(served.state.specs, held))
            return {
                n: t.detach().float().clone() for n, t in served.fresh[rank].named_parameters(remove_duplicate=False)
            }

        found.append(tiny.on_ranks(len(served.fresh), one))
    for rank, live in enumerate(served.lives):
        for name in specs:
            for row in live.plan.tensors[name].rows:
                stored = [seen[rank][live.plan.storages[row.target].names[0]] for seen in found]
                read = sum(row.read(one.reshape(-1)).numpy() * 256**digit for digit, one in enumerate(stored))
                assert read.tolist() == row.positions(0, row.size).tolist(), name


def test_swapped_ranks_are_noticed(tmp_path: Path) -> None:
    """Each of two ranks writes to its own storages by the other's rows; a full check does not take that for the new state."""
    served = engine("qwen3", 2, tmp_path)
    one, other = served.lives
    plans = [replace(one.plan, tensors=other.plan.tensors), replace(other.plan, tensors=one.plan.tensors)]
    for live, plan in zip(served.lives, plans, strict=True):
        live.plan, live._placement = plan, replace(live._placement, plan=plan)
    with pytest.raises((ChecksumError, ServerError)):
        served.apply(tiny.step(tmp_path / "v1", served.state, changed(served.state, 0.03)), "full")
    assert served.audit() != [tiny.digest(changed(served.state, 0.03))] * 2
    assert all(live.dirty for live in served.lives)


def test_a_lost_row_is_noticed_before_anything_is_written(small: Engine, tmp_path: Path) -> None:
    live, name = small.lives[0], "backbone.layers.0.mixer.in_proj.weight"
    placed = live.plan.tensors[name]
    live.plan.tensors[name] = replace(placed, rows=placed.rows[:-1], parts=placed.parts[:-1])  # type: ignore[index]
    live._own[name] = live._own[name][:-1]
    before = small.bits()
    with pytest.raises(ChecksumError):
        small.apply(tiny.step(tmp_path / "v1", small.state, changed(small.state, 0.05)))
    assert (small.bits(), live.dirty) == (before, "")


def test_a_flipped_live_bit_is_found_by_an_audit(small: Engine) -> None:
    (live,) = small.lives
    weight = dict(small.models[0].named_parameters())["backbone.layers.1.mixer.out_proj.weight"]
    weight.data.view(torch.int16)[3, 5] ^= 1
    live.audit()
    assert "differ" in live.dirty
    weight.data.view(torch.int16)[3, 5] ^= 1
    assert live.audit() == tiny.digest(small.state)
    assert live.dirty == ""


def test_a_flipped_derived_value_is_found_by_an_audit(small: Engine) -> None:
    """`A` is computed from `A_log` by the loader; its checkpoint bits lie beside the model."""
    (live,) = small.lives
    values = dict(small.models[0].named_parameters())["backbone.layers.1.mixer.A"]
    values.data[2] += 1
    live.audit()
    assert live.dirty != ""


def test_a_delta_applied_twice_changes_nothing_more(small: Engine, tmp_path: Path) -> None:
    new = changed(small.state, 0.05)
    request = tiny.step(tmp_path / "v1", small.state, new, "xor")
    small.apply(request)
    (again,) = small.apply(request)
    assert (again.changed, small.bits()) == (0, small.oracle(new))


def test_a_delta_on_another_base_leaves_the_model_clean_as_it_was(small: Engine, tmp_path: Path) -> None:
    before = small.bits()
    other = changed(small.state, 0.05, seed=1)
    with pytest.raises(ChecksumError, match="builds on"):
        small.apply(tiny.step(tmp_path / "v2", other, changed(other, 0.05, seed=2)))
    assert (small.bits(), small.lives[0].dirty, small.lives[0].identity) == (before, "", "v0")


def test_a_promise_that_is_not_kept_is_found_before_the_first_write(small: Engine, tmp_path: Path) -> None:
    before = small.bits()
    request = tiny.step(tmp_path / "v1", small.state, changed(small.state, 0.05))
    with pytest.raises(ChecksumError, match="promised"):
        small.apply(request | {"digest": "0" * 64})
    assert (small.bits(), small.lives[0].dirty) == (before, "")


def failing(action: Callable[[], None], times: int = 1) -> Callable[[], None]:
    """An action that fails its first `times` calls."""
    left = [times]

    def run() -> None:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("the device is gone")
        action()

    return run


def hooked(live: LiveModel, run: Callable[[], None]) -> None:
    live._hooks = (Hook(frozenset(range(len(live.plan.storages))), run),)


def test_a_failure_while_writing_is_taken_back(small: Engine, tmp_path: Path) -> None:
    before = small.bits()
    hooked(small.lives[0], failing(lambda: None))
    with pytest.raises(RuntimeError, match="device is gone"):
        small.apply(tiny.step(tmp_path / "v1", small.state, changed(small.state, 0.05)))
    assert (small.bits(), small.lives[0].dirty) == (before, "")


def test_a_model_that_cannot_be_put_back_is_dirty_until_it_is_overwritten(small: Engine, tmp_path: Path) -> None:
    """The retry sends all that the failed attempt may have written; differences are refused until then."""
    (live,) = small.lives
    lost, new = changed(small.state, 0.05, seed=1), changed(small.state, 0.05, seed=2)
    live.staged_bytes = 0
    hooked(live, failing(lambda: None))
    with pytest.raises(RuntimeError):
        small.apply(tiny.step(tmp_path / "v1", small.state, lost))
    assert live.dirty != ""
    with pytest.raises(PlacementError, match="only an overwrite"):
        small.apply(tiny.step(tmp_path / "v2", small.state, new))
    touched = {n: np.flatnonzero(small.state.held[n] != lost.held[n]) for n in lost.specs}
    small.apply(tiny.step(tmp_path / "v3", small.state, new, "overwrite", also=touched))
    assert (small.bits(), live.dirty, live.identity) == (small.oracle(new), "", "v3")


def test_an_overwrite_that_forgets_touched_elements_is_refused(small: Engine, tmp_path: Path) -> None:
    (live,) = small.lives
    live.staged_bytes = 0
    hooked(live, failing(lambda: None))
    with pytest.raises(RuntimeError):
        small.apply(tiny.step(tmp_path / "v1", small.state, changed(small.state, 0.05, seed=1)))
    with pytest.raises(ChecksumError):
        small.apply(tiny.step(tmp_path / "v2", small.state, changed(small.state, 0.05, seed=2), "overwrite"))
    assert live.dirty != ""


def test_weights_that_somebody_else_wrote_are_noticed(small: Engine, tmp_path: Path) -> None:
    other = changed(small.state, 0.9, seed=3)
    tiny.load(small.models[0], other)
    with pytest.raises(PlacementError, match="somebody else"):
        small.apply(tiny.step(tmp_path / "v1", small.state, changed(small.state, 0.05)))


def test_a_parameter_that_moved_needs_a_new_certificate(small: Engine, tmp_path: Path) -> None:
    weight = dict(small.models[0].named_parameters())["backbone.norm_f.weight"]
    weight.data = weight.data.clone()
    with pytest.raises(PlacementError, match="certify again"):
        small.apply(tiny.step(tmp_path / "v1", small.state, changed(small.state, 0.05)))


def test_a_chain_in_one_request_is_applied_in_order(small: Engine, tmp_path: Path) -> None:
    middle = changed(small.state, 0.05, seed=1)
    end = changed(middle, 0.05, seed=2)
    first = tiny.step(tmp_path / "v1", small.state, middle)
    second = tiny.step(tmp_path / "v2", middle, end, "context")
    parts = (*first["parts"], *second["parts"])
    small.apply(second | {"parts": parts, "base_digest": first["base_digest"]})
    assert small.bits() == small.oracle(end)


def test_an_unknown_tensor_is_refused(small: Engine, tmp_path: Path) -> None:
    old, new = tiny.random_state("qwen3"), changed(tiny.random_state("qwen3"))
    request = tiny.step(tmp_path / "v1", old, new) | {"base_digest": small.lives[0].digest}
    with pytest.raises(InputError, match="does not have"):
        small.apply(request)


def test_a_model_reads_as_its_checkpoint(small: Engine) -> None:
    (live,) = small.lives
    assert all(live.bits(name).tobytes() == small.state.held[name].tobytes() for name in live.specs)

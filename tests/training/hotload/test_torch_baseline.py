"""Tensors compared where they lie (here the CPU, by the operations that any device has): the same versions, byte for byte."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_fleet import MemoryObjects
from small_states import Held, changed, state

from groundhop.training.hotload.publisher import Publisher

torch = pytest.importorskip("torch")
from groundhop.training.hotload import torch_baseline  # noqa: E402
from groundhop.training.hotload.torch_baseline import DeviceBaseline  # noqa: E402

TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "U8": torch.uint8}
STATES = [state(tied=True)]
for seed in range(3):
    STATES.append(changed(STATES[-1], seed=seed, share=0.9 if seed == 1 else 0.05))


def named(weights: Held, *, masters: bool = False) -> Iterator[tuple[str, Any]]:
    """As a trainer gives them; with `masters` in FP32 and without the tied head."""
    for name, spec in weights.specs.items():
        given = torch.empty(spec.shape, dtype=TYPES[spec.dtype])
        given.view(-1).view(torch.uint8)[:] = torch.from_numpy(weights.bits(name).view(np.uint8).copy())
        if not masters:
            yield name, given
        elif name != "lm_head.weight":
            yield name, given.float() if spec.dtype == "BF16" else given


def numbers(weights: Held) -> Held:
    """The same without NaN, whose payloads a cast need not keep."""
    made = weights.copy()
    for name, spec in made.specs.items():
        if spec.dtype == "BF16":
            made.bits(name)[:] &= np.uint16(0xBFFF)
    return made


def started(store: MemoryObjects, folder: Path, devices: tuple[str, ...], **options: Any) -> Publisher:
    made = Publisher(store, folder, run_id="run", owner="one", devices=devices, **options)
    made.start(numbers(STATES[0]))
    return made


def parts_of(store: MemoryObjects) -> dict[str, bytes]:
    return {key: data for key, data in store.held.items() if "/delta-" in key or "/model-" in key}


def copies_of(publisher: Publisher) -> dict[str, Any]:
    home = publisher._take.__self__  # type: ignore[attr-defined]
    assert isinstance(home, DeviceBaseline)
    return home._copies


@pytest.mark.parametrize("encoding", ["auto", "context", "dense", "overwrite"])
@pytest.mark.parametrize("masters", [False, True])
def test_a_device_publishes_the_same_bytes(tmp_path: Path, encoding: str, masters: bool) -> None:
    made = []
    for devices in ((), ("cpu",)):
        store = MemoryObjects()
        one = started(store, tmp_path / str(len(devices)), devices, encoding=encoding)
        digests = [one.publish(named(numbers(weights), masters=masters)).digest for weights in STATES[1:]]
        made.append((parts_of(store), digests))
    assert made[0] == made[1]
    assert len(made[0][0]) == len(STATES)


def test_a_shared_layout_is_the_same_too(tmp_path: Path) -> None:
    stores = [MemoryObjects(), MemoryObjects()]
    for store, devices in zip(stores, ((), ("cpu",)), strict=True):
        one = started(store, tmp_path / str(len(devices)), devices, layout="shared")
        for weights in STATES[1:]:
            one.publish(named(numbers(weights)))
    assert parts_of(stores[0]) == parts_of(stores[1])


def test_a_copy_follows_what_is_committed(tmp_path: Path) -> None:
    one = started(MemoryObjects(), tmp_path, ("cpu",))
    for weights in STATES[1:]:
        one.publish(named(numbers(weights)))
    copies = copies_of(one)
    assert set(copies) == set(STATES[0].specs)
    assert all(copy.numpy().tobytes() == one.baseline.bits(name).tobytes() for name, copy in copies.items())


def test_a_copy_that_somebody_wrote_to_decides_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = started(MemoryObjects(), tmp_path, ("cpu",))
    one.publish(named(numbers(STATES[1])))
    copies_of(one)["model.embed_tokens.weight"][5:9] ^= 3
    with caplog.at_level(logging.WARNING):
        one.publish(named(numbers(STATES[2])))
    assert "is not the baseline" in caplog.text
    assert all(one.baseline.bits(n).tobytes() == numbers(STATES[2]).bits(n).tobytes() for n in STATES[2].specs)


def test_where_a_device_is_full_tensors_are_compared_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(array: Any, device: Any) -> Any:
        raise torch.OutOfMemoryError("no memory left")

    one = started(MemoryObjects(), tmp_path, ("cpu",))
    one.publish(named(numbers(STATES[1])))
    with monkeypatch.context() as patched:
        patched.setattr(torch_baseline, "_to_device", full)
        copies_of(one).pop("model.scales")
        one.publish(named(numbers(STATES[2])))
    one.publish(named(numbers(STATES[3])))
    assert all(one.baseline.bits(n).tobytes() == numbers(STATES[3]).bits(n).tobytes() for n in STATES[3].specs)

"""A tensor on a device (here the CPU, by the operations that any device has) codes to the same bytes."""

import numpy as np
import pytest
from codec_builders import ENCODINGS, adam_like, noise, scrambled, spec, step

from groundhop.training.hotload.delta import Encoding, encode_tensor
from groundhop.training.hotload.fingerprint import fingerprint

torch = pytest.importorskip("torch")
from groundhop.training.hotload.torch_codec import (  # noqa: E402
    bits_on_device,
    changes_on_device,
    encode_on_device,
    fingerprint_on_device,
    scatter_on_device,
    to_device,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("dtype", ["BF16", "F32", "U8"])
def test_a_device_writes_the_same_bytes(encoding: Encoding, dtype: str) -> None:
    old, new = adam_like(6000, 3e-6)
    if dtype != "BF16":
        old = noise(np.uint32 if dtype == "F32" else np.uint8, 3000)
        new = scrambled(old, 0.05)
    wanted = encode_tensor(spec("w", old, dtype), old, new, encoding=encoding)
    got = encode_on_device(spec("w", old, dtype), to_device(old, CPU), to_device(new, CPU), encoding=encoding)
    assert wanted is not None and got is not None
    assert (got.chunks, got.fingerprint, got.base_fingerprint) == (
        wanted.chunks,
        wanted.fingerprint,
        wanted.base_fingerprint,
    )


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_device_takes_changes_in_place(encoding: Encoding) -> None:
    old, new = adam_like(6000, 3e-6)
    delta = step(old, new, encoding)
    tensor = to_device(old, CPU).clone().view(torch.bfloat16).reshape(60, 100)
    bits = bits_on_device(tensor, delta.entries[0].spec)
    for change in list(changes_on_device(delta, delta.entries[0], tensor)):
        scatter_on_device(change, bits)
    assert tensor.view(torch.int16).numpy().tobytes() == new.tobytes()


@pytest.mark.parametrize("unit", [np.uint8, np.uint16, np.uint32])
@pytest.mark.parametrize("start", [0, 1, 6])
def test_a_device_sums_the_same_fingerprint(unit: type, start: int) -> None:
    bits = noise(unit, 1003)
    assert fingerprint_on_device(to_device(bits, CPU), start) == fingerprint(bits, start)
    assert fingerprint_on_device(to_device(bits, CPU)[3:], start) == fingerprint(bits[3:], start)

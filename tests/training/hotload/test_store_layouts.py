"""A checkpoint of many shards in, the same out, bit for bit, through full snapshots and deltas in both layouts."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from small_disk import small_disk
from small_states import Held, changed, state, tree, write_folder
from snapshot_builders import digest_of, publish_delta, publish_full

from groundhop.errors import ChecksumError, GroundhopError, InputError, SpaceError
from groundhop.training.hotload.bits import TensorSpec
from groundhop.training.hotload.delta import apply_delta, dump_delta, read_delta
from groundhop.training.hotload.safetensors_file import make_header
from groundhop.training.hotload.store.index import index_key
from groundhop.training.hotload.store.objects import Objects, open_objects
from groundhop.training.hotload.store.shared_layout import (
    SharedTensor,
    adler32,
    apply_shared,
    encode_shared,
    read_shared,
    transcode,
    write_shared,
)
from groundhop.training.hotload.store.snapshots import SnapshotWriter, materialize

LAYOUTS = pytest.mark.parametrize("layout", ["groundhop", "shared"])
OPERATIONS = pytest.mark.parametrize("operation", ["differential", "overwrite"])


def steps(count: int, tied: bool = True) -> list[Held]:
    states = [state(tied=tied)]
    for number in range(count):
        states.append(changed(states[-1], seed=number))
    return states


def folder_of(weights: Held, folder: Path) -> dict[str, bytes]:
    return tree(write_folder(weights, folder, shards=3))


@LAYOUTS
def test_a_checkpoint_of_three_shards_comes_back_bit_for_bit(objects: Objects, tmp_path: Path, layout: str) -> None:
    states = steps(3)
    states.insert(2, states[1].copy())  # a step that changes nothing
    wanted = [folder_of(weights, tmp_path / str(number)) for number, weights in enumerate(states)]
    publish_full(objects, 0, tmp_path / "0")
    for number in range(1, 5):
        publish_delta(objects, number, states[number - 1], states[number], layout=layout)
    for number in range(5):
        materialize(objects, f"weight_v{number:06d}", tmp_path / "out")
        assert tree(tmp_path / "out") == wanted[number]


def test_both_layouts_and_both_operations_make_one_chain(objects: Objects, tmp_path: Path) -> None:
    states = steps(4)
    wanted = folder_of(states[4], tmp_path / "4")
    folder_of(states[0], tmp_path / "0")
    publish_full(objects, 0, tmp_path / "0")
    publish_delta(objects, 1, states[0], states[1])
    publish_delta(objects, 2, states[1], states[2], layout="shared")
    publish_delta(objects, 3, states[2], states[3], layout="shared", operation="overwrite")
    publish_delta(objects, 4, states[3], states[4])
    assert materialize(objects, "weight_v000004", tmp_path / "out").digest == digest_of(states[4])
    assert tree(tmp_path / "out") == wanted


def test_tensors_across_their_natural_addresses_are_restored(tmp_path: Path) -> None:
    before, after = steps(1)
    odd = TensorSpec(name="a.odd", dtype="U8", shape=(3,))
    for number, weights in enumerate((before, after)):
        weights.specs = {odd.name: odd, **weights.specs}
        weights.held[odd.name] = np.arange(3, dtype=np.uint8)
        head, body, at = {}, b"", 0
        for name, spec in sorted(weights.specs.items()):
            body += weights.bits(name).tobytes()
            head[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [at, len(body)]}
            at = len(body)
        text = json.dumps(head).encode()
        (tmp_path / str(number)).mkdir()
        shard = tmp_path / str(number) / "model.safetensors"
        shard.write_bytes(len(text).to_bytes(8, "little") + text + body)
    objects = open_objects(tmp_path / "store")
    publish_full(objects, 0, tmp_path / "0")
    publish_delta(objects, 1, before, after)
    materialize(objects, "weight_v000001", tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tmp_path / "1")


@pytest.mark.parametrize("held", ["file", "folder"])
def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path, held: str) -> None:
    folder_of(state(), tmp_path / "model")
    objects = open_objects(tmp_path / "store")
    publish_full(objects, 0, tmp_path / "model")
    thesis = tmp_path / "out" / "thesis.tex" if held == "folder" else tmp_path / "out"
    thesis.parent.mkdir(exist_ok=True)
    thesis.write_text("all of it")
    with pytest.raises(InputError, match="not replaced"):
        materialize(objects, "weight_v000000", tmp_path / "out")
    assert thesis.read_text() == "all of it"


def test_shards_without_an_index_get_one(tmp_path: Path) -> None:
    folder_of(state(), tmp_path / "model")
    (tmp_path / "model" / "model.safetensors.index.json").unlink()
    objects = open_objects(tmp_path / "store")
    publish_full(objects, 0, tmp_path / "model")
    materialize(objects, "weight_v000000", tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert (set(index["weight_map"]), index["metadata"]["total_size"]) == (
        set(state().specs),
        sum(spec.nbytes for spec in state().specs.values()),
    )


@LAYOUTS
def test_a_flipped_byte_of_a_part_is_refused_and_the_old_folder_stays(tmp_path: Path, layout: str) -> None:
    states = steps(1)
    folder_of(states[0], tmp_path / "0")
    objects = open_objects(tmp_path / "store")
    publish_full(objects, 0, tmp_path / "0")
    index = publish_delta(objects, 1, *states, layout=layout)
    materialize(objects, "weight_v000000", tmp_path / "out")
    before = tree(tmp_path / "out")
    for part in index.parts:
        content = objects.get(part.key)
        objects.put(part.key, content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(ChecksumError, match="SHA-256"):
            materialize(objects, "weight_v000001", tmp_path / "out")
        objects.put(part.key, content)
    assert tree(tmp_path / "out") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "out", "store"]


@pytest.mark.parametrize("layer", ["index", "header", "frame", "checksum", "truncated", "payload"])
def test_each_layer_of_the_shared_layout_finds_its_own_damage(tmp_path: Path, layer: str) -> None:
    """Another writer gives no SHA-256: then header, zstd frames and Adler-32 must hold."""
    states = steps(1)
    folder_of(states[0], tmp_path / "0")
    objects = open_objects(tmp_path / "store")
    publish_full(objects, 0, tmp_path / "0")
    publish_delta(objects, 1, *states, layout="shared")
    raw = json.loads(objects.get(index_key("weight_v000001")))
    metadata = {key: value for key, value in raw["metadata"].items() if not key.startswith("groundhop")}
    file = sorted(set(raw["weight_map"].values()))[0]
    key = f"weight_v000001/{file}"
    content = bytearray(objects.get(key))
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"][1])
    start = 8 + length + header[name]["data_offsets"][0]
    match layer:
        case "index":
            raw["weight_map"][name] = "../" + file
        case "header":
            content[8 + content[8:].index(b"data_offsets") + len(b'data_offsets":[')] ^= 1
        case "frame":
            content[start] ^= 1
        case "checksum":
            at = content.index(header["__metadata__"][name].encode())
            content[at] = ord("0") if content[at] != ord("0") else ord("1")
        case "truncated":
            del content[-1]
        case "payload":
            # A frame that is whole but holds other bytes.
            spec = states[0].specs[name]
            other = zstandard.ZstdCompressor().compress(os.urandom(spec.nbytes))
            tensor = SharedTensor(name, other, header["__metadata__"][name], 1)
            content = bytearray(write_shared([tensor]))
            raw["weight_map"] = {name: file}
        case _:
            raise AssertionError(layer)
    objects.put(key, bytes(content))
    objects.put(
        index_key("weight_v000001"), json.dumps({"metadata": metadata, "weight_map": raw["weight_map"]}).encode()
    )
    with pytest.raises(GroundhopError) as caught:
        materialize(objects, "weight_v000001", tmp_path / "out")
    assert (isinstance(caught.value, InputError | ChecksumError), (tmp_path / "out").exists()) == (True, False)


def one_part(tmp_path: Path, tensor: SharedTensor) -> Path:
    (tmp_path / "part.safetensors").write_bytes(write_shared([tensor]))
    return tmp_path / "part.safetensors"


BITS = st.sampled_from(["BF16", "F16", "F32", "U8"])


@given(kind=BITS, size=st.integers(0, 300), seed=st.integers(0, 2**31), share=st.sampled_from([0.0, 0.01, 0.5, 1.0]))
@settings(max_examples=40, deadline=None)
@OPERATIONS
def test_what_is_coded_is_decoded(
    tmp_path_factory: pytest.TempPathFactory, operation: str, kind: str, size: int, seed: int, share: float
) -> None:
    spec, random = TensorSpec(name="w", dtype=kind, shape=(size,)), np.random.default_rng(seed)
    old = random.integers(0, 256, spec.nbytes, dtype=np.uint8).view(spec.unit)
    new = np.where(random.random(spec.size) < share, ~old, old)
    tensor = encode_shared(spec, old, new, operation=operation)  # type: ignore[arg-type]
    if tensor is None:
        assert old.tobytes() == new.tobytes()
        return
    part = read_shared(one_part(tmp_path_factory.mktemp("part"), tensor), operation)  # type: ignore[arg-type]
    assert part.new_bits(spec, old).tobytes() == new.tobytes()


def weights_of(bits: NDArray[np.uint16]) -> Held:
    return Held({"w": TensorSpec(name="w", dtype="BF16", shape=bits.shape)}, {"w": bits})


def test_an_xor_on_a_wrong_base_is_refused(tmp_path: Path) -> None:
    old = np.arange(100, dtype=np.uint16)
    new = old.copy()
    new[7] = 0x8000
    spec = weights_of(old).specs["w"]
    path = one_part(tmp_path, encode_shared(spec, old, new))  # type: ignore[arg-type]
    wrong = old.copy()
    wrong[50] ^= 1
    with pytest.raises(ChecksumError, match="Adler-32"):
        apply_shared(read_shared(path, "differential"), weights_of(wrong))
    assert wrong[50] == 51


def test_an_overwrite_also_sends_what_an_attempt_before_may_have_written(tmp_path: Path) -> None:
    old = np.arange(100, dtype=np.uint16)
    new = old.copy()
    new[7] = 0x8000
    spec = weights_of(old).specs["w"]
    tensor = encode_shared(spec, old, new, operation="overwrite", also=np.array([50, 99]))
    half_written = old.copy()
    half_written[[50, 99]] = 1
    weights = weights_of(half_written)
    apply_shared(read_shared(one_part(tmp_path, tensor), "overwrite"), weights)  # type: ignore[arg-type]
    assert (half_written.tobytes(), tensor and tensor.changed) == (new.tobytes(), 3)


def test_an_xor_cannot_send_what_did_not_change() -> None:
    bits = np.zeros(4, np.uint16)
    with pytest.raises(InputError, match="only an overwrite"):
        encode_shared(weights_of(bits).specs["w"], bits, bits, also=np.array([1]))


@pytest.mark.parametrize("shape", ["frames", "no size"])
def test_payloads_of_other_compressors_are_read(tmp_path: Path, shape: str) -> None:
    old, new = np.arange(5000, dtype=np.uint16), np.arange(5000, dtype=np.uint16)[::-1].copy()
    mask = (old ^ new).tobytes()
    compressor = zstandard.ZstdCompressor(write_content_size=shape == "frames")
    pieces = [mask[:3000], mask[3000:]] if shape == "frames" else [mask]
    payload = b"".join(compressor.compress(piece) for piece in pieces)
    path = one_part(tmp_path, SharedTensor("w", payload, adler32(new.tobytes()), 1))
    weights = weights_of(old)
    apply_shared(read_shared(path, "differential"), weights)
    assert weights.bits("w").tobytes() == new.tobytes()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\1\0\0\0",
        b"\1\0\0\0\0\0\0\0",
        b"\1\0\0\0\x09\0\0\0x",
        b"\2\0\0\0\1\0\0\0\1\0\0\0xy",
        b"\xff\xff\xff\xffxyz",
    ],
    ids=["empty", "no positions", "no values", "out of range", "twice", "count"],
)
def test_malformed_overwrites_are_refused(tmp_path: Path, raw: bytes) -> None:
    path = one_part(tmp_path, SharedTensor("w", zstandard.ZstdCompressor().compress(raw), "00000001", 1))
    with pytest.raises(InputError):
        apply_shared(read_shared(path, "overwrite"), weights_of(np.zeros(4, np.uint16)))


def test_a_payload_that_decodes_to_more_than_the_tensor_is_refused(tmp_path: Path) -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(50_000_000))
    path = one_part(tmp_path, SharedTensor("w", bomb, "00000001", 1))
    with pytest.raises(InputError, match="need"):
        apply_shared(read_shared(path, "differential"), weights_of(np.zeros(4, np.uint16)))


def test_a_part_of_anything_but_bytes_is_refused(tmp_path: Path) -> None:
    head, _ = make_header([TensorSpec(name="w", dtype="BF16", shape=(2,))], {"w": "00000001"})
    (tmp_path / "part").write_bytes(head + bytes(4))
    with pytest.raises(InputError, match="vector of U8"):
        read_shared(tmp_path / "part", "differential")


@OPERATIONS
def test_a_part_in_our_codec_leads_to_the_same_bits(tmp_path: Path, operation: str) -> None:
    before, after = steps(1)
    coded = [
        encode_shared(spec, before.bits(name), after.bits(name), operation=operation)  # type: ignore[arg-type]
        for name, spec in before.specs.items()
    ]
    (tmp_path / "part").write_bytes(write_shared(tensor for tensor in coded if tensor))
    part = read_shared(tmp_path / "part", operation)  # type: ignore[arg-type]
    content = dump_delta(transcode(part, before), version=1, base_digest="", digest="")
    apply_delta(read_delta(content), before)
    assert digest_of(before) == digest_of(after)


def test_a_full_snapshot_is_checked_against_the_adler_32_of_other_writers(tmp_path: Path) -> None:
    spec, content = TensorSpec(name="w", dtype="U8", shape=(4,)), b"abcd"
    objects = open_objects(tmp_path / "store")
    for version, promised in ((1, adler32(content)), (2, "00000001")):
        head, _ = make_header([spec], {"w": promised})
        objects.put(f"v{version}/model.safetensors", head + content)
        objects.put(index_key(f"v{version}"), json.dumps({"weight_map": {"w": "model.safetensors"}}).encode())
    materialize(objects, "v1", tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes().endswith(content)
    with pytest.raises(ChecksumError, match="Adler-32"):
        materialize(objects, "v2", tmp_path / "out")


def test_a_shard_that_is_no_safetensors_is_not_taken(tmp_path: Path) -> None:
    with (
        pytest.raises(InputError, match="safetensors"),
        SnapshotWriter(open_objects(tmp_path), "v1", version=1, kind="full") as writer,
    ):
        writer.add(b"GHDELTA2")


def test_a_checkpoint_that_does_not_fit_leaves_nothing_behind(tmp_path: Path) -> None:
    folder_of(state(), tmp_path / "model")
    objects = open_objects(tmp_path / "store")
    publish_full(objects, 0, tmp_path / "model")
    with small_disk(tmp_path / "small", 1 << 13) as folder:
        with pytest.raises(SpaceError):
            materialize(objects, "weight_v000000", folder / "out")
        assert list(folder.iterdir()) == []

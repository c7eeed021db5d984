import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small_states import Held, changed, held_by, state, tree, write_folder

from groundhop.errors import GroundhopError, InputError, MissingError
from groundhop.training.hotload.bits import TensorSpec
from groundhop.training.hotload.checkpoint import open_checkpoint, write_checkpoint
from groundhop.training.hotload.fingerprint import fingerprint, state_digest
from groundhop.training.hotload.safetensors_file import read_header


def file_of(table: object, data: bytes = b"", raw: bytes | None = None) -> bytes:
    text = json.dumps(table).encode() if raw is None else raw
    return struct.pack("<Q", len(text)) + text + data


def entry(kind: str, shape: list[int], start: int, stop: int) -> dict[str, object]:
    return {"dtype": kind, "shape": shape, "data_offsets": [start, stop]}


def test_a_file_of_the_safetensors_library_is_read_as_it_is(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.numpy").save_file
    arrays = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.arange(5, dtype=np.int8),
        "e": np.zeros((0, 2)),
    }
    save_file(arrays, tmp_path / "x.safetensors", {"by": "library"})
    assert held_by(open_checkpoint(tmp_path / "x.safetensors")) == {name: a.tobytes() for name, a in arrays.items()}


def test_the_safetensors_library_reads_what_is_written(tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    weights = state()
    write_checkpoint(weights, tmp_path / "x.safetensors")
    got = {name: tensor.contiguous().flatten() for name, tensor in load_file(tmp_path / "x.safetensors").items()}
    import torch

    assert {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in got.items()} == held_by(weights)


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_a_folder_comes_out_byte_for_byte_with_its_shards_and_other_files(tmp_path: Path, shards: int) -> None:
    folder = write_folder(state(), tmp_path / "in", shards)
    write_checkpoint(open_checkpoint(folder), tmp_path / "out", like=folder)
    assert tree(tmp_path / "out") == tree(folder)


def test_a_changed_state_takes_the_headers_of_the_one_it_is_like(tmp_path: Path) -> None:
    folder, after = write_folder(state(), tmp_path / "in"), changed(state())
    write_checkpoint(after, tmp_path / "out", like=folder)
    assert tree(tmp_path / "out") == tree(write_folder(after, tmp_path / "wanted"))


def test_weights_in_other_files_are_not_carried_along(tmp_path: Path, caplog) -> None:
    folder = write_folder(state(), tmp_path / "in")
    (folder / "consolidated.safetensors").write_bytes(b"old")
    (folder / "pytorch_model.bin").write_bytes(b"old")
    write_checkpoint(changed(state()), tmp_path / "out", like=folder)
    assert not {"consolidated.safetensors", "pytorch_model.bin"} & set(tree(tmp_path / "out"))
    assert "consolidated.safetensors, pytorch_model.bin" in caplog.text


def test_a_folder_of_links_into_a_cache_comes_out_as_files(tmp_path: Path) -> None:
    folder = write_folder(state(), tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for path in folder.iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    write_checkpoint(open_checkpoint(tmp_path / "snapshot"), tmp_path / "out", like=tmp_path / "snapshot")
    assert tree(tmp_path / "out") == tree(folder)
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


def test_the_same_place_can_be_written_over(tmp_path: Path) -> None:
    folder, after = write_folder(state(), tmp_path / "x"), changed(state())
    source = open_checkpoint(folder)
    write_checkpoint(after, folder, like=source)
    assert held_by(open_checkpoint(folder)) == held_by(after)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_unaligned_tensors_are_read_and_kept_where_they_lie(tmp_path: Path) -> None:
    table = {"a": entry("U8", [3], 0, 3), "b": entry("F32", [2], 3, 11), "c": entry("BF16", [1], 11, 13)}
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(table, bytes(range(13))))
    source = open_checkpoint(path)
    assert source.bits("b").flags.aligned
    write_checkpoint(source, tmp_path / "y.safetensors", like=source)
    assert (tmp_path / "y.safetensors").read_bytes() == path.read_bytes()


def test_mapped_bits_cannot_be_written(tmp_path: Path) -> None:
    write_checkpoint(state(), tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="read-only"):
        open_checkpoint(tmp_path / "x.safetensors").bits("model.scales")[0] = 1


def test_the_digest_is_that_of_the_state_however_it_is_stored(tmp_path: Path) -> None:
    weights = state()
    write_checkpoint(weights, tmp_path / "x.safetensors")
    one, many = open_checkpoint(tmp_path / "x.safetensors"), open_checkpoint(write_folder(weights, tmp_path / "f", 3))
    prints = {name: fingerprint(weights.bits(name)) for name in weights.specs}
    assert one.digest == many.digest == state_digest(weights.specs, prints)


GOOD = {"a": entry("BF16", [2, 2], 0, 8), "b": entry("U8", [1], 8, 9)}
BROKEN = {
    "empty file": b"",
    "seven bytes": b"1234567",
    "a header longer than the file": struct.pack("<Q", 1000) + b"{}",
    "a header of 2^63 bytes": struct.pack("<Q", 2**63) + b"{}",
    "no JSON": file_of(None, raw=b"{no"),
    "no UTF-8": file_of(None, raw=b'{"\xff": 1}'),
    "a list": file_of([]),
    "a pit of brackets": file_of(None, raw=b"[" * 200_000),
    "a name twice": file_of(None, b"12", raw=b'{"a":' + json.dumps(entry("U8", [1], 0, 1)).encode() + b',"a":1}'),
    "a number for metadata": file_of({"__metadata__": {"x": 1}}),
    "an unknown type": file_of({"a": entry("F4", [2], 0, 1)}, b"1"),
    "a negative size": file_of({"a": entry("U8", [-1, -1], 0, 1)}, b"1"),
    "offsets too far apart": file_of({"a": entry("U8", [1], 0, 2)}, b"12"),
    "offsets in the wrong order": file_of({"a": entry("U8", [0], 2, 0)}, b"12"),
    "a huge shape": file_of({"a": entry("F32", [2**62, 2**62], 0, 4)}, b"1234"),
    "a hole": file_of({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, b"123"),
    "an overlap": file_of({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"123"),
    "a byte too many": file_of(GOOD, bytes(10)),
    "a byte too few": file_of(GOOD, bytes(8)),
    "an unknown key": file_of({"a": {**entry("U8", [1], 0, 1), "more": 1}}, b"1"),
    "a missing key": file_of({"a": {"dtype": "U8", "shape": [1]}}, b"1"),
    "a fraction": file_of({"a": entry("U8", [1.5], 0, 1)}, b"1"),  # type: ignore[list-item]
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_file_is_refused_in_one_line_that_names_it(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(BROKEN[fault])
    with pytest.raises(InputError, match=r"x\.safetensors") as error:
        open_checkpoint(path)
    assert "\n" not in str(error.value)


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    whole, path = file_of(GOOD, bytes(9)), tmp_path / "x.safetensors"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError):
            read_header(path)


def shard_gone(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def shards_swapped(folder: Path) -> None:
    first, second = sorted(folder.glob("*.safetensors"))
    held = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(held)


def climbs_out(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001", "../in/model-00001"))


def two_answers(folder: Path) -> None:
    write_checkpoint(state(), folder / "model.safetensors")


def no_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[]")


def held_twice(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    first = next(folder.glob("*.safetensors"))
    (folder / "more.safetensors").write_bytes(first.read_bytes())


@pytest.mark.parametrize("damage", [shard_gone, shards_swapped, climbs_out, two_answers, no_index, held_twice])
def test_a_folder_whose_parts_disagree_is_refused(tmp_path: Path, damage) -> None:
    folder = write_folder(state(), tmp_path / "in")
    damage(folder)
    with pytest.raises((InputError, MissingError)):
        open_checkpoint(folder)


def test_nothing_is_not_a_checkpoint(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(MissingError, match="no "):
            open_checkpoint(path)


def other_things(folder: Path) -> Path:
    (folder / "out").mkdir()
    (folder / "out" / "thesis.tex").write_text("years of work")
    return folder / "out"


def a_file(folder: Path) -> Path:
    (folder / "out").write_text("text")
    return folder / "out"


@pytest.mark.parametrize(
    "place", [other_things, a_file, lambda folder: folder, lambda folder: folder / "in" / "inside"]
)
def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path, place) -> None:
    folder = write_folder(state(), tmp_path / "in")
    out = place(tmp_path)
    before = tree(tmp_path)
    with pytest.raises(InputError):
        write_checkpoint(state(), out, like=folder)
    assert tree(tmp_path) == before


def test_other_tensors_than_those_it_is_like_are_refused(tmp_path: Path) -> None:
    folder = write_folder(state(), tmp_path / "in")
    with pytest.raises(InputError, match=r"lm_head\.weight"):
        write_checkpoint(state(tied=True), tmp_path / "out", like=folder)


class Dying(Held):
    def bits(self, name: str):
        if name == "model.layers.0.norm.weight":
            raise OSError(28, "No space left on device")
        return super().bits(name)


def test_a_failure_on_the_way_leaves_the_place_as_it_was(tmp_path: Path) -> None:
    before = tree(write_folder(state(), tmp_path / "x"))
    weights = changed(state())
    with pytest.raises(OSError, match="No space"):
        write_checkpoint(Dying(weights.specs, weights.held), tmp_path / "x", like=tmp_path / "x")
    assert tree(tmp_path / "x") == before
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from small_states import Held, changed, state
from groundhop.training.hotload.checkpoint import write_checkpoint
class Killed(Held):
    def bits(self, name):
        if name == "model.layers.1.none.weight":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().bits(name)
weights = changed(state())
write_checkpoint(Killed(weights.specs, weights.held), Path(sys.argv[2]), like=Path(sys.argv[2]))
"""


def test_after_a_kill_the_old_state_stands_and_the_next_writer_clears_the_half_away(tmp_path: Path) -> None:
    before = tree(write_folder(state(), tmp_path / "x"))
    command = [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(tmp_path / "x")]
    assert subprocess.run(command, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode == -9
    assert tree(tmp_path / "x") == before
    assert len(list(tmp_path.iterdir())) == 2
    write_checkpoint(changed(state()), tmp_path / "x", like=tmp_path / "x")
    assert held_by(open_checkpoint(tmp_path / "x")) == held_by(changed(state()))
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_shape_that_holds_nothing_is_a_tensor_too(tmp_path: Path) -> None:
    spec = TensorSpec(name="none", dtype="F32", shape=(0, 3))
    write_checkpoint(Held({"none": spec}, {"none": np.zeros(0, np.uint32)}), tmp_path / "x.safetensors")
    opened = open_checkpoint(tmp_path / "x.safetensors")
    assert (opened.specs["none"], opened.bits("none").size, issubclass(InputError, GroundhopError)) == (spec, 0, True)

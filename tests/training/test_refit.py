"""Deltas of bits, states with digests, and the conversation with a server that does not do as it should."""

import asyncio
import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from groundhop.errors import ChecksumError, InputError, ServerError
from groundhop.training.hotload import sparse
from groundhop.training.hotload.refit import load_checkpoint, make_refitter, step
from groundhop.training.hotload.sparse import Delta, Patch
from groundhop.training.hotload.state import State, bits_of, read_checkpoint, tensor_of

torch = pytest.importorskip("torch")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def bits(*patterns: int) -> sparse.Bits:
    return np.array(patterns, dtype=np.uint16)


def state(**tensors: sparse.Bits) -> State:
    return State({name: tensor.copy() for name, tensor in tensors.items()}, {n: t.shape for n, t in tensors.items()})


def tensors(given: State) -> dict[str, Any]:
    return {name: tensor_of(array.copy(), given.shapes[name]) for name, array in given.bits.items()}


SPECIAL = bits(0x0000, 0x8000, 0x7FC0, 0x7FC1, 0x0001, 0x7F80, 0xFF80, 0x3F80)
"""+0, -0, two NaNs, a subnormal, both infinities, 1."""
TARGET = bits(0x8000, 0x0000, 0x7FC1, 0x7FC1, 0x0002, 0xFF80, 0xFF80, 0x3F80)


def test_changes_are_found_by_bits_not_by_value() -> None:
    patch = sparse.diff("w", SPECIAL, TARGET)
    assert patch is not None
    assert patch.positions.tolist() == [0, 1, 2, 4, 5]


def test_nan_that_stays_is_not_a_change() -> None:
    assert sparse.diff("w", SPECIAL, SPECIAL.copy()) is None


def delta_of(old: State, new: State, version: str = "1") -> Delta:
    patches = [sparse.diff(name, old.bits[name], new.bits[name]) for name in old.bits]
    return Delta(version, old.digest, new.digest, tuple(patch for patch in patches if patch is not None))


def test_a_delta_file_gives_the_target_byte_for_byte(tmp_path: Path) -> None:
    old, new = state(w=SPECIAL, v=bits(1, 2)), state(w=TARGET, v=bits(1, 2))
    size = sparse.write(tmp_path / "d", delta_of(old, new))
    old.patch(sparse.read(tmp_path / "d"))
    assert size == (tmp_path / "d").stat().st_size
    assert (old.bits["w"].tobytes(), old.digest) == (TARGET.tobytes(), new.digest)


def test_nothing_changed_is_a_small_valid_delta(tmp_path: Path) -> None:
    same = state(w=SPECIAL)
    assert sparse.write(tmp_path / "d", delta_of(same, same)) < 400
    read = sparse.read(tmp_path / "d")
    assert (read.patches, read.base) == ((), read.target)


def test_a_delta_applied_twice_changes_nothing_more() -> None:
    old, new = state(w=SPECIAL), state(w=TARGET)
    delta = delta_of(old, new)
    old.patch(delta)
    old.patch(delta)
    assert old.bits["w"].tobytes() == TARGET.tobytes()


def test_a_delta_on_another_base_is_refused_and_changes_nothing() -> None:
    held = state(w=bits(*range(8)))
    before = (held.bits["w"].tobytes(), held.digest)
    with pytest.raises(ChecksumError, match="builds on"):
        held.patch(delta_of(state(w=SPECIAL), state(w=TARGET)))
    assert (held.bits["w"].tobytes(), held.digest) == before


def test_a_result_that_is_not_the_promised_one_is_undone() -> None:
    old = state(v=bits(5, 6), w=SPECIAL)
    good = delta_of(old, state(v=bits(7, 6), w=TARGET))
    bad = Delta(good.version, good.base, "0" * 64, good.patches)
    before = (old.bits["w"].tobytes(), old.bits["v"].tobytes(), old.digest, dict(old.digests))
    with pytest.raises(ChecksumError, match="promised"):
        old.patch(bad)
    assert (old.bits["w"].tobytes(), old.bits["v"].tobytes(), old.digest, old.digests) == before


def test_a_tensor_that_is_not_there_undoes_the_others() -> None:
    old = state(v=bits(5, 6))
    good = delta_of(old, state(v=bits(7, 6)))
    stranger = Patch("z", 2, np.array([0], dtype=np.uint32), bits(9), "")
    with pytest.raises(InputError, match="changes z"):
        old.patch(Delta("1", good.base, good.target, (*good.patches, stranger)))
    assert old.bits["v"].tolist() == [5, 6]


@pytest.mark.parametrize("keep", [0, 5, 12, 60, -1])
def test_a_cut_file_is_refused(tmp_path: Path, keep: int) -> None:
    sparse.write(tmp_path / "d", delta_of(state(w=SPECIAL), state(w=TARGET)))
    content = (tmp_path / "d").read_bytes()
    (tmp_path / "d").write_bytes(content[:keep])
    with pytest.raises(InputError):
        sparse.read(tmp_path / "d")


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    sparse.write(tmp_path / "d", delta_of(state(w=SPECIAL), state(w=TARGET)))
    content = (tmp_path / "d").read_bytes()
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 0x10
        (tmp_path / "d").write_bytes(flipped)
        with pytest.raises((InputError, ChecksumError)):
            sparse.read(tmp_path / "d")


def test_a_header_that_claims_more_than_the_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "d").write_bytes(sparse.MAGIC + struct.pack("<I", 2**32 - 1) + b"{}" + bytes(100))
    with pytest.raises(InputError, match="claims 4294967295"):
        sparse.read(tmp_path / "d")


def test_logical_order_counts_not_storage_order() -> None:
    """Transposed and sliced tensors give their row-major bits."""
    weight = torch.arange(12, dtype=torch.float32).reshape(3, 4).to(torch.bfloat16)
    for view in (weight.t(), weight[:, 1:3], weight[::2]):
        assert bits_of(view).tolist() == bits_of(torch.tensor(view.tolist())).tolist()


def test_float32_weights_are_compared_after_rounding_to_bf16() -> None:
    old = state(w=bits_of(torch.ones(4)))
    delta = step(old, [("w", torch.tensor([1.0, 1.0 + 2**-12, 1.0 + 2**-6, 1.0]))], "1")
    assert [patch.positions.tolist() for patch in delta.patches] == [[2]]


def test_a_step_leads_to_the_digest_it_promises() -> None:
    old, new = state(w=SPECIAL, v=bits(1, 2)), state(w=TARGET, v=bits(1, 3))
    delta = step(old, tensors(new).items(), "1")
    old.patch(delta)
    assert old.digest == delta.target == new.digest


@pytest.mark.parametrize("both", [True, False])
def test_a_tied_head_goes_with_the_embedding(both: bool) -> None:
    """The trainer names one storage once or twice; the checkpoint has one name."""
    old, new = state(**{EMBEDDING: bits(1, 2, 3)}), state(**{EMBEDDING: bits(1, 9, 3)})
    named = tensors(new)
    if both:
        named[HEAD] = named[EMBEDDING]
    delta = step(old, named.items(), "1")
    assert ([patch.name for patch in delta.patches], delta.target) == ([EMBEDDING], new.digest)


def test_a_tied_head_that_the_checkpoint_names_moves_along() -> None:
    old = state(**{EMBEDDING: bits(1, 2, 3), HEAD: bits(1, 2, 3)})
    new = state(**{EMBEDDING: bits(1, 9, 3), HEAD: bits(1, 9, 3)})
    delta = step(old, [(EMBEDDING, tensors(new)[EMBEDDING])], "1")
    old.patch(delta)
    assert old.digest == new.digest == delta.target


def test_a_tied_head_that_drifted_is_refused() -> None:
    named = {EMBEDDING: tensor_of(bits(1, 9), (2,)), HEAD: tensor_of(bits(1, 8), (2,))}
    with pytest.raises(InputError, match="differs from"):
        step(state(**{EMBEDDING: bits(1, 2)}), named.items(), "1")


@pytest.mark.parametrize(
    ("names", "words"), [(["w"], "did not give 1"), (["w", "v", "z"], "z, which"), (["w", "v", "w"], "twice")]
)
def test_a_trainer_with_other_tensors_than_the_checkpoint_is_refused(names: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        step(state(w=bits(1), v=bits(2)), [(name, tensor_of(bits(1), (1,))) for name in names], "1")


class Stub:
    """A server that speaks the routes of a refit with real states, and fails where told."""

    def __init__(self, checkpoint: Path) -> None:
        self.state = read_checkpoint(checkpoint)
        self.version = "default"
        self.calls: list[str] = []
        self.failing: dict[str, int] = {}
        """Route or method, and how often it still fails."""

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        name = body["method"] if path == "/collective_rpc" else path
        self.calls.append(name)
        if self.failing.get(name, 0) > 0:
            self.failing[name] -= 1
            return 500, {"error": "told to fail"}
        if name == "/update_weight_version":
            self.version = body["new_version"]
        if path != "/collective_rpc":
            return 200, {}
        try:
            source = Path(body["args"][0])
            if name == "groundhop_apply_delta":
                self.state.patch(sparse.read(source))
            else:
                self.state = read_checkpoint(source)
        except ChecksumError as error:
            return 200, {"results": [{"ok": False, "digest": self.state.digest, "error": str(error)}]}
        return 200, {"results": [{"ok": True, "digest": self.state.digest, "error": ""}]}


@contextmanager
def serving(stub: Stub) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, answer = stub.answer(urlsplit(self.path).path, json.loads(body or b"{}"))
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def checkpoint(folder: Path, **patterns: sparse.Bits) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    save_file(
        {name: tensor_of(array.copy(), array.shape) for name, array in patterns.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text("{}")
    return folder


def test_all_replicas_hold_the_new_bits_and_the_version(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base", w=SPECIAL)
    one, two = Stub(base), Stub(base)
    with serving(one) as first, serving(two) as second:
        refitter = make_refitter([first, second], tmp_path / "deltas", base, 5)
        results = [asyncio.run(refitter.refit(tensors(state(w=new)).items())) for new in (TARGET, TARGET, SPECIAL)]
    assert [(r.version, r.changed, r.total) for r in results] == [("5", 5, 8), ("6", 0, 8), ("7", 5, 8)]
    assert one.state.digest == two.state.digest == results[-1].digest == state(w=SPECIAL).digest
    assert (one.version, two.version) == ("7", "7")
    whole = ["/pause", "groundhop_apply_delta", "/update_weight_version", "/resume"]
    assert one.calls == whole * 3
    assert [path.name for path in (tmp_path / "deltas").iterdir()] == ["version-7.delta"]


def test_a_replica_that_fails_gets_the_whole_checkpoint(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base", w=SPECIAL)
    good, bad = Stub(base), Stub(base)
    bad.failing["groundhop_apply_delta"] = 1
    with serving(good) as first, serving(bad) as second:
        refitter = make_refitter([first, second], tmp_path / "deltas", base, 1)
        result = asyncio.run(refitter.refit(tensors(state(w=TARGET)).items()))
    assert good.state.digest == bad.state.digest == result.digest
    assert bad.calls[-3:] == ["groundhop_load_checkpoint", "/update_weight_version", "/resume"]


def test_a_replica_that_cannot_be_healed_is_named_resumed_and_the_next_refit_works(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base", w=SPECIAL)
    good, bad = Stub(base), Stub(base)
    bad.failing = {"groundhop_apply_delta": 1, "groundhop_load_checkpoint": 1}
    with serving(good) as first, serving(bad) as second:
        refitter = make_refitter([first, second], tmp_path / "deltas", base, 1)
        with pytest.raises(ServerError, match=second):
            asyncio.run(refitter.refit(tensors(state(w=TARGET)).items()))
        assert (bad.calls[-1], bad.version, good.version) == ("/resume", "torn", "1")
        result = asyncio.run(refitter.refit(tensors(state(w=TARGET[::-1].copy())).items()))
    assert (result.version, good.version, bad.version) == ("2", "2", "2")
    assert good.state.digest == bad.state.digest == result.digest


def test_a_pause_that_fails_stops_the_refit_before_any_weight_moves(tmp_path: Path) -> None:
    """Such as when the server could not throw away the old keys and values."""
    base = checkpoint(tmp_path / "base", w=SPECIAL)
    stub = Stub(base)
    stub.failing["/pause"] = 1
    with serving(stub) as url, pytest.raises(ServerError, match="/pause answered 500"):
        asyncio.run(make_refitter([url], tmp_path / "d", base, 1).refit(tensors(state(w=TARGET)).items()))
    assert (stub.calls, stub.version) == (["/pause", "/resume"], "default")


def test_a_server_that_is_gone_is_named(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base", w=SPECIAL)
    with serving(Stub(base)) as url:
        pass
    with pytest.raises(ServerError, match=url):
        asyncio.run(make_refitter([url], tmp_path / "d", base, 1).refit(tensors(state(w=TARGET)).items()))


def test_a_replica_that_missed_a_version_is_brought_up(tmp_path: Path) -> None:
    base, newer = checkpoint(tmp_path / "base", w=SPECIAL), checkpoint(tmp_path / "newer", w=TARGET)
    stub = Stub(base)
    with serving(stub) as url:
        result = asyncio.run(make_refitter([url], tmp_path / "d", newer, 9).refit(tensors(state(w=SPECIAL)).items()))
    assert (stub.state.digest, stub.version) == (result.digest, "9")


def test_loading_a_checkpoint_labels_it(tmp_path: Path) -> None:
    base, other = checkpoint(tmp_path / "base", w=SPECIAL), checkpoint(tmp_path / "other", w=TARGET)
    stub = Stub(base)
    with serving(stub) as url:
        digest = asyncio.run(load_checkpoint([url], other, "sft"))
    assert (stub.state.digest, stub.version) == (digest, "sft")
    assert stub.calls == ["/pause", "groundhop_load_checkpoint", "/update_weight_version", "/resume"]


def test_a_server_that_loads_something_else_is_refused(tmp_path: Path) -> None:
    base, other = checkpoint(tmp_path / "base", w=SPECIAL), checkpoint(tmp_path / "other", w=TARGET)
    stub = Stub(base)
    stub.answer = lambda path, body: (  # type: ignore[method-assign]
        200,
        {"results": [{"ok": True, "digest": "f" * 64, "error": ""}]},
    )
    with serving(stub) as url, pytest.raises(ServerError, match="holds ffffffffffff"):
        asyncio.run(load_checkpoint([url], other, "sft"))

"""The record on the wire: read as it was written, and whatever is damaged is refused in our words."""

import hashlib

import msgspec
import numpy as np
import pytest
import torch
import zstandard
from sketch_builders import SHAPES, TARGETS, Trainer

from groundhop.errors import ChecksumError, GroundhopError, InputError
from groundhop.training.sketch.expand import Step
from groundhop.training.sketch.record import HEAD, MAGIC, Sketch, dump_record, encode_step, read_record
from groundhop.training.sketch.sender import Sender, step_of


def sent(*, master: bool = True) -> bytes:
    """A record with a sketch, a delta and a master."""
    trainer = Trainer(rank=1)
    sender = Sender(trainer.named(), trainer.checkpoint(), TARGETS)
    updates = trainer.step()
    sender.add({TARGETS[0]: updates[TARGETS[0]]})
    if master:
        sender.resync([TARGETS[1]])
    else:
        trainer.weights[TARGETS[1]] = torch.ones(SHAPES[TARGETS[1]])
    return sender.send(trainer.named()).content


def sealed(content: bytes) -> bytes:
    return content + hashlib.sha256(content).digest()


def with_table(content: bytes, table: bytes) -> bytes:
    """The record with another table, sealed anew."""
    _, coded, _ = HEAD.unpack(content[: HEAD.size])
    packed = zstandard.ZstdCompressor().compress(table)
    return sealed(HEAD.pack(MAGIC, len(packed), len(table)) + packed + content[HEAD.size + coded : -32])


def table_of(content: bytes) -> bytes:
    _, coded, _ = HEAD.unpack(content[: HEAD.size])
    return zstandard.ZstdDecompressor().decompress(content[HEAD.size : HEAD.size + coded])


@pytest.mark.parametrize("dtype", [np.int8, np.int16])
def test_a_step_is_read_as_it_was_written(dtype: type) -> None:
    random, limits = np.random.default_rng(1), np.iinfo(dtype)
    integers = random.integers(limits.min, limits.max, (9, 5), dtype=dtype, endpoint=True)
    step = Step(7, float(np.float32(0.999)), integers, random.integers(-126, 101, 9, dtype=np.int16), b"d" * 16)
    (row, body), record = encode_step(step), read_record(sent())
    sketch = Sketch(msgspec.structs.replace(record.sketches[0].row, rows=9, steps=(row,)), (body,))
    (got,) = sketch.steps()
    assert np.array_equal(got.integers, step.integers) and got.integers.dtype == dtype
    assert np.array_equal(got.exponents, step.exponents)
    assert (got.seed, got.decay, got.sign_digest) == (step.seed, step.decay, step.sign_digest)


def test_a_record_says_what_the_sender_put_in() -> None:
    trainer, record = Trainer(rank=1), read_record(sent())
    update = trainer.step()[TARGETS[0]]
    (got,) = record.sketches[0].steps()
    assert record.names == [TARGETS[0], "norm.weight", TARGETS[1]]
    assert np.array_equal(got.integers, step_of(update).integers)
    assert got.sign_digest == step_of(update).sign_digest


def test_every_flipped_or_missing_byte_is_refused() -> None:
    content = sent(master=False)
    assert read_record(content).names == [TARGETS[0], TARGETS[1], "norm.weight"]
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 0x10
        for wrong in (bytes(damaged), content[:place]):
            with pytest.raises((InputError, ChecksumError), match="sketch record"):
                read_record(wrong)


def test_a_damaged_table_under_a_right_seal_never_gets_through_as_another_kind_of_error() -> None:
    content, refused = sent(), 0
    table = table_of(content)
    for place in range(len(table)):
        for mask in (0x01, 0x80, 0xFF):
            damaged = bytearray(table)
            damaged[place] ^= mask
            try:
                for sketch in read_record(with_table(content, bytes(damaged))).sketches:
                    sketch.steps()
            except GroundhopError:
                refused += 1
    assert refused > len(table)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table[1][0].__setitem__(1, 1 << 40), "factors"),
        (lambda table: table[1][0][5][0].__setitem__(5, 1 << 50), "bodies"),
        (lambda table: table[1].append([*table[1][0][:5], []]), "factors"),
        (lambda table: table[1][0].__setitem__(0, "norm.weight"), "named twice"),
        (lambda table: table[1][0][5][0].__setitem__(3, 7), "cannot be read"),
        (lambda table: table.append("more"), "cannot be read"),
        (lambda table: table[0].__setitem__(3, ""), "cannot be read"),
    ],
)
def test_lengths_and_kinds_are_checked_before_anything_is_made_of_them(change, message: str) -> None:  # type: ignore[no-untyped-def]
    content = sent()
    table = msgspec.msgpack.decode(table_of(content))
    change(table)
    with pytest.raises(InputError, match=message):
        read_record(with_table(content, msgspec.msgpack.encode(table)))


def test_masters_that_are_not_whole_fp32_are_refused() -> None:
    record = read_record(sent())
    with pytest.raises(InputError, match="masters whole"):
        read_record(dump_record(record.head, [], [], [entry.tensor_delta for entry in record.delta.entries]))


def test_another_file_is_named_as_such() -> None:
    content = sent()
    with pytest.raises(InputError, match="not a sketch record"):
        read_record(sealed(b"GHDELTA2" + content[8:-32]))

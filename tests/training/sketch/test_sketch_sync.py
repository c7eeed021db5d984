"""A trainer's sender and a receiving site: the same bits always, never the larger encoding, every damage mended or refused."""

import os
import signal
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from sketch_builders import OTHER, TARGETS, Bfloat16, Trainer, Wide

from groundhop.errors import ChecksumError, ConflictError, InputError, MissingError, SpaceError
from groundhop.training.hotload import commands, durable
from groundhop.training.hotload.checkpoint import open_checkpoint, write_checkpoint
from groundhop.training.hotload.delta import apply_delta, read_delta
from groundhop.training.sketch import site as site_module
from groundhop.training.sketch.record import Sketch, dump_record, encode_step, read_record
from groundhop.training.sketch.sender import Sender, Sent
from groundhop.training.sketch.site import Applied, Site

FIRST = TARGETS[0]


class Pair:
    """A trainer, its sender and a site."""

    def __init__(self, folder: Path, *, resync_every: int = 0, snapshot_every: int = 20, **trainer: float) -> None:
        self.folder = folder / "site"
        self.trainer = Trainer(**trainer)  # type: ignore[arg-type]
        base = self.trainer.checkpoint()
        self.sender = Sender(self.trainer.named(), base, TARGETS, resync_every=resync_every)
        self.site = Site.create(self.folder, base, TARGETS, snapshot_every=snapshot_every)
        self.asked: list[list[str]] = []

    def fetch(self, names: Collection[str]) -> bytes:
        self.asked.append(list(names))
        return self.sender.delta(names)

    def sent(self, steps: int = 1) -> Sent:
        for _ in range(steps):
            self.sender.add(self.trainer.step())
        return self.sender.send(self.trainer.named())

    def sync(self, steps: int = 1) -> tuple[Sent, Applied]:
        sent = self.sent(steps)
        return sent, self.site.apply(sent.content, self.fetch)

    def equal(self, site: Site | None = None) -> bool:
        held = {name: whole.bits for name, whole in (site or self.site).named()}
        wanted = self.trainer.canonical()
        return held.keys() == wanted.keys() and all(np.array_equal(held[name], wanted[name]) for name in wanted)


def nothing(names: Collection[str]) -> bytes:
    raise AssertionError(f"asked for {names}")


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("decay", [1.0, float(np.float32(0.9999))])
def test_twenty_syncs_keep_the_sites_bits_equal_by_sketches(tmp_path: Path, bits: int, decay: float) -> None:
    pair = Pair(tmp_path, bits=bits, decay=decay)
    for _ in range(20):
        sent, applied = pair.sync()
        assert (sent.sketched, applied.repaired, pair.equal()) == (TARGETS, (), True)
    assert set(pair.site.states.values()) == {"MASTER_VALID"}


def test_the_steps_between_two_syncs_go_in_one_record(tmp_path: Path) -> None:
    pair = Pair(tmp_path, rate=6e-3)
    sent, _ = pair.sync(steps=3)
    assert (sent.sketched, pair.equal()) == (TARGETS, True)
    assert [len(sketch.row.steps) for sketch in read_record(sent.content).sketches] == [3, 3]


def test_the_output_is_a_delta_that_hotload_applies(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    write_checkpoint(pair.trainer.checkpoint(), tmp_path / "before.safetensors")
    _, applied = pair.sync()
    (tmp_path / "step.delta").write_bytes(applied.delta)
    commands.apply(tmp_path / "before.safetensors", tmp_path / "step.delta", tmp_path / "after.safetensors")
    after = open_checkpoint(tmp_path / "after.safetensors")
    assert after.digest == applied.digest
    assert all(np.array_equal(after.bits(name), bits) for name, bits in pair.trainer.canonical().items())


@pytest.mark.parametrize("rate", [2e-7, 2e-6, 2e-5, 2e-4, 2e-3])
@pytest.mark.parametrize("rank", [2, 16, 64])
def test_t_l10_no_weight_is_sent_in_the_larger_encoding(tmp_path: Path, rate: float, rank: int) -> None:
    pair = Pair(tmp_path, rate=rate, rank=rank)
    for _ in range(4):
        sent, _ = pair.sync()
        # The record that was applied last gives the whole step again as a delta.
        record, alone = read_record(sent.content), read_delta(pair.site.apply(sent.content, nothing).delta)
        by_delta = {entry.name: entry.tensor_delta.nbytes for entry in alone.entries}
        assert all(sketch.nbytes <= by_delta[sketch.row.name] for sketch in record.sketches)
        # The record's own head and digests are what may come on top of a delta that is sent as it is.
        assert len(sent.content) <= sent.delta_bytes + 320
        assert pair.equal()


def test_small_steps_go_as_deltas_and_leave_the_master_stale(tmp_path: Path) -> None:
    pair = Pair(tmp_path, rate=2e-7)
    sent, _ = pair.sync()
    assert (sent.sketched, pair.equal()) == ((), True)
    assert set(pair.sender.states.values()) == {"MASTER_STALE"}
    assert dict(pair.site.states) == dict(pair.sender.states)


def test_steps_that_a_delta_stood_for_bring_the_master_up_when_they_are_the_smaller(tmp_path: Path) -> None:
    pair = Pair(tmp_path, rate=2e-7)
    pair.sync()
    pair.trainer.rate = 2e-3
    sent, applied = pair.sync()
    assert (sent.sketched, applied.repaired, pair.equal()) == (TARGETS, (), True)
    assert [len(sketch.row.steps) for sketch in read_record(sent.content).sketches] == [2, 2]
    assert set(pair.site.states.values()) == {"MASTER_VALID"}


def test_a_resync_by_number_brings_masters_up_and_sketches_go_on(tmp_path: Path) -> None:
    pair = Pair(tmp_path, rate=2e-7, resync_every=3)
    assert [pair.sync()[0].sketched for _ in range(3)] == [(), (), TARGETS]
    assert (pair.equal(), set(pair.site.states.values())) == (True, {"MASTER_VALID"})


def test_a_weight_that_moved_without_a_step_comes_whole_at_a_resync(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.trainer.weights[FIRST] += 0.01
    sent = pair.sender.send(pair.trainer.named())
    pair.site.apply(sent.content, nothing)
    assert (pair.sender.states[FIRST], pair.site.states[FIRST]) == ("MASTER_STALE", "MASTER_STALE")
    assert pair.sync()[0].sketched == TARGETS[1:]
    pair.sender.resync()
    assert pair.sync()[0].resynced == (FIRST,)
    assert pair.sync()[0].sketched == TARGETS
    assert (pair.equal(), pair.asked) == (True, [])


def corrupted(content: bytes) -> bytes:
    """The record with one integer of its first sketch changed by one, sealed anew."""
    record = read_record(content)
    first = record.sketches[0]
    (step,) = first.steps()
    integers = step.integers.copy()
    integers[5, 1] ^= 1
    row, body = encode_step(replace(step, integers=integers))
    sketch = Sketch(msgspec.structs.replace(first.row, steps=(row,)), (body,))
    return resealed(record, [sketch, *record.sketches[1:]])


def resealed(record, sketches) -> bytes:  # type: ignore[no-untyped-def]
    return dump_record(record.head, sketches, [e.tensor_delta for e in record.delta.entries], [])


@pytest.mark.parametrize("bits", [8, 16])
def test_t_l11_a_corrupted_integer_is_caught_and_mended_through_the_delta(tmp_path: Path, bits: int) -> None:
    # At a high rate, so that one step of an integer shows in the checkpoint's bits.
    pair = Pair(tmp_path, bits=bits, rate=0.5 if bits == 16 else 2e-2)
    sent = pair.sent()
    applied = pair.site.apply(corrupted(sent.content), pair.fetch)
    assert (applied.repaired, pair.asked, pair.equal()) == ((FIRST,), [[FIRST]], True)
    assert pair.site.states[FIRST] == pair.sender.states[FIRST] == "MASTER_STALE"
    assert pair.sync()[0].sketched == TARGETS[1:]
    pair.sender.resync()
    pair.sync()
    assert (pair.sync()[0].sketched, pair.equal(), len(pair.asked)) == (TARGETS, True, 1)


def test_a_repaired_record_is_repaired_again_after_a_restart_without_asking(tmp_path: Path) -> None:
    pair = Pair(tmp_path, rate=2e-2)
    pair.site.apply(corrupted(pair.sent().content), pair.fetch)
    again = Site(pair.folder)
    assert (pair.equal(again), again.states[FIRST], len(pair.asked)) == (True, "MASTER_STALE", 1)


@pytest.mark.parametrize("what", ["signs", "since", "rank"])
def test_a_sketch_that_cannot_be_used_is_mended_through_the_delta(tmp_path: Path, what: str) -> None:
    pair = Pair(tmp_path)
    record = read_record(pair.sent().content)
    first = record.sketches[0]
    match what:
        case "signs":
            step = msgspec.structs.replace(first.row.steps[0], sign_digest=b"x" * 16)
            row = msgspec.structs.replace(first.row, steps=(step,))
        case "rank":
            step = msgspec.structs.replace(first.row.steps[0], rank=5)
            row = msgspec.structs.replace(first.row, steps=(step,))
        case _:
            row = msgspec.structs.replace(first.row, since=7)
    content = resealed(record, [Sketch(row, first.bodies), *record.sketches[1:]])
    assert (pair.site.apply(content, pair.fetch).repaired, pair.equal()) == ((FIRST,), True)


def test_a_wrong_repair_changes_nothing(tmp_path: Path) -> None:
    pair = Pair(tmp_path, rate=2e-2)
    content = corrupted(pair.sent().content)
    digest = pair.site.digest
    other = Pair(tmp_path / "other", rate=3e-2)
    other.sent()
    for wrong in (other.sender.delta([FIRST]), pair.sender.delta(TARGETS)):
        with pytest.raises((InputError, ChecksumError)):
            pair.site.apply(content, lambda _, wrong=wrong: wrong)
    assert (pair.site.digest, pair.site.version, Site(pair.folder).digest) == (digest, 0, digest)
    assert (pair.site.apply(content, pair.fetch).repaired, pair.equal()) == ((FIRST,), True)


def test_a_record_is_applied_once_and_says_the_same_twice(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    sent, applied = pair.sync()
    for site in (pair.site, Site(pair.folder)):
        assert site.apply(sent.content, nothing) == applied
    assert pair.equal()


def test_a_record_out_of_turn_or_of_another_trainer_is_refused(tmp_path: Path) -> None:
    pair, other = Pair(tmp_path / "a"), Pair(tmp_path / "b", seed=1)
    first, second = pair.sent(), pair.sent()
    with pytest.raises(ConflictError, match="builds on 1"):
        pair.site.apply(second.content, nothing)
    with pytest.raises(InputError, match="began from"):
        other.site.apply(first.content, nothing)
    record = read_record(first.content)
    with pytest.raises(InputError, match="cannot build on 0"):
        pair.site.apply(dump_record(msgspec.structs.replace(record.head, version=0), record.sketches, [], []), nothing)
    for sent in (first, second):
        pair.site.apply(sent.content, nothing)
    assert pair.equal()


def apply_and_die(site: Site, content: bytes, fetch, writes: int) -> None:  # type: ignore[no-untyped-def]
    """Apply a record in a process that ends without a word at its next durable file after `writes` of them."""
    child = os.fork()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        return
    write, left = durable.write, iter(range(writes))

    def dying(path: Path, content: bytes) -> None:
        if next(left, None) is None:
            path.parent.mkdir(exist_ok=True)
            path.with_name(path.name + ".tmp").write_bytes(content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, content)

    durable.write = dying
    site.apply(content, fetch)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("writes", "version"), [(0, 1), (1, 1), (2, 2)])
def test_a_site_killed_with_a_repaired_record_holds_all_of_it_or_nothing(
    tmp_path: Path, writes: int, version: int
) -> None:
    pair = Pair(tmp_path, rate=2e-2)
    pair.sync()
    content = corrupted(pair.sent().content)
    apply_and_die(pair.site, content, pair.sender.delta, writes)
    pair.site = Site(pair.folder)
    assert (pair.site.version, pair.equal()) == (version, version == 2)
    pair.site.apply(content, pair.fetch)
    assert (pair.site.version, pair.equal(), pair.asked) == (2, True, [[FIRST]] * (2 - version))


class KilledError(Exception):
    """Ends an `apply` where a process would have been killed."""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_around_a_snapshot_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    pair = Pair(tmp_path, snapshot_every=1)
    snapshot = site_module.write_snapshot

    def dying(state, folder):  # type: ignore[no-untyped-def]
        if when == "after":
            snapshot(state, folder)
        raise KilledError

    sent = pair.sent()
    with monkeypatch.context() as patch:
        patch.setattr(site_module, "write_snapshot", dying)
        with pytest.raises(KilledError):
            pair.site.apply(sent.content, nothing)
    again = Site(pair.folder)
    assert (again.version, pair.equal(again)) == (1, True)
    held = Bfloat16(Trainer().canonical())
    apply_delta(read_delta(again.apply(sent.content, nothing).delta), held)
    assert all(np.array_equal(held.bits(name), bits) for name, bits in pair.trainer.canonical().items())


def test_a_snapshot_that_finds_no_room_is_tried_again_with_the_next_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(tmp_path, snapshot_every=1)

    def full(*_: object) -> None:
        raise SpaceError("full")

    with monkeypatch.context() as patch:
        patch.setattr(site_module, "write_snapshot", full)
        pair.sync()
    assert (pair.equal(Site(pair.folder)), len(list((pair.folder / "log").iterdir()))) == (True, 1)
    pair.sync()
    assert (pair.equal(Site(pair.folder)), list((pair.folder / "log").iterdir())) == (True, [])


def test_snapshots_end_the_log_and_a_restart_goes_on(tmp_path: Path) -> None:
    pair = Pair(tmp_path, snapshot_every=3)
    for number in range(1, 8):
        pair.sync()
        assert len(list((pair.folder / "log").iterdir())) == number % 3
    pair.site = Site(pair.folder, snapshot_every=3)
    pair.sync()
    assert (pair.site.version, pair.equal()) == (8, True)


def test_masters_of_an_fp32_checkpoint_must_round_to_the_checkpoint(tmp_path: Path) -> None:
    trainer = Trainer()
    base = trainer.checkpoint()
    trainer.step()
    masters = Wide(trainer.named())
    with pytest.raises(InputError, match="does not round"):
        Site.create(tmp_path / "site", base, TARGETS, masters)
    site = Site.create(tmp_path / "site", trainer.checkpoint(), TARGETS, masters)
    sender = Sender(trainer.named(), base, TARGETS)
    sender.add(trainer.step())
    sent = sender.send(trainer.named())
    assert sent.sketched == TARGETS
    assert site.apply(sent.content, nothing).repaired == ()
    # The same checkpoint without what rounding took away.
    again = Trainer()
    again.step()
    blind = Site.create(tmp_path / "other", again.checkpoint(), TARGETS)
    with pytest.raises(InputError, match="began from"):
        blind.apply(sent.content, nothing)


@pytest.mark.parametrize("targets", [(), ("missing.weight",), (OTHER,)])
def test_targets_that_no_master_can_be_of_are_refused(tmp_path: Path, targets: tuple[str, ...]) -> None:
    trainer = Trainer()
    for make in (
        lambda: Sender(trainer.named(), trainer.checkpoint(), targets),
        lambda: Site.create(tmp_path, trainer.checkpoint(), targets),
    ):
        with pytest.raises(InputError):
            make()


def test_a_folder_without_a_site_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="create one"):
        Site(tmp_path / "nothing")


def test_steps_that_change_nothing_are_not_sent(tmp_path: Path) -> None:
    pair = Pair(tmp_path, rate=0.0)
    before = pair.site.digest
    sent, applied = pair.sync()
    assert (sent.sketched, applied.digest, len(sent.content) < 500) == ((), before, True)
    assert set(pair.sender.states.values()) == {"MASTER_VALID"}

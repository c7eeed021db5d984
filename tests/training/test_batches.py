from collections import Counter

from groundhop.training.batches import order

LENGTHS = [(7 * i) % 31 + 1 for i in range(50)]


def test_an_epoch_reads_every_row_once() -> None:
    assert sorted(order(LENGTHS, epochs=1, batch=8, seed=3)) == list(range(50))


def test_two_and_a_half_epochs_read_every_row_two_or_three_times() -> None:
    counts = Counter(order(LENGTHS, epochs=2.5, batch=8, seed=3))
    assert len(counts) == 50 and set(counts.values()) == {2, 3} and sum(counts.values()) == 125


def test_the_seed_fixes_the_order() -> None:
    assert order(LENGTHS, epochs=2, batch=8, seed=3) == order(LENGTHS, epochs=2, batch=8, seed=3)
    assert order(LENGTHS, epochs=2, batch=8, seed=3) != order(LENGTHS, epochs=2, batch=8, seed=4)


def test_batches_hold_like_lengths() -> None:
    reads = order(LENGTHS, epochs=1, batch=8, seed=3)
    spreads = [max(b) - min(b) for i in range(0, 48, 8) if (b := [LENGTHS[row] for row in reads[i : i + 8]])]
    assert max(spreads) < 8


def test_fewer_rows_than_a_batch_still_make_one() -> None:
    assert sorted(order([5, 1, 3], epochs=0.5, batch=8, seed=0)) in ([0, 1], [0, 2], [1, 2])

"""The projections' signs: Philox by its published answers, the same on numpy and torch, even, and independent of wrappers."""

import numpy as np
import pytest

from groundhop.training.logra.signs import philox, projection_seed, sign_matrix, sign_tensor

EXPECTED_SEED = 2535199015166369425
EXPECTED_SIGNS = [[1, -1, -1, -1, -1, -1, -1, 1], [1, 1, 1, 1, 1, -1, 1, 1]]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        # Random123's kat_vectors, philox4x32 with 10 rounds, all zero.
        (0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ],
)
def test_philox_gives_the_published_words(counter: int, key: int, words: tuple[int, ...]) -> None:
    assert tuple(int(word[0]) for word in philox(np.array([counter]), key)) == words


def test_philox_equals_plain_python_integers_for_large_counters_and_keys() -> None:
    counters, key = [0, 1, 2**31, 2**32 - 1, 2**32, 2**40 + 12345, 2**62], 0xDEADBEEF_FFFFFFFF
    found = np.stack(philox(np.array(counters), key), axis=1)
    assert found.tolist() == [plain_philox(one, key) for one in counters]


def plain_philox(counter: int, key: int) -> list[int]:
    x = [counter & 0xFFFFFFFF, counter >> 32, 0, 0]
    k = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        a, b = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
        x = [(b >> 32) ^ x[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ x[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return x


@pytest.mark.parametrize(("rank", "columns"), [(1, 1), (3, 5), (64, 576), (7, 129)])
def test_torch_draws_the_same_signs_as_numpy(rank: int, columns: int) -> None:
    seed = projection_seed(42, 3, "model.layers.0.mlp.up_proj.weight")
    assert np.array_equal(sign_tensor(seed, rank, columns, "cpu").numpy(), sign_matrix(seed, rank, columns))


def test_signs_are_plus_or_minus_one_and_even_in_every_row() -> None:
    signs = sign_matrix(projection_seed(1, 0, "w"), 256, 4096)
    assert set(np.unique(signs)) == {-1, 1}
    assert np.abs(signs.mean(axis=1)).max() < 5 / 64  # five standard deviations of a mean of 4,096 signs


def test_another_update_name_or_base_gives_other_signs() -> None:
    seeds = {projection_seed(base, update, name) for base in (1, 2) for update in (0, 1, 2) for name in ("a", "b")}
    assert len(seeds) == 12


def test_the_first_signs_of_a_projection_stay_what_receivers_have_seen() -> None:
    seed = projection_seed(42, 7, "model.layers.0.self_attn.q_proj.weight")
    drawn = sign_matrix(seed, 2, 8)
    assert (seed, drawn.tolist()) == (EXPECTED_SEED, EXPECTED_SIGNS)

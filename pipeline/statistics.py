"""Intervals and tests for rates measured on few questions, several tries each.

Q = questions, B = bootstrap draws. Tries at one question are correlated, so whatever pools tries is resampled by
question (Miller 2024, arXiv 2411.00640). All random draws take a seed.
"""

from math import comb
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Floats = NDArray[np.float64]

CHUNK = 1_000_000
"""Resampled cells held in memory at once."""
EXACT_FLIPS = 16
"""Up to so many questions that differ, a permutation test goes through all sign flips."""


class Interval(NamedTuple):
    """An estimate with its 95 % interval; None where there is no number."""

    value: float | None
    low: float | None
    high: float | None


NOTHING = Interval(None, None, None)


def wilson(passed: int, total: int, level: float = 0.95) -> Interval:
    """Score interval of a rate (Wilson 1927); no number for no tries."""
    if total == 0:
        return NOTHING
    z = float(stats.norm.ppf((1 + level) / 2))
    rate, share = passed / total, z * z / total
    centre = (rate + share / 2) / (1 + share)
    half = z * np.sqrt(rate * (1 - rate) / total + share / total / 4) / (1 + share)
    return Interval(rate, max(0.0, float(centre - half)), min(1.0, float(centre + half)))


def jeffreys(passed: int, total: int, level: float = 0.95) -> Interval:
    """Posterior mean and equal-tailed interval of a rate under Beta(1/2, 1/2).

    As Brown, Cai and DasGupta 2001 (Statistical Science 16) advise, the interval reaches 0 and 1 when no try and when every
    try passed. With no tries at all it is the prior's mean and [0, 1].
    """
    posterior = stats.beta(passed + 0.5, total - passed + 0.5)
    low, high = (float(posterior.ppf(tail)) for tail in ((1 - level) / 2, (1 + level) / 2))
    return Interval((passed + 0.5) / (total + 1), 0.0 if passed == 0 else low, 1.0 if passed == total else high)


def pass_at_k(total: int, passed: int, k: int) -> float | None:
    """Chance that k of `total` tries, drawn without return, hold one that passed (Chen et al. 2021, arXiv 2107.03374).

    None for k above `total`: fewer tries than k say nothing about k.
    """
    if not 0 <= passed <= total:
        raise ValueError(f"need 0 <= passed <= total, got {passed} and {total}")
    return None if k > total or k < 1 else 1 - comb(total - passed, k) / comb(total, k)


def mcnemar(only_first: int, only_second: int) -> float:
    """Exact two-sided p that two policies differ, from the questions that only one of them solved (McNemar 1947)."""
    discordant = only_first + only_second
    return 1.0 if discordant == 0 else float(stats.binomtest(only_first, discordant, 0.5).pvalue)


def permutation_p(differences_Q: ArrayLike, seed: int, draws: int = 10_000) -> float:
    """Two-sided p that paired differences lean to one side: signs flipped question by question (Fisher 1935).

    Exact while at most `EXACT_FLIPS` questions differ; else the share of draws, the observed one counted in.
    """
    given = np.asarray(differences_Q, dtype=np.float64)
    moved = given[given != 0]
    if moved.size == 0:
        return 1.0
    observed = abs(moved.sum()) - 1e-9
    if moved.size <= EXACT_FLIPS:
        codes = np.arange(2**moved.size)[:, None] >> np.arange(moved.size) & 1
        return float(np.mean(np.abs((1 - 2 * codes) @ moved) >= observed))
    rng = np.random.default_rng(seed)
    beyond = 0
    for size in _chunks(draws, moved.size):
        signs = rng.integers(0, 2, size=(size, moved.size), dtype=np.int8) * 2 - 1
        beyond += int(np.count_nonzero(np.abs(signs @ moved) >= observed))
    return (beyond + 1) / (draws + 1)


def bootstrap_ratio(top_Q: ArrayLike, bottom_Q: ArrayLike, seed: int, draws: int = 10_000) -> Interval:
    """Ratio of two sums over questions, with the percentile interval of resampled questions (Efron 1979).

    A rate is passed / judged, a mean is sum / count, a comparison is one policy's calls / another's: question by question the
    two stay together. No number when the bottom sums to 0.
    """
    top, bottom = np.asarray(top_Q, dtype=np.float64), np.asarray(bottom_Q, dtype=np.float64)
    if top.size == 0 or bottom.sum() == 0:
        return NOTHING
    rng = np.random.default_rng(seed)
    ratios = []
    for size in _chunks(draws, top.size):
        weights_BQ = rng.multinomial(top.size, np.full(top.size, 1 / top.size), size=size)
        below = weights_BQ @ bottom
        ratios.append((weights_BQ @ top)[below > 0] / below[below > 0])
    low, high = np.quantile(np.concatenate(ratios), [0.025, 0.975])
    return Interval(float(top.sum() / bottom.sum()), float(low), float(high))


def bootstrap_mean(values_Q: ArrayLike, seed: int, draws: int = 10_000) -> Interval:
    """Mean over questions with the percentile interval of resampled questions; of differences, the paired bootstrap."""
    values = np.asarray(values_Q, dtype=np.float64)
    return bootstrap_ratio(values, np.ones_like(values), seed, draws)


def rate_over_questions(passed_Q: ArrayLike, tries_Q: ArrayLike, seed: int, draws: int = 10_000) -> Interval:
    """Share of tries that passed: Wilson with one try a question, else the bootstrap over questions.

    Where no try passed or all did, resampling sees no spread: then Wilson over the questions, each counted once.
    """
    passed, tries = np.asarray(passed_Q, dtype=np.int64), np.asarray(tries_Q, dtype=np.int64)
    passed, tries = passed[tries > 0], tries[tries > 0]
    right, total = int(passed.sum()), int(tries.sum())
    if total == 0 or tries.max() == 1:
        return wilson(right, total)
    if right in (0, total):
        return wilson(tries.size if right else 0, tries.size)
    return bootstrap_ratio(passed, tries, seed, draws)


def calibration_error(confidence_percent: ArrayLike, correct: ArrayLike, bin_size: int = 100) -> float | None:
    """Root mean square gap, in percentage points, between stated confidence and accuracy.

    Hendrycks et al. 2019 (arXiv 1812.04606): bins of `bin_size` by rising confidence. The last bin takes the rest and counts
    like any other; fewer rows than one bin are one bin. None without rows.
    """
    stated, right = np.asarray(confidence_percent, dtype=np.float64), np.asarray(correct, dtype=np.float64)
    if stated.size == 0:
        return None
    order = np.argsort(stated, kind="stable")
    stated, right = stated[order], 100 * right[order]
    starts = np.arange(max(1, stated.size // bin_size)) * bin_size
    counts = np.diff(np.append(starts, stated.size))
    gaps = (np.add.reduceat(stated, starts) - np.add.reduceat(right, starts)) / counts
    return float(np.sqrt(np.sum(counts / stated.size * gaps**2)))


def _chunks(draws: int, width: int) -> list[int]:
    step = max(1, CHUNK // max(1, width))
    return [min(step, draws - start) for start in range(0, draws, step)]

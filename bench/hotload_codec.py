"""The codec against formats of other systems, on the same data in the same run: bytes, and speed of one core.

    python bench/hotload_codec.py                     # all: trains SmolLM2-135M for 15 steps at first, then keeps the changes
    python bench/hotload_codec.py --no-real --elements 2000000 --repeats 1        # a quick look

Each format's decoder has to give the new state bit by bit, or the run stops. Speeds are medians of time on the processor
with one thread, in bytes of the checkpoint a second; beside them stands a numpy comparison of the same arrays in the same
run, timed in turn with the others.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("NUMBA_NUM_THREADS", "1")

import numpy as np
from hotload_data import RATES, Pair, adam_like, real, uniform
from hotload_tables import MARKERS, OURS, TIMED_STEP, Sizes, Speeds, bar_table, size_table, speed_table
from numpy.typing import NDArray
from result_page import replace_between
from rivals import RIVALS, Rival

from groundhop.training.hotload.delta import apply_delta, dump_delta, encode_tensor, read_delta
from groundhop.training.hotload.fingerprint import Fingerprint, fingerprint, state_digest

PLAIN = ("add", "xor")


class Held:
    """A state in memory."""

    def __init__(self, pair: Pair) -> None:
        self.specs = {spec.name: spec for spec in pair.specs}
        self._bits = {spec.name: bits.copy() for spec, bits in zip(pair.specs, pair.old, strict=True)}

    def bits(self, name: str) -> NDArray[Any]:
        """The bits of a tensor, which may be written."""
        return self._bits[name]


class Ours:
    """Our codec for one pair: what a publisher and a receiver do that both keep the fingerprints of the old state."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self.prints = {spec.name: fingerprint(bits) for spec, bits in zip(pair.specs, pair.old, strict=True)}

    def encode(self, encoding: Any) -> bytes:
        """The delta file."""
        pair = self._pair
        specs = {spec.name: spec for spec in pair.specs}
        prints: dict[str, Fingerprint] = dict(self.prints)
        deltas = []
        for spec, old, new in zip(pair.specs, pair.old, pair.new, strict=True):
            delta = encode_tensor(spec, old, new, encoding=encoding, prints=(self.prints[spec.name], None), threads=1)
            if delta is not None:
                deltas.append(delta)
                prints[spec.name] = delta.fingerprint
        base, digest = state_digest(specs, self.prints), state_digest(specs, prints)
        return dump_delta(deltas, version=1, base_digest=base, digest=digest)

    def apply(self, sent: bytes, held: Held) -> None:
        """Read the file and move `held` by it."""
        apply_delta(read_delta(sent), held, dict(self.prints))

    def check(self, sent: bytes) -> bytes:
        """Stop unless the file leads to the new state. Returns it."""
        held = Held(self._pair)
        self.apply(sent, held)
        check(self._pair, [held.bits(spec.name) for spec in self._pair.specs], "ours")
        return sent


def check(pair: Pair, got: Sequence[NDArray[Any]], name: str) -> None:
    """Stop unless `got` is the new state."""
    if not all(np.array_equal(one, other) for one, other in zip(got, pair.new, strict=True)):
        raise SystemExit(f"wrong bits: {name} on {pair.name}")


def measure_sizes(pair: Pair) -> Sizes:
    """Code the pair in each format, decode it, and count."""
    sent: dict[str, int] = {}
    for rival in RIVALS:
        pieces = rival.encode(pair.old, pair.new)
        check(pair, rival.decode(pair.old, pieces), rival.name)
        sent[rival.name] = sum(map(len, pieces))
    ours = Ours(pair)
    sent["plain"] = min(len(ours.check(ours.encode(encoding))) for encoding in PLAIN)
    for encoding in OURS[1:]:
        sent[encoding] = len(ours.check(ours.encode(encoding)))
    bounds = [bound(old, new) for old, new in zip(pair.old, pair.new, strict=True)]
    changed = sum(int((old != new).sum()) for old, new in zip(pair.old, pair.new, strict=True))
    total = sum(bits.size for bits in pair.old)
    plain, given = sum(one for one, _ in bounds), sum(other for _, other in bounds)
    return Sizes(pair.name, pair.nbytes, changed, total, sent, plain, given)


def bound(old: NDArray[np.uint16], new: NDArray[np.uint16]) -> tuple[float, float]:
    """Bytes by the empirical entropy of which elements change and by how much, without and with the old exponent known."""
    places = np.flatnonzero(old != new)
    moves = (new[places] - old[places]).astype(np.int64)
    exponents = (old >> 7 & 0xFF).astype(np.int64)
    totals = np.bincount(exponents, minlength=256)
    counts = np.bincount(exponents[places], minlength=256)
    plain = _binary(np.array([old.size]), np.array([places.size])) + _surprise(moves, np.zeros_like(moves))
    given = _binary(totals, counts) + _surprise(moves, exponents[places])
    return plain / 8, given / 8


def _binary(totals: NDArray[Any], counts: NDArray[Any]) -> float:
    """Bits to say which `counts` of `totals` elements are meant, class by class."""
    bits = 0.0
    for part in (counts, totals - counts):
        used = part > 0
        bits -= float((part[used] * np.log2(part[used] / totals[used])).sum())
    return bits


def _surprise(values: NDArray[np.int64], classes: NDArray[np.int64]) -> float:
    """Bits of `values`, each coded by the frequencies of its class."""
    _, class_counts = np.unique(classes, return_counts=True)
    _, counts = np.unique(classes * 2**16 + values, return_counts=True)
    return float((class_counts * np.log2(class_counts)).sum() - (counts * np.log2(counts)).sum())


def measure_speeds(pair: Pair, repeats: int) -> Speeds:
    """Time all formats in turn, `repeats` rounds, after one that does not count."""
    ours = Ours(pair)
    dcr = next(rival for rival in RIVALS if rival.name == "DCR")
    times: dict[str, list[float]] = {}
    for _ in range(repeats + 1):
        for name, seconds in _round(pair, ours, dcr):
            times.setdefault(name, []).append(seconds)
    rates = {name: pair.nbytes / 1e9 / statistics.median(taken[1:]) for name, taken in times.items()}
    changed = sum(int((old != new).sum()) for old, new in zip(pair.old, pair.new, strict=True))
    return Speeds(pair.name, changed / sum(bits.size for bits in pair.old), rates.pop("compare"), rates)


def _round(pair: Pair, ours: Ours, dcr: Rival) -> Iterator[tuple[str, float]]:
    yield "compare", _timed(lambda: [old != new for old, new in zip(pair.old, pair.new, strict=True)])[0]
    for name, encoding in (("plain", "add"), ("context", "context")):
        seconds, sent = _timed(lambda encoding=encoding: ours.encode(encoding))  # type: ignore[misc]
        yield f"{name} encode", seconds
        held = Held(pair)
        yield f"{name} apply", _timed(lambda sent=sent, held=held: ours.apply(sent, held))[0]  # type: ignore[misc]
    seconds, pieces = _timed(lambda: dcr.encode(pair.old, pair.new))
    yield "DCR encode", seconds
    yield "DCR decode", _timed(lambda: dcr.decode(pair.old, pieces))[0]


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = work()
    return max(time.process_time() - start, 1e-9), result


def pairs(options: argparse.Namespace) -> Iterator[tuple[Pair, bool]]:
    """All data, and whether speeds are taken on it."""
    for rate in (1e-6, 3e-7):
        yield adam_like(options.elements, rate), True
    for share in (0.01, 0.03, 0.05):
        yield uniform(options.elements, share), True
    for rate in () if options.no_real else RATES:
        for step, pair in enumerate(real(options.cache, options.models, rate), start=1):
            yield pair, step == TIMED_STEP


def main() -> None:
    """Measure, print, and write the tables down where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=16_000_000, help="size of the synthetic states")
    parser.add_argument("--repeats", type=int, default=7, help="timed rounds; 0: no speeds")
    parser.add_argument("--no-real", action="store_true", help="synthetic states only")
    parser.add_argument("--cache", type=Path, default=Path("models/hotload-bench"), help="where training's changes lie")
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables between the markers of this page")
    options = parser.parse_args()
    sizes, speeds = [], []
    for pair, timed in pairs(options):
        sizes.append(measure_sizes(pair))
        if timed and options.repeats:
            speeds.append(measure_speeds(pair, options.repeats))
        print(f"{pair.name}: {sizes[-1].sent}", flush=True)
    tables = [bar_table(sizes, speeds), size_table(sizes), *([speed_table(speeds)] if speeds else [])]
    print("\n" + "\n\n".join(tables))
    if options.write:
        replace_between(options.write, MARKERS, "\n\n".join(tables))


if __name__ == "__main__":
    main()

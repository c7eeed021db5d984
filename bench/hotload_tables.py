"""The tables of the codec bench, and the bars that it is held against."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hotload_data import RATES
from rivals import RIVALS

MARKERS = "hot-load codec"
OURS = ("plain", "context", "auto")
TIMED_STEP = 4
"""The step of the real data that the bars are set for, and that speeds are taken on."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of one pair of states."""

    name: str
    nbytes: int
    changed: int
    total: int
    sent: dict[str, int]
    """By format: those of `RIVALS` and `OURS`."""
    bound: float
    bound_given_old: float
    """Empirical entropy in bytes: of locations and differences, tensor by tensor; the same given the old exponents."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Gigabytes of checkpoint a second, one thread."""

    name: str
    share: float
    """Of the elements that changed."""
    compare: float
    """`old != new`, its result thrown away."""
    rates: dict[str, float]
    """By format and direction, e.g. `context encode`."""


def size_table(rows: Sequence[Sizes]) -> str:
    """Shares of the checkpoint in per cent."""
    formats = [*(rival.name for rival in RIVALS[1:]), *OURS]
    lines = [
        f"| data | changed | {' | '.join(formats)} | bound | bound, old exponents known | auto, bytes |",
        "|---" * (len(formats) + 5) + "|",
    ]
    for row in rows:
        shares = [_percent(row.sent[name], row.nbytes) for name in formats]
        bounds = [_percent(row.bound, row.nbytes), _percent(row.bound_given_old, row.nbytes)]
        cells = [row.name, _percent(row.changed, row.total), *shares, *bounds, f"{row.sent['auto']:,}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def speed_table(rows: Sequence[Speeds]) -> str:
    """Gigabytes a second, and the part of the comparison's speed."""
    names = list(rows[0].rates)
    lines = [f"| data | changed | `old != new` | {' | '.join(names)} |", "|---" * (len(names) + 3) + "|"]
    for row in rows:
        cells = [f"{row.rates[name]:.2f} ({row.rates[name] / row.compare:.2f} ×)" for name in names]
        lines.append(f"| {row.name} | {100 * row.share:.2f} % | {row.compare:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def bar_table(sizes: Sequence[Sizes], speeds: Sequence[Speeds]) -> str:
    """What was wanted and what came out."""
    lines = ["| bar | wanted | measured | met |", "|---|---|---|---|"]
    for name, wanted, got, met in _bars(sizes, speeds):
        lines.append(f"| {name} | {wanted} | {got} | {'yes' if met else 'no'} |")
    return "\n".join(lines)


def _bars(sizes: Sequence[Sizes], speeds: Sequence[Speeds]) -> Iterator[tuple[str, str, str, bool]]:
    by_name = {row.name: row for row in sizes}
    for name, encoding, most in (
        ("Adam-like 1e-06", "context", 1.12),
        ("Adam-like 1e-06", "plain", 1.50),
        ("Adam-like 3e-07", "context", 0.46),
        ("Adam-like 3e-07", "plain", 0.60),
        ("uniform 3%", "auto", 1.75),
    ):
        if name in by_name:
            got = 100 * by_name[name].sent[encoding] / by_name[name].nbytes
            yield f"{name}, {encoding}", f"≤ {most:.2f} % of the checkpoint", f"{got:.3f} %", got <= most
    for rate in RATES[:2]:
        row = by_name.get(f"SmolLM2 {rate:.0e}, step {TIMED_STEP}")
        for encoding, most in (("context", 0.52), ("plain", 0.87)):
            if row is not None:
                got = row.sent[encoding] / row.sent["DCR"]
                yield f"{row.name}, {encoding}", f"≤ {most} × DCR", f"{got:.3f} ×", got <= most
    worst = max(sizes, key=_against_rivals)
    got = _against_rivals(worst)
    yield "auto, on all data", "≤ 1 × the smallest rival", f"{got:.3f} × ({worst.name})", got <= 1
    for name, least in (("plain encode", 0.5), ("plain apply", 0.5), ("context encode", 0.3), ("context apply", 0.5)):
        few = [row for row in speeds if row.share <= 0.01]
        if few:
            slowest = min(few, key=lambda row: row.rates[name] / row.compare)
            part = slowest.rates[name] / slowest.compare
            found = f"{part:.2f} × ({slowest.name})"
            yield f"{name}, one core, ≤ 1 % changed", f"≥ {least} × a numpy comparison", found, part >= least


def _against_rivals(row: Sizes) -> float:
    return row.sent["auto"] / min(row.sent[rival.name] for rival in RIVALS)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.3f} %"

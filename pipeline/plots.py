"""Draw a run's pictures as inline SVG: the same input gives the same bytes, and nothing is fetched.

Colours are those of Okabe and Ito (2008), which people with any kind of colour vision tell apart.
"""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.stats import betabinom

from groundhop.records import Bucketed

BUCKET_COLOURS = {
    "too_easy": "#b9c4cc",
    "easy": "#56b4e9",
    "medium": "#009e73",
    "hard": "#e69f00",
    "too_hard": "#8c6d5a",
    None: "#e4e4e4",
}
POLICY_COLOURS = {"base": "#7a7a7a", "sft": "#0072b2", "grpo": "#d55e00"}
INK, MUTED = "#222222", "#8a8a8a"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its 95 % interval; `low` and `high` are None where there is none."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """One small panel: values over steps. Steps without a value are left out, not drawn as zero."""

    title: str
    steps: Sequence[float]
    lines: Mapping[str, Sequence[float | None]]
    """Legend name to values, one per step."""
    zero: bool = False
    """Whether the axis starts at zero."""


def bucket_histogram(rows: Sequence[Bucketed]) -> str:
    """Draw how many questions were solved k times, and below them each question's posterior interval.

    Bars are what was seen. Points with whiskers are what another set of as many tries would give, by the
    beta-binomial posterior predictive of each question summed over questions (mean and 95 % range).
    """

    def draw(figure: Any) -> None:
        top, strip = figure.subplots(2, 1, gridspec_kw={"height_ratios": [1.7, 1], "hspace": 0.42})
        _draw_counts(top, rows)
        _draw_posteriors(strip, rows)

    return svg(draw, 6.6, 4.9)


def predicted_counts(rows: Sequence[Bucketed], tries: int) -> list[Estimate]:
    """How many questions would be solved k times in `tries` further tries, k = 0..tries, with a 95 % range.

    Each question is beta-binomial with the Jeffreys posterior Beta(k + 1/2, n - k + 1/2); questions are
    independent, so the count of questions at k is Poisson-binomial, here by its normal approximation.
    """
    found: list[Estimate] = []
    for k in range(tries + 1):
        shares = [float(betabinom.pmf(k, tries, row.passed + 0.5, row.judged - row.passed + 0.5)) for row in rows]
        mean, half = sum(shares), 1.96 * math.sqrt(sum(p * (1 - p) for p in shares))
        found.append(Estimate(str(k), mean, max(0.0, mean - half), mean + half))
    return found


def estimates(rows: Sequence[Estimate], label: str, share: bool = False) -> str:
    """Draw values as dots with intervals, one row each, the names at the left."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for place, row in enumerate(rows):
            colour = POLICY_COLOURS.get(row.name, INK)
            if row.low is not None and row.high is not None:
                axes.plot([row.low, row.high], [place, place], color=colour, lw=2.2, solid_capstyle="round")
            axes.plot([row.value], [place], "o", color=colour, ms=8)
            text = f"{row.value:.0%}" if share else f"{row.value:.2f}"
            axes.annotate(
                text, (row.value, place), (0, 9), textcoords="offset points", ha="center", color=colour, fontsize=9
            )
        axes.set_yticks(range(len(rows)), [row.name for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.7)
        high = max([row.high if row.high is not None else row.value for row in rows], default=1.0)
        axes.set_xlim(0, min(1.0, high * 1.15 + 0.02) if share else high * 1.15 + 0.1)
        if share:
            axes.xaxis.set_major_formatter("{x:.0%}")
        axes.set_xlabel(label)
        axes.grid(axis="x", color="#e6e6e6")
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)

    return svg(draw, 5.2, 0.9 + 0.52 * max(1, len(rows)))


def curves(panels: Sequence[Curve]) -> str:
    """Draw the panels three a row."""
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / max(1, columns))

    def draw(figure: Any) -> None:
        grid = figure.subplots(rows, columns, squeeze=False, gridspec_kw={"hspace": 0.62, "wspace": 0.34})
        for place, axes in enumerate(axis for line in grid for axis in line):
            if place < len(panels):
                _draw_curve(axes, panels[place])
            else:
                axes.set_visible(False)

    return svg(draw, 3.35 * columns, 2.25 * rows)


def _draw_counts(axes: Any, rows: Sequence[Bucketed]) -> None:
    tries = max([row.judged for row in rows], default=8)
    full = [row for row in rows if row.judged == tries]
    bottom = dict.fromkeys(range(tries + 1), 0)
    names: list[str | None] = ["too_hard", "hard", "medium", "easy", "too_easy", None]
    for name in names:
        counts = {k: sum(row.bucket == name and row.passed == k for row in rows) for k in bottom}
        if not any(counts.values()):
            continue
        label = (name or "no bucket").replace("_", " ")
        axes.bar(
            list(counts),
            list(counts.values()),
            bottom=list(bottom.values()),
            color=BUCKET_COLOURS[name],
            label=label,
            width=0.72,
        )
        bottom = {k: bottom[k] + counts[k] for k in bottom}
    for k, seen in bottom.items():
        axes.annotate(
            str(seen), (k - 0.33, seen), (0, 2), textcoords="offset points", ha="left", fontsize=8.5, color=INK
        )
    for k, guess in enumerate(predicted_counts(full, tries) if full else []):
        axes.plot([k + 0.18] * 2, [guess.low, guess.high], color=INK, lw=1.1)
        axes.plot([k + 0.18], [guess.value], "D", color=INK, ms=3.6)
    axes.set_xticks(range(tries + 1))
    axes.set_xlabel(f"right answers of {tries}")
    axes.set_ylabel("questions")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.1)
    axes.legend(frameon=False, fontsize=8.5, ncols=1, loc="upper right")


def _draw_posteriors(axes: Any, rows: Sequence[Bucketed]) -> None:
    ordered = sorted(rows, key=lambda row: (row.mean, row.question_id))
    places = range(len(ordered))
    colours = [BUCKET_COLOURS[row.bucket] for row in ordered]
    width = max(0.5, min(4.0, 260 / max(1, len(ordered))))
    axes.vlines(
        places, [row.low for row in ordered], [row.high for row in ordered], colors=colours, lw=width, alpha=0.75
    )
    axes.plot(places, [row.mean for row in ordered], ".", color=INK, ms=max(1.2, min(4.0, 200 / max(1, len(ordered)))))
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set_xlim(-0.8, max(1, len(ordered)) - 0.2)
    axes.set_xticks([])
    axes.set_xlabel("questions, hardest first: posterior mean and 95 % interval of the pass rate")


def _draw_curve(axes: Any, panel: Curve) -> None:
    palette = ["#0072b2", "#d55e00", "#009e73", "#8a8a8a"]
    for colour, (name, values) in zip(palette, panel.lines.items(), strict=False):
        pairs = [(x, y) for x, y in zip(panel.steps, values, strict=True) if y is not None and math.isfinite(y)]
        style = "-o" if len(pairs) <= 40 else "-"
        axes.plot([x for x, _ in pairs], [y for _, y in pairs], style, color=colour, lw=1.5, ms=3, label=name)
    axes.set_title(panel.title, fontsize=9.5, loc="left")
    if panel.zero:
        axes.set_ylim(0, max(1e-9, axes.get_ylim()[1]) * (1.08 if len(panel.lines) == 1 else 1.4))
    axes.locator_params(axis="y", nbins=5)
    axes.xaxis.get_major_locator().set_params(integer=True, nbins=6)
    axes.grid(axis="y", color="#ececec")
    if len(panel.lines) > 1:
        axes.legend(frameon=False, fontsize=7.5, ncols=2, loc="upper left", borderaxespad=0, columnspacing=1.2)


def svg(draw: Callable[[Any], None], width_inches: float, height_inches: float) -> str:
    """Run `draw` on an empty figure and return an `<svg>` element, the same bytes each time."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    settings: dict[str, Any] = {
        "svg.hashsalt": "groundhop",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 9.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": MUTED,
        "axes.labelcolor": "#444444",
        "xtick.color": "#444444",
        "ytick.color": "#444444",
        "axes.axisbelow": True,
    }
    with matplotlib.rc_context(settings):  # pyright: ignore[reportArgumentType] - its keys are a closed list
        figure = Figure(figsize=(width_inches, height_inches))
        FigureCanvasSVG(figure)
        draw(figure)
        out = io.StringIO()
        figure.savefig(
            out,
            format="svg",
            bbox_inches="tight",
            pad_inches=0.06,
            transparent=True,
            metadata={"Date": None, "Creator": None},
        )
    text = out.getvalue()
    return text[text.index("<svg") :]

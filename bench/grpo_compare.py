"""Two or more GRPO runs side by side: reward, KL, share of the step, bytes of a sync, seconds; a table and a plot.

The runs go on from copies of one demo run's folder without its `grpo` and what came after:

    groundhop grpo configs/demo.toml --run-dir runs/adamw --set grpo.kl_budget=1.0        # measures the KL, limits nothing
    groundhop grpo configs/demo.toml --run-dir runs/logra --set grpo.optimizer=logra --set grpo.sync=sketch \
        --set grpo.kl_budget=2e-4 --set grpo.kl_scale_max=10
    python bench/grpo_compare.py AdamW=runs/adamw LoGRA=runs/logra --write docs/results.md --plot docs/plots/grpo-logra.svg
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from result_page import replace_between

from groundhop import jsonl
from groundhop.records import GrpoStep

Runs = Mapping[str, Sequence[GrpoStep]]


def table(runs: Runs) -> str:
    """One row a step and run."""
    lines = [
        "| run | step | reward | tool calls | KL budget | KL of the whole step, predicted | share taken | KL realised | delta, MB | record to the site, MB | training, s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in runs.items():
        for row in rows:
            cells = [name, str(row.step), _short(row.reward_mean), _short(row.calls_mean)]
            cells += [_power(row.kl_budget), _power(row.kl_predicted), _short(row.step_scale), _power(row.kl_realised)]
            cells += [_short(row.bytes / 1e6), _short(row.site_bytes / 1e6 if row.site_bytes else None)]
            lines.append(f"| {' | '.join([*cells, f'{row.train_s:.0f}'])} |")
    return "\n".join(lines)


def plot(runs: Runs, path: Path) -> None:
    """Reward, KL and bytes by step."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "groundhop"
    from matplotlib import pyplot

    figure, (reward, kl, sent) = pyplot.subplots(1, 3, figsize=(9.6, 3.0), layout="constrained")
    for name, rows in runs.items():
        steps = [row.step for row in rows]
        reward.plot(steps, [row.reward_mean for row in rows], marker="o", label=name)
        (line,) = kl.plot(steps, [row.kl_realised for row in rows], marker="o", label=f"{name}, realised")
        if max(row.kl_budget or 0.0 for row in rows) < 0.1:
            kl.plot(steps, [row.kl_budget for row in rows], "--", color=line.get_color(), label=f"{name}, budget")
        sent.plot(steps, [(row.site_bytes or row.bytes) / 1e6 for row in rows], marker="o", label=name)
    reward.set(title="mean reward", xlabel="step", ylim=(0, 1))
    kl.set(title="KL of a step, nats a token", xlabel="step", yscale="log")
    sent.set(title="bytes of a sync, MB", xlabel="step", ylim=(0, None))
    for axes in (reward, kl, sent):
        axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Read the runs, print the table, and put it into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN_DIR")
    parser.add_argument("--note", default="")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    pairs = (given.partition("=") for given in options.runs)
    runs = {name: list(jsonl.read(Path(folder) / "grpo" / "steps.jsonl", GrpoStep)) for name, _, folder in pairs}
    text = table(runs)
    print(text)
    if options.plot:
        plot(runs, options.plot)
        text += f"\n\n![reward, KL and bytes by step]({options.plot.relative_to(options.plot.parents[1])})"
    if options.write:
        replace_between(options.write, "logra, grpo", f"{text}\n\n{options.note}".strip())


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _power(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


if __name__ == "__main__":
    main()

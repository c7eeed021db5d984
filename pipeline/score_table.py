"""Say an evaluation's summary in plain text, for the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def table(summary: Row) -> str:
    """Two aligned tables: the policies, and each two of them compared."""
    head: Sequence[str] = (
        "policy",
        "questions",
        "tries",
        "accuracy",
        "errors wrong .. right",
        "calls a task",
        "cut by budget",
    )
    lines = _aligned([head, *(_policy(name, row) for name, row in summary["policies"].items())])
    pairs = summary.get("comparisons", [])
    if pairs:
        head = ("compared", "questions", "difference", "p", "up/down", "calls, ratio", "both solved", "one solved")
        lines += ["", *_aligned([head, *(_pair(row) for row in pairs)])]
    return "\n".join(lines)


def _policy(name: str, row: Row) -> tuple[str, ...]:
    bounds = "-" if row["worst"] is None else f"{100 * row['worst']:.1f} .. {100 * row['best']:.1f} %"
    return (
        name,
        str(row["questions"]),
        str(row["tries"]),
        _percent(row["accuracy"]),
        bounds,
        _number(row["calls"]),
        _percent(row["censored"]),
    )


def _pair(row: Row) -> tuple[str, ...]:
    return (
        row["name"],
        str(row["questions"]),
        _percent(row["difference"], sign="+"),
        "-" if row["p"] is None else f"{row['p']:.2g}",
        f"{row['gained']}/{row['lost']}",
        _number(row["ratio"]),
        _number(row["ratio_both"]),
        _number(row["ratio_other"]),
    )


def _percent(value: Row | None, sign: str = "") -> str:
    if value is None:
        return "-"
    return f"{100 * value['value']:{sign}.1f} % [{100 * value['low']:.1f}, {100 * value['high']:.1f}]"


def _number(value: Row | None) -> str:
    return "-" if value is None else f"{value['value']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

"""Draw a band of hosts from a synthetic rank file of Common Crawl's format: time and memory, against reading it with gzip alone.

Each side runs in a process of its own. The rival decompresses the file and counts its lines.

    python bench/rank_file.py --rows 10000000 --write docs/results.md
"""

import argparse
import gzip
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from result_page import replace_between

from groundhop.pipeline.commoncrawl.draw import draw_band

BAND, COUNT = (0.1, 0.2), 100
GOAL_BYTES = 500_000_000


def write_rows(path: Path, rows: int) -> None:
    """Positions by harmonic centrality in order, those by PageRank near them."""
    draw = random.Random(0)
    with gzip.open(path, "wt", compresslevel=1) as out:
        out.write("#harmonicc_pos\t#harmonicc_val\t#pr_pos\t#pr_val\t#host_rev\n")
        for row in range(1, rows + 1):
            near = max(1, row + draw.randint(-1000, 1000))
            out.write(f"{row}\t{3e7 / row**0.1:.1f}\t{near}\t{1 / (near + 1):.6g}\tcom.example{row:x}\n")


def measure(path: Path, side: str) -> dict[str, float]:
    """Seconds, rows, and the most resident memory of this process."""
    start = time.perf_counter()
    if side == "gzip":
        with gzip.open(path) as file:
            rows, drawn, passes = sum(1 for _ in file) - 1, 0, 1
    else:
        found = draw_band(path, BAND, COUNT, seed=1)
        rows, drawn, passes = found.rows, len(found.hosts), found.passes
    seconds = time.perf_counter() - start
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return {"seconds": seconds, "rows": rows, "drawn": drawn, "passes": passes, "peak": peak}


def main() -> None:
    """Print the table, and put it into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--measure", nargs=2, metavar=("FILE", "SIDE"), help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(Path(options.measure[0]), options.measure[1])))
        return
    lines = [
        "| 1 core | rows | hosts drawn | passes | seconds | peak memory, MB | bar 500 MB |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ranks.txt.gz"
        write_rows(path, options.rows)
        for side in ("gzip", "draw_band"):
            command = [sys.executable, __file__, "--measure", str(path), side]
            got = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            bar = "" if side == "gzip" else ("met" if got["peak"] <= GOAL_BYTES else "not met")
            cells = [side, f"{got['rows']:,}", str(got["drawn"]), str(got["passes"]), f"{got['seconds']:.1f}"]
            cells += [f"{got['peak'] / 1e6:.0f}", bar]
            lines.append(f"| {' | '.join(cells)} |")
    text = "\n".join(lines)
    print(text)
    if options.write:
        replace_between(options.write, "rank file", text)


if __name__ == "__main__":
    main()

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_codec_bench_decodes_every_format_and_writes_its_tables(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text("before\n<!-- results: hot-load codec -->\nold\n<!-- /results -->\nafter\n")
    command = [sys.executable, ROOT / "bench/hotload_codec.py", "--no-real", "--elements", "30000", "--repeats", "1"]
    ended = subprocess.run(
        [*command, "--write", page],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    text = page.read_text()
    assert (text.startswith("before\n"), text.endswith("after\n"), "old\n" in text) == (True, True, False)
    assert all(f"| {name} |" in text for name in ("Adam-like 1e-06", "Adam-like 3e-07", "uniform 5%"))

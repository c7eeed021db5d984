import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def _folder() -> Any:
    path = ROOT / "tests" / "pipeline" / "run_folder.py"
    spec = importlib.util.spec_from_file_location("run_folder_of_notebook", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _execute(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[str, str]:
    """Run the notebook on `run` with this interpreter; give back the plain text and the markup that it shows."""
    monkeypatch.setenv("GROUNDHOP_RUN", str(run))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    notebook = nbformat.read(ROOT / "notebooks" / "buckets.ipynb", as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    kinds = ("text/html", "image/svg+xml")
    markup = "\n".join(str(output.get("data", {}).get(kind, "")) for output in shown for kind in kinds)
    return "\n".join(str(output.get("text", "")) for output in shown), markup


@pytest.mark.filterwarnings("default")
def test_the_notebook_shows_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, markup = _execute(_folder().make_run(tmp_path / "run"), monkeypatch, tmp_path)
    assert markup.count("<svg") >= 6 and "not run yet" not in text and "<script" not in markup


@pytest.mark.filterwarnings("default")
def test_the_notebook_says_what_is_missing_in_a_run_that_has_only_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, markup = _execute(_folder().make_run(tmp_path / "run", only=("pages", "graph")), monkeypatch, tmp_path)
    assert "not run yet" in text and "<svg" not in markup


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_kept_without_outputs(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert cells and all(not cell.outputs and cell.execution_count is None for cell in cells)

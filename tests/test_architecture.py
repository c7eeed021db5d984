"""Who may import whom, are the links whole, is the command light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("pipeline", "agents", "judges", "training")
MAY_IMPORT = {
    "judges": {"judges"},
    "agents": {"agents", "judges"},
    "pipeline": {"pipeline", "agents", "judges"},
    "training": {"training", "agents", "judges"},
}
SHARED = {"records", "errors", "config", "jsonl", "runs", "progress", "http_retry"}
HEAVY = {"torch", "vllm", "trl", "ray", "transformers", "datasets"}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def ours(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imports(path) if name.startswith("groundhop.") and len(name.split(".")) > 1}


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_code_folder_is_linked_into_the_package(folder: str) -> None:
    link = ROOT / "src" / "groundhop" / folder
    assert link.is_symlink()
    assert str(link.readlink()) == f"../../{folder}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_import_only_what_they_may(folder: str) -> None:
    allowed = MAY_IMPORT[folder] | SHARED
    wrong = {
        str(path): bad for path in (ROOT / folder).rglob("*.py") if (bad := ours(path) - allowed - {"__version__"})
    }
    assert wrong == {}


def test_hotload_needs_nothing_but_records_errors_config_and_files() -> None:
    allowed = {"records", "errors", "config", "jsonl", "progress", "http_retry"}
    wrong = {}
    for path in (ROOT / "training" / "hotload").rglob("*.py"):
        names = {n for n in imports(path) if n.startswith("groundhop.")}
        bad = {n for n in names if n.split(".")[1] not in allowed and not n.startswith("groundhop.training.hotload")}
        if bad:
            wrong[str(path)] = bad
    assert wrong == {}


def test_the_shared_modules_know_no_folder() -> None:
    wrong = {}
    for name in SHARED:
        path = ROOT / "src" / "groundhop" / f"{name}.py"
        if path.exists() and (bad := ours(path) & set(FOLDERS)):
            wrong[name] = bad
    assert wrong == {}


def test_the_command_line_imports_nothing_heavy() -> None:
    code = "import sys, groundhop.cli, groundhop.stages, groundhop.plan; print([m for m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert [name for name in HEAVY if f"'{name}'" in loaded] == []


def test_help_loads_no_library() -> None:
    code = "import sys, groundhop.cli; print(sorted({m.split('.')[0] for m in sys.modules} & {'msgspec', 'httpx', 'rich', 'numpy', 'lxml'}))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )

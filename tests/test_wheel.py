"""What is built from the source distribution holds every folder, and every light module of it can be imported."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("pipeline", "agents", "judges", "training")
IMPORT_ALL = """
import importlib, sys
sys.path[:0] = [sys.argv[1]]
for name in sys.argv[2:]:
    module = importlib.import_module(name)
    assert module.__file__.startswith(sys.argv[1]), module.__file__
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "unpacked")
    return folder / "unpacked"


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_the_wheel_holds_all_that_a_code_folder_holds(unpacked: Path, folder: str) -> None:
    wanted = {
        str(p.relative_to(ROOT)) for p in (ROOT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts
    }
    found = {
        str(p.relative_to(unpacked / "groundhop")) for p in (unpacked / "groundhop" / folder).rglob("*") if p.is_file()
    }
    assert found == wanted


@pytest.mark.slow
def test_the_light_modules_of_the_wheel_can_be_imported(unpacked: Path) -> None:
    names = [
        ".".join(path.relative_to(unpacked).with_suffix("").parts).removesuffix(".__init__")
        for folder in ("", "pipeline", "agents", "judges")
        for path in sorted((unpacked / "groundhop" / folder).glob("*.py"))
        if path.name not in {"watchdog.py"}
    ]
    subprocess.run([sys.executable, "-I", "-c", IMPORT_ALL, str(unpacked), *names], check=True)

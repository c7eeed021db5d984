import re
from pathlib import Path

import pytest

from groundhop.cli import STAGES
from groundhop.config import RunConfig, flatten, to_tree

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TABLES = [name for name, value in to_tree(RunConfig(name="x")).items() if isinstance(value, dict)]
COMMANDS = {"run", "serve", "search", "view", "doctor", "hotload", "memory", "sketch", *STAGES}
FILE_ENDINGS = {"jsonl", "py", "parquet", "zst", "html", "toml", "md", "txt", "safetensors"}
TENSORS = {"model.embed_tokens"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_that_are_there(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", re.sub(r"`[^`\n]*`", "", page.read_text()))
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_config_keys_that_are_named_exist(page: Path) -> None:
    known = flatten(to_tree(RunConfig(name="x"))).keys()
    named = re.findall(
        rf"(?<![\w/.])((?:{'|'.join(TABLES)})\.[a-z_]+)(?![\w(/])", " ".join(re.findall(r"`[^`]+`", page.read_text()))
    )
    unknown = [key for key in named if key not in known | TENSORS and key.split(".")[1] not in FILE_ENDINGS]
    assert unknown == []


def test_the_readme_names_each_command_and_no_other() -> None:
    text = (ROOT / "README.md").read_text()
    assert set(re.findall(r"`groundhop ([a-z]+)", text)) == COMMANDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_that_are_named_exist(page: Path) -> None:
    named = set(
        re.findall(
            r"`((?:pipeline|agents|judges|training|src/groundhop|tests|docs|configs)/[\w./-]+\.\w+)`", page.read_text()
        )
    )
    assert sorted(name for name in named if not (ROOT / name).exists()) == []

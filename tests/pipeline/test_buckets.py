"""The buckets stage writes records and tables that one line opens."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyarrow import parquet

from groundhop import jsonl
from groundhop.agents.tools import ToolResult
from groundhop.config import BucketsConfig
from groundhop.judges.rules import ExactJudge
from groundhop.pipeline.buckets import licences, run
from groundhop.pipeline.rollouts import run_with
from groundhop.records import Bucketed, Evidence, Page, PathStep, Question, Rollout, Task, Trace
from groundhop.runs import StageFolder

PATH = (
    PathStep(tool="search", arguments={"queries": ["mill"]}),
    PathStep(tool="visit", arguments={"url": "https://m.example/", "find": "year"}),
)


class FakeTools:
    async def call(self, name: str, arguments: dict[str, Any], forbidden: Any = ()) -> ToolResult:
        return ToolResult("It was 1902." if "q-lost" not in str(forbidden) else "No year.", "ok")

    def fit(self, text: str, tokens: int) -> str:
        return text


def question(name: str, **fields: Any) -> Question:
    evidence = (Evidence(page=f"m.example/{name}", start=0, end=4, text="1902"),)
    return Question(
        **(
            {
                "id": name,
                "question": "When?",
                "answer": "1902",
                "kind": "date",
                "path": PATH,
                "split": "train",
                "evidence": evidence,
            }
            | fields
        )
    )


QUESTIONS = [
    question("q-easy"),
    question("q-hard"),
    question("q-lost", forbidden=("q-lost",)),
    question("h", split="heldout"),
]
RIGHT = {"q-easy": 6, "q-hard": 1, "q-lost": 0}


async def policy(asked: Question, repeat: int, seed: int) -> Rollout:
    right = repeat < RIGHT[asked.id]
    stop = "error" if asked.id == "q-lost" and repeat < 4 else "answered"
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "visit", "arguments": json.dumps({"url": "https://m.example/"})},
    }
    said = (
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "name": "visit", "content": "1902"},
        {"role": "assistant", "content": "Exact Answer: 1902"},
    )
    return Rollout(
        question_id=asked.id,
        repeat=repeat,
        policy="base",
        seed=seed,
        messages=said,
        answer="1902" if right else "1900",
        stop=stop,
    )


@pytest.fixture
def made(tmp_path: Path) -> StageFolder:
    rollouts = StageFolder(tmp_path / "rollouts-base", "rollouts-base")
    asyncio.run(
        run_with(
            policy,
            questions=QUESTIONS[:3],
            judge=ExactJudge(),
            policy="base",
            repeats=8,
            concurrency=4,
            seed=1,
            folder=rollouts,
        )
    )
    folder = StageFolder(tmp_path / "buckets-base", "buckets-base")
    run(
        config=BucketsConfig(),
        questions=QUESTIONS,
        rollouts=rollouts,
        tools=FakeTools(),
        policy="base",
        seed=1,
        folder=folder,
    )
    return folder


def test_counts_traces_tasks_and_failures_are_written(made: StageFolder) -> None:
    assert [
        (b.question_id, b.passed, b.judged, b.errors, b.bucket)
        for b in jsonl.read(made.path / "buckets.jsonl", Bucketed)
    ] == [
        ("q-easy", 6, 8, 0, "easy"),
        ("q-hard", 1, 8, 0, "hard"),
        ("q-lost", 0, 4, 4, None),
    ]
    assert [t.id for t in jsonl.read(made.path / "traces.jsonl", Trace)] == [
        "q-easy/path",
        "q-hard/path",
        "q-easy/base/0",
        "q-hard/base/0",
    ]
    assert [t.id for t in jsonl.read(made.path / "tasks.jsonl", Task)] == ["q-easy", "q-hard"]
    assert made.drops == {"too_few_judged": 1, "path_fails": 1}
    assert made.summary()["buckets"] == {"easy": 1, "hard": 1, "none": 1}


def test_a_finished_stage_is_left_alone(made: StageFolder) -> None:
    before = {path: path.stat().st_mtime_ns for path in made.path.rglob("*")}
    run(config=BucketsConfig(), questions=[], rollouts=made, tools=FakeTools(), policy="base", seed=1, folder=made)
    assert {path: path.stat().st_mtime_ns for path in made.path.rglob("*")} == before


def test_tables_hold_each_call_exactly_as_it_was_made(made: StageFolder) -> None:
    (path, _, _, tried) = parquet.read_table(made.path / "parquet" / "traces.parquet").to_pylist()
    arguments = [json.loads(m["tool_calls"][0]["function"]["arguments"]) for m in path["messages"] if m["tool_calls"]]
    assert arguments == [dict(step.arguments) for step in PATH]
    assert json.loads(tried["messages"][1]["tool_calls"][0]["function"]["arguments"]) == {"url": "https://m.example/"}
    assert json.loads(path["tools"])[0]["function"]["name"] == "search"


def test_datasets_opens_tables_and_folder_in_one_line(
    made: StageFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    folder, cache = made.path / "parquet", str(tmp_path / "cache")
    traces = datasets.load_dataset("parquet", data_files=str(folder / "traces.parquet"), split="train", cache_dir=cache)
    tasks = datasets.load_dataset(str(folder), "tasks", split="train", cache_dir=cache)
    default = datasets.load_dataset(str(folder), split="train", cache_dir=cache)
    assert (traces.num_rows, tasks.num_rows, default.num_rows) == (4, 2, 4)
    assert tasks[0]["prompt"][-1] == {"role": "user", "content": "When?"}
    assert traces[0]["messages"][2]["tool_calls"][0]["function"]["name"] == "search"


def test_the_card_says_counts_licences_versions_and_seed(made: StageFolder) -> None:
    text = (made.path / "parquet" / "README.md").read_text()
    assert all(
        part in text
        for part in (
            "Each of the 3 questions",
            "tried 8 times",
            "| hard | 1 |",
            "| no bucket | 1 |",
            "(4 in all)",
            "| python |",
            "Seed 1.",
        )
    )


def test_licences_are_counted_over_the_pages_that_questions_stand_on(tmp_path: Path) -> None:
    page = Page(
        url="https://m.example/q-easy",
        key="m.example/q-easy",
        host="m.example",
        title="",
        text="",
        digest="",
        licence="CC-BY-4.0",
    )
    other = msgspec.structs.replace(page, key="m.example/q-hard", licence=None)
    unused = msgspec.structs.replace(page, key="m.example/else")
    jsonl.write(tmp_path / "pages.jsonl.zst", [page, other, unused])
    assert licences(QUESTIONS, tmp_path / "pages.jsonl.zst") == {"CC-BY-4.0": 1, "unknown": 1}


def test_no_rollouts_at_all_still_give_construction_traces(tmp_path: Path) -> None:
    rollouts = StageFolder(tmp_path / "rollouts-base", "rollouts-base")
    asyncio.run(
        run_with(
            policy,
            questions=[],
            judge=ExactJudge(),
            policy="base",
            repeats=8,
            concurrency=4,
            seed=1,
            folder=rollouts,
        )
    )
    folder = StageFolder(tmp_path / "buckets-base", "buckets-base")
    run(
        config=BucketsConfig(),
        questions=QUESTIONS,
        rollouts=rollouts,
        tools=FakeTools(),
        policy="base",
        seed=1,
        folder=folder,
    )
    assert folder.summary()["origins"] == {"construction": 2}
    assert parquet.read_table(folder.path / "parquet" / "tasks.parquet").num_rows == 0

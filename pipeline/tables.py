"""Hand buckets, traces and tasks on as Parquet with a dataset card, so that one line opens them.

    datasets.load_dataset("parquet", data_files="parquet/traces.parquet")
    datasets.load_dataset("parquet-folder", "tasks")

Messages are structs with the same fields in every row; a call's arguments stay a JSON string, because a column store would
merge the argument objects of all rows into one struct. `messages` + `tools` is what TRL's SFT reads, `prompt` what its GRPO
reads (conversational format).
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import msgspec
import pyarrow as pa
from pyarrow import parquet

from groundhop.agents.prompt import first_messages
from groundhop.records import Bucketed, Question, Task, Trace
from groundhop.runs import versions

_CALL = pa.struct(
    [
        ("id", pa.string()),
        ("type", pa.string()),
        ("function", pa.struct([("name", pa.string()), ("arguments", pa.string())])),
    ]
)
MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("tool_calls", pa.list_(_CALL)),
        ("tool_call_id", pa.string()),
        ("name", pa.string()),
    ]
)
TRACES = pa.schema(
    [
        ("id", pa.string()),
        ("question_id", pa.string()),
        ("origin", pa.string()),
        ("messages", pa.list_(MESSAGE)),
        ("tools", pa.string()),
    ]
)
TASKS = pa.schema(
    [
        ("id", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("question", pa.string()),
        ("answer", pa.string()),
        ("kind", pa.string()),
        ("aliases", pa.list_(pa.string())),
        ("bucket", pa.string()),
        ("passed", pa.int32()),
        ("judged", pa.int32()),
        ("forbidden", pa.list_(pa.string())),
    ]
)
BUCKETS = pa.schema(
    [
        ("question_id", pa.string()),
        ("question", pa.string()),
        ("answer", pa.string()),
        ("kind", pa.string()),
        ("policy", pa.string()),
        ("passed", pa.int32()),
        ("judged", pa.int32()),
        ("errors", pa.int32()),
        ("rate", pa.float64()),
        ("mean", pa.float64()),
        ("low", pa.float64()),
        ("high", pa.float64()),
        ("bucket", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a card says about where its rows come from."""

    policy: str
    repeats: int
    seed: int
    min_judged: int
    licences: Mapping[str, int]
    """How many of the pages used are under which licence; `unknown` where none is known."""


def write_tables(
    folder: Path,
    *,
    questions: Iterable[Question],
    buckets: Sequence[Bucketed],
    traces: Sequence[Trace],
    tasks: Sequence[Task],
    prompt: Path | None,
    provenance: Provenance,
) -> None:
    """Write the three tables and `README.md`, each replaced at once."""
    folder.mkdir(parents=True, exist_ok=True)
    by_id = {question.id: question for question in questions}
    _write(folder / "buckets.parquet", [_bucket_row(row, by_id.get(row.question_id)) for row in buckets], BUCKETS)
    _write(folder / "traces.parquet", [_trace_row(trace) for trace in traces], TRACES)
    _write(folder / "tasks.parquet", [_task_row(task, prompt) for task in tasks], TASKS)
    temporary = folder / "README.md.tmp"
    temporary.write_text(card(buckets, traces, tasks, provenance), encoding="utf-8")
    temporary.replace(folder / "README.md")


def card(buckets: Sequence[Bucketed], traces: Sequence[Trace], tasks: Sequence[Task], provenance: Provenance) -> str:
    """The dataset card: counts, licences, versions, and the header that names the tables."""
    text = resources.files("groundhop.pipeline").joinpath("prompts", "card.md").read_text(encoding="utf-8")
    names: Counter[str] = Counter(row.bucket or "no bucket" for row in buckets)
    origins: Counter[str] = Counter(trace.origin for trace in traces)
    return Template(text).substitute(
        questions=len(buckets),
        traces=len(traces),
        tasks=len(tasks),
        policy=provenance.policy,
        repeats=provenance.repeats,
        seed=provenance.seed,
        min_judged=provenance.min_judged,
        errors=sum(row.errors for row in buckets),
        buckets=_table(("bucket", "questions"), names),
        origins=_table(("origin", "traces"), origins),
        licences=_table(("licence", "pages"), provenance.licences),
        versions=_table(("package", "version"), versions()),
    )


def _write(path: Path, rows: list[dict[str, Any]], schema: pa.Schema) -> None:
    temporary = path.with_name(path.name + ".tmp")
    parquet.write_table(pa.Table.from_pylist(rows, schema=schema), temporary, compression="zstd")
    temporary.replace(path)


def _bucket_row(row: Bucketed, question: Question | None) -> dict[str, Any]:
    known = (
        {} if question is None else {"question": question.question, "answer": question.answer, "kind": question.kind}
    )
    rate = row.passed / row.judged if row.judged else None
    return {**msgspec.structs.asdict(row), **known, "rate": rate}


def _trace_row(trace: Trace) -> dict[str, Any]:
    messages = [_message(message) for message in trace.messages]
    return {**msgspec.structs.asdict(trace), "messages": messages, "tools": json.dumps(trace.tools, ensure_ascii=False)}


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {
        "role": message["role"],
        "content": "" if content is None else content if isinstance(content, str) else json.dumps(content),
        "tool_calls": [_call(call) for call in message.get("tool_calls") or ()] or None,
        "tool_call_id": message.get("tool_call_id"),
        "name": message.get("name"),
    }


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call.get("id"),
        "type": call.get("type", "function"),
        "function": {"name": function["name"], "arguments": text},
    }


def _task_row(task: Task, prompt: Path | None) -> dict[str, Any]:
    return {**msgspec.structs.asdict(task), "prompt": first_messages(task.question, prompt)}


def _table(head: tuple[str, str], rows: Mapping[str, object]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    return "\n".join(lines + [f"| {name} | {value} |" for name, value in sorted(rows.items())])

"""Policies are served only where something is missing; benchmarks leave no word on disk."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from groundhop.config import EvaluateConfig
from groundhop.errors import ServerError
from groundhop.judges.rules import ExactJudge
from groundhop.pipeline.evaluate import run, summarise
from groundhop.pipeline.rollouts import Solver
from groundhop.records import Question, Rollout, ToolCall
from groundhop.runs import StageFolder

SKILL = {"base": 0, "sft": 2, "grpo": 4}


class Servers:
    """Serves policies that know the first so many repeats; remembers what it served."""

    def __init__(self, dies_at: str = "") -> None:
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.tried = 0
        self.dies_at = dies_at

    @contextmanager
    def __call__(self, policy: str) -> Iterator[Solver]:
        async def solve(asked: Question, repeat: int, seed: int) -> Rollout:
            if policy == self.dies_at:
                raise KeyboardInterrupt
            self.tried += 1
            answer = asked.answer if repeat < SKILL[policy] else "something else"
            call = ToolCall(
                turn=0, name="search", arguments={"queries": [asked.question]}, outcome="ok", detail=asked.question
            )
            said = (
                {"role": "user", "content": asked.question},
                {"role": "assistant", "content": f"Exact Answer: {answer}\nConfidence: 60%"},
            )
            return Rollout(
                question_id=asked.id,
                repeat=repeat,
                policy=policy,
                seed=seed,
                messages=said,
                answer=answer,
                stop="answered",
                calls=(call,),
            )

        self.opened.append(policy)
        try:
            yield solve
        finally:
            self.closed.append(policy)


QUESTIONS = [
    Question(
        id=f"q{n}",
        question=f"What is the secret word number {n} on the old board by the door of the mill?",
        answer=f"wordthatis{n}x",
    )
    for n in range(5)
]
CONFIG = EvaluateConfig(repeats=4, bootstrap=200)


def evaluate(folder: Path, servers: Servers, *, secret: bool = False, config: EvaluateConfig = CONFIG, bad=()) -> dict:
    stage = StageFolder(folder, "evaluate")
    run(
        config=config,
        questions=QUESTIONS,
        opener=servers,
        judge=ExactJudge(),
        concurrency=3,
        seed=1,
        folder=stage,
        secret=secret,
        bad=bad,
    )
    return json.loads((folder / "summary.json").read_text())


def test_each_policy_is_served_tried_and_compared(tmp_path: Path) -> None:
    servers = Servers()
    got = evaluate(tmp_path, servers)
    assert (servers.opened, servers.closed, servers.tried) == (["base", "sft", "grpo"], ["base", "sft", "grpo"], 60)
    assert [row["accuracy"]["value"] for row in got["policies"].values()] == [0.0, 0.5, 1.0]
    assert [row["name"] for row in got["comparisons"]] == ["base → sft", "base → grpo", "sft → grpo"]
    assert got["comparisons"][1]["gained"] == 5
    assert got["source"]["questions"] == 5


def test_a_killed_evaluation_serves_only_what_is_missing_and_ends_alike(tmp_path: Path) -> None:
    whole = evaluate(tmp_path / "whole", Servers())
    with pytest.raises(KeyboardInterrupt):
        evaluate(tmp_path / "killed", Servers(dies_at="sft"))
    again = Servers()
    assert evaluate(tmp_path / "killed", again) == whole
    assert (again.opened, again.tried) == (["sft", "grpo"], 40)
    for name in ("base/rollouts.jsonl", "sft/verdicts.jsonl", "summary.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_server_that_cannot_be_started_is_said_so(tmp_path: Path) -> None:
    @contextmanager
    def broken(policy: str) -> Iterator[Solver]:
        raise ServerError("no server")
        yield

    with pytest.raises(ServerError, match="no server"):
        evaluate(tmp_path, broken)


def test_a_secret_set_leaves_no_question_answer_or_conversation_in_any_file(tmp_path: Path) -> None:
    got = evaluate(tmp_path, Servers(), secret=True, bad=[("row 6", "wrong_canary", "")])
    assert got["policies"]["sft"]["accuracy"]["value"] == 0.5
    written = b"\n".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()).decode()
    words = re.findall(r"\w+", " ".join(f"{q.question} {q.answer}" for q in QUESTIONS).lower())
    found = re.findall(r"\w+", written.lower())
    grams = {tuple(found[at : at + 5]) for at in range(len(found))}
    assert not any(tuple(words[at : at + 5]) in grams for at in range(len(words) - 4))
    assert not any(q.answer in written for q in QUESTIONS)
    assert "row 6" in (tmp_path / "failures.jsonl").read_text()
    assert got["policies"]["sft"]["calibration"]["rows"] == 20


def test_the_limit_takes_the_first_questions_by_id(tmp_path: Path) -> None:
    servers = Servers()
    evaluate(tmp_path, servers, config=EvaluateConfig(repeats=1, limit=2, policies=("base",), bootstrap=200))
    assert servers.tried == 2


def test_the_summary_follows_from_the_records_alone(tmp_path: Path) -> None:
    got = evaluate(tmp_path, Servers())
    again = summarise(tmp_path, CONFIG.policies, seed=1, draws=200)
    assert {key: got[key] for key in again} == again

"""Each (question, repeat) is tried once, whatever is killed, torn or down on the way."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from groundhop import jsonl
from groundhop.errors import CredentialError, ServerError
from groundhop.judges.protocol import Asked, verdict_of
from groundhop.judges.rules import ExactJudge
from groundhop.pipeline.journal import Journal, Pair
from groundhop.pipeline.rollouts import Collector, Tally, choose, run_with, stable_seed
from groundhop.records import Question, Rollout, ToolCall, Verdict
from groundhop.runs import StageFolder


def question(name: str, **fields: object) -> Question:
    return Question(**({"id": name, "question": f"What is {name}?", "answer": name} | fields))


def rollout(name: str, repeat: int, seed: int, answer: str | None, stop: str = "answered") -> Rollout:
    said = {"role": "assistant", "content": f"Exact Answer: {answer}"}
    error = "server gone" if stop == "error" else None
    return Rollout(
        question_id=name,
        repeat=repeat,
        policy="base",
        seed=seed,
        messages=(said,),
        answer=answer,
        stop=stop,
        error=error,
    )


class Policy:
    """Answers even repeats rightly; fails as often as told; counts what it is asked."""

    def __init__(self, failures: dict[tuple[str, int], int] | None = None, killed_after: int | None = None) -> None:
        self.asked: list[tuple[str, int]] = []
        self.failures = failures or {}
        self.killed_after = killed_after

    async def __call__(self, asked: Question, repeat: int, seed: int) -> Rollout:
        if self.killed_after is not None and len(self.asked) >= self.killed_after:
            raise KeyboardInterrupt
        self.asked.append((asked.id, repeat))
        for _ in range(seed % 5):  # finish in another order than begun
            await asyncio.sleep(0)
        left = self.failures.get((asked.id, repeat), 0)
        if left:
            self.failures[asked.id, repeat] = left - 1
            return rollout(asked.id, repeat, seed, None, "error")
        return rollout(asked.id, repeat, seed, asked.answer if repeat % 2 == 0 else "else")


def collect(
    folder: Path, policy, *, questions=("q1", "q2"), repeats=4, judge=None, concurrency=3, redact=False
) -> Tally:
    collector = Collector(
        folder,
        policy="base",
        seed=7,
        repeats=repeats,
        questions=[question(name) for name in questions],
        judge=judge or ExactJudge(),
        concurrency=concurrency,
        redact=redact,
    )
    return asyncio.run(collector.collect(policy))


def files(folder: Path) -> tuple[bytes, bytes]:
    return (folder / "rollouts.jsonl").read_bytes(), (folder / "verdicts.jsonl").read_bytes()


def test_all_pairs_are_tried_once_and_written_in_order(tmp_path: Path) -> None:
    policy = Policy()
    tally = collect(tmp_path, policy)
    pairs = [(name, repeat) for name in ("q1", "q2") for repeat in range(4)]
    assert Counter(policy.asked) == Counter(pairs)
    assert [(r.question_id, r.repeat) for r in jsonl.read(tmp_path / "rollouts.jsonl", Rollout)] == pairs
    assert [v.correct for v in jsonl.read(tmp_path / "verdicts.jsonl", Verdict)] == [True, False] * 4
    assert (tally.right, tally.wrong, tally.errors) == (4, 4, 0)


def test_files_do_not_depend_on_concurrency(tmp_path: Path) -> None:
    collect(tmp_path / "one", Policy(), concurrency=1)
    collect(tmp_path / "many", Policy(), concurrency=8)
    assert files(tmp_path / "one") == files(tmp_path / "many")


def test_only_missing_repeats_are_run_again(tmp_path: Path) -> None:
    done = [("q1", r) for r in range(8)] + [("q2", r) for r in (0, 1, 5)]
    for name, repeat in done:
        made = rollout(name, repeat, 1, name)
        with jsonl.Appender(tmp_path / "rollouts.jsonl") as out:
            out.append(made)
        with jsonl.Appender(tmp_path / "verdicts.jsonl") as out:
            out.append(verdict_of(made, "exact", True, "same text"))
    policy = Policy()
    collect(tmp_path, policy, repeats=8)
    assert sorted(policy.asked) == [("q2", repeat) for repeat in (2, 3, 4, 6, 7)]


def test_a_torn_last_line_is_cut_off_and_its_pair_run_again_twice_over(tmp_path: Path) -> None:
    collect(tmp_path, Policy(), repeats=2)
    whole = files(tmp_path)
    for _ in range(2):
        for name in ("rollouts.jsonl", "verdicts.jsonl"):
            path = tmp_path / name
            path.write_bytes(path.read_bytes()[:-20])
        policy = Policy()
        collect(tmp_path, policy, repeats=2)
        assert (policy.asked, files(tmp_path)) == ([("q2", 1)], whole)


@pytest.mark.parametrize("killed_after", [0, 1, 3, 5, 7])
def test_killed_anywhere_and_run_again_gives_the_same_files(tmp_path: Path, killed_after: int) -> None:
    collect(tmp_path / "whole", Policy())
    with pytest.raises(KeyboardInterrupt):
        collect(tmp_path / "killed", Policy(killed_after=killed_after))
    again = Policy()
    collect(tmp_path / "killed", again)
    assert files(tmp_path / "killed") == files(tmp_path / "whole")
    assert len(again.asked) <= 8 - killed_after + 3


def test_a_rollout_without_its_verdict_is_judged_and_not_paid_for_again(tmp_path: Path) -> None:
    collect(tmp_path, Policy())
    (tmp_path / "verdicts.jsonl").unlink()
    policy = Policy()
    assert (collect(tmp_path, policy).right, policy.asked) == (4, [])


def test_what_infrastructure_failed_is_tried_again_at_once(tmp_path: Path) -> None:
    policy = Policy({("q1", 2): 1})
    assert collect(tmp_path, policy).errors == 0
    assert Counter(policy.asked)["q1", 2] == 2
    assert len((tmp_path / "rollouts.jsonl").read_bytes().splitlines()) == 8


def test_what_keeps_failing_is_kept_as_an_error_and_counts_neither_way(tmp_path: Path) -> None:
    tally = collect(tmp_path, Policy({("q1", 2): 99}))
    assert (tally.right, tally.wrong, tally.errors) == (3, 4, 1)
    assert tally.lost == [("q1/2", "rollout_error", "server gone")]
    healed = Policy()
    assert (collect(tmp_path, healed).right, healed.asked) == (4, [("q1", 2)])


def test_a_broken_rollout_does_not_stop_the_others(tmp_path: Path) -> None:
    class Breaks(Policy):
        async def __call__(self, asked: Question, repeat: int, seed: int) -> Rollout:
            if (asked.id, repeat) == ("q2", 1):
                raise ValueError("bad page")
            return await super().__call__(asked, repeat, seed)

    tally = collect(tmp_path, Breaks())
    assert (tally.errors, tally.lost) == (1, [("q2/1", "rollout_error", "ValueError: bad page")])


def test_a_dead_server_stops_the_run_loudly_and_loses_nothing(tmp_path: Path) -> None:
    names = [f"q{number:02}" for number in range(30)]
    dead = {(name, repeat): 99 for name in names[5:] for repeat in range(4)}
    policy = Policy(dead)
    with pytest.raises(ServerError, match=r"20 rollouts in a row.*server gone"):
        collect(tmp_path, policy, questions=names)
    assert len(policy.asked) < 50
    again = Policy()
    assert collect(tmp_path, again, questions=names).errors == 0
    assert set(again.asked) == set(dead)


def test_scattered_failures_do_not_stop_the_run_when_they_fail_again(tmp_path: Path) -> None:
    names = [f"q{number:02}" for number in range(30)]
    tally = collect(tmp_path, Policy({(name, 1): 99 for name in names}), questions=names)
    assert (tally.errors, tally.right) == (30, 60)


def test_a_small_run_in_which_everything_failed_is_an_error_too(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="every rollout"):
        collect(tmp_path, Policy({("q1", 0): 99}), questions=["q1"], repeats=1)


class FailingJudge:
    """Cannot be reached for a while."""

    def __init__(self, outages: int) -> None:
        self.outages = outages

    async def __call__(self, given: Rollout, asked: Asked) -> Verdict:
        if self.outages:
            self.outages -= 1
            return verdict_of(given, "llm", None, "HTTP 503", "judge_error")
        return await ExactJudge()(given, asked)


def test_a_judge_that_comes_back_is_asked_again_without_new_rollouts(tmp_path: Path) -> None:
    policy = Policy()
    assert collect(tmp_path, policy, judge=FailingJudge(3)).no_verdict == 0
    assert len(policy.asked) == 8


def test_judge_outages_are_counted_apart_and_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tally = collect(tmp_path, Policy(), judge=FailingJudge(9))
    assert (tally.right + tally.wrong, tally.no_verdict) == (7, 1)
    assert any(record.levelname == "WARNING" and "1 judge_error" in record.message for record in caplog.records)


def test_a_dead_judge_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"20 verdicts in a row.*HTTP 503"):
        collect(tmp_path, Policy(), repeats=20, judge=FailingJudge(999))


def test_a_refused_key_stops_the_run(tmp_path: Path) -> None:
    async def refused(asked: Question, repeat: int, seed: int) -> Rollout:
        raise CredentialError("no key")

    with pytest.raises(CredentialError):
        collect(tmp_path, refused)


def test_redacted_files_hold_no_word_of_question_answer_or_calls(tmp_path: Path) -> None:
    async def telling(asked: Question, repeat: int, seed: int) -> Rollout:
        call = ToolCall(turn=0, name="search", arguments={"queries": ["zanzibar"]}, outcome="ok", detail="zanzibar")
        return Rollout(
            question_id=asked.id, repeat=repeat, policy="base", seed=seed, answer=asked.answer, stop="answered", calls=(call,),
            messages=({"role": "assistant", "content": "Exact Answer: zanzibar\nConfidence: 80%"},), token_ids=(5, 6), mask=(0, 1), log_probs=(0.0, -1.0),
        )  # fmt: skip

    collector = Collector(
        tmp_path, policy="base", seed=1, repeats=2, questions=[question("bc-1", answer="zanzibar", question="zanzibar?")],
        judge=ExactJudge(), concurrency=2, redact=True,
    )  # fmt: skip
    assert asyncio.run(collector.collect(telling)).right == 2
    assert b"zanzibar" not in b"".join(files(tmp_path))
    (kept, _) = jsonl.read(tmp_path / "rollouts.jsonl", Rollout)
    assert (kept.calls[0].name, kept.token_ids, kept.answer) == ("search", (), None)
    assert [v.confidence for v in jsonl.read(tmp_path / "verdicts.jsonl", Verdict)] == [80.0, 80.0]


def test_a_redacted_run_is_resumed_without_repeating_what_was_judged(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        collect(tmp_path, Policy(killed_after=4), redact=True, concurrency=1)
    again = Policy()
    assert (collect(tmp_path, again, redact=True).right, len(again.asked)) == (4, 4)


def test_a_finished_stage_does_nothing_and_counts_what_it_did(tmp_path: Path) -> None:
    folder = StageFolder(tmp_path, "rollouts-base")
    policy = Policy({("q1", 0): 99})
    for _ in range(2):
        asyncio.run(
            run_with(
                policy,
                questions=[question("q1")],
                judge=ExactJudge(),
                policy="base",
                repeats=4,
                concurrency=2,
                seed=1,
                folder=folder,
            )
        )
    assert len(policy.asked) == 5
    summary = folder.summary()
    assert (summary["rollouts"], summary["right"], summary["wrong"], summary["errors"], summary["stops"]) == (
        4,
        1,
        2,
        1,
        {"answered": 3, "error": 1},
    )
    assert folder.drops == {"rollout_error": 1}


def test_seeds_depend_on_everything_that_names_a_rollout_and_nothing_else() -> None:
    seeds = [
        stable_seed(run, policy, Pair(name, repeat))
        for run in (1, 2)
        for policy in ("base", "sft")
        for name in ("a", "b")
        for repeat in (0, 1)
    ]
    assert len(set(seeds)) == 16
    assert stable_seed(1, "base", Pair("a", 0)) == 139562604
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_the_first_questions_of_a_split_are_chosen_by_id() -> None:
    given = [
        question("c", split="train"),
        question("a", split="train"),
        question("b", split="heldout"),
        question("d", split="train"),
    ]
    assert [q.id for q in choose(given, "train", 2)] == ["a", "c"]


def test_a_journal_keeps_the_last_record_of_a_pair(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "r.jsonl", Rollout)
    for answer in ("first", "second"):
        journal.append(rollout("é", 0, 1, answer))
    assert journal.get(Pair("é", 0)).answer == "second"
    journal.close()
    reopened = Journal(tmp_path / "r.jsonl", Rollout)
    reopened.append(rollout("a", 0, 1, "third"))
    reopened.settle([Pair("a", 0), Pair("missing", 1), Pair("é", 0)])
    assert [r.answer for r in jsonl.read(tmp_path / "r.jsonl", Rollout)] == ["third", "second"]

from collections import Counter
from typing import Any

import pytest
from scripted import Blank, rollout_of, task

from groundhop.records import Rollout, Verdict
from groundhop.training.groups import Group, as_try, has_good_tokens, seed_of, tasks_of_step


def rollout(**changed: Any) -> Rollout:
    return rollout_of(Blank(), "t", 0, 11, **changed)


def verdict(correct: bool | None) -> Verdict:
    return Verdict(question_id="t", repeat=0, policy="grpo", correct=correct, judge="script")


@pytest.mark.parametrize(
    ("stop", "correct", "mark", "reward", "trained"),
    [
        ("answered", True, "right", 1.0, True),
        ("answered", False, "wrong", 0.0, True),
        ("no_answer", False, "wrong", 0.0, True),
        ("turns", True, "right", 1.0, True),
        ("turns", False, "over_budget", 0.0, False),
        ("tokens", False, "over_budget", 0.0, False),
        ("time", False, "over_budget", 0.0, False),
        ("context", False, "over_budget", 0.0, False),
        ("truncated", False, "over_budget", 0.0, False),
        ("turns", None, "no_verdict", None, False),
        ("answered", None, "no_verdict", None, False),
        ("error", False, "error", None, False),
        ("error", None, "error", None, False),
    ],
)
def test_what_a_rollout_counts_for(
    stop: Any, correct: bool | None, mark: str, reward: float | None, trained: bool
) -> None:
    got = as_try(0, rollout(stop=stop), verdict(correct), max_length=100)
    assert (got.mark, got.reward, got.trained) == (mark, reward, trained)


def test_an_agent_that_failed_or_a_judge_that_is_gone_says_nothing() -> None:
    assert as_try(0, None, None, max_length=100).mark == "error"
    assert as_try(0, rollout(), None, max_length=100).mark == "no_verdict"


def test_a_rollout_longer_than_the_limit_counts_but_is_not_trained() -> None:
    got = as_try(0, rollout(), verdict(True), max_length=10)
    assert (got.mark, got.reward, got.trained) == ("too_long", 1.0, False)


@pytest.mark.parametrize(
    "changed",
    [
        {"token_ids": ()},
        {"mask": (0, 1)},
        {"log_probs": (0.0,)},
        {"prompt_length": 0},
        {"prompt_length": 8},
        {"mask": (0,) * len(rollout().mask)},
        {"log_probs": tuple(float("nan") for _ in rollout().log_probs)},
    ],
)
def test_tokens_that_do_not_line_up_are_not_trained_on(changed: dict[str, Any]) -> None:
    assert has_good_tokens(rollout())
    assert not has_good_tokens(rollout(**changed))
    assert as_try(0, rollout(**changed), verdict(True), max_length=100).mark == "bad_tokens"


def test_only_sampled_tokens_need_a_log_probability() -> None:
    whole = rollout()
    holed = tuple(p if flag else float("nan") for p, flag in zip(whole.log_probs, whole.mask, strict=True))
    assert has_good_tokens(rollout(log_probs=holed))


def group(fates: str) -> Group:
    built = Group(0, task("t"), size=len(fates))
    for repeat, fate in enumerate(fates):
        stop = {"e": "error", "t": "turns"}.get(fate, "answered")
        correct = {"y": True, "n": False, "t": False}.get(fate)
        built.tries.append(as_try(repeat, rollout(stop=stop), verdict(correct), max_length=100))
    return built


@pytest.mark.parametrize(
    ("fates", "fate"),
    [
        ("yynn", "alive"),
        ("yttt", "alive"),
        ("nntt", "all_wrong"),
        ("tttt", "all_wrong"),
        ("yyyy", "all_right"),
        ("y???", "lost"),
        ("eeee", "lost"),
        ("yn??", "alive"),
        ("yy??", "all_right"),
    ],
)
def test_the_fate_of_a_group(fates: str, fate: str) -> None:
    assert group(fates).fate == fate


def test_an_over_budget_failure_lowers_the_baseline() -> None:
    assert group("yntt").advantages()[0] == group("ynnn").advantages()[0] > group("yn").advantages()[0]


def test_a_lost_rollout_does_not_lower_the_baseline() -> None:
    assert group("yn??").advantages() == group("yn").advantages()


def test_every_task_has_its_turn_equally_often() -> None:
    tasks = [task(f"t{n}") for n in range(6)]
    turns: Counter[str] = Counter()
    for step in range(6):
        turns.update(t.id for t, _ in zip(tasks_of_step(tasks, step=step, prompts=4, seed=1), range(4), strict=False))
    assert set(turns.values()) == {4}


def test_further_tasks_are_others_and_the_step_alone_fixes_them() -> None:
    tasks = [task(f"t{n}") for n in range(6)]
    one, two = ([t.id for t in tasks_of_step(tasks, step=3, prompts=2, seed=1)] for _ in range(2))
    assert one == two and sorted(one) == sorted(t.id for t in tasks)
    assert one != [t.id for t in tasks_of_step(tasks, step=3, prompts=2, seed=2)]


def test_few_tasks_fill_a_step_by_coming_again() -> None:
    assert [t.id for t in tasks_of_step([task("only")], step=0, prompts=3, seed=0)] == ["only"] * 3


def test_every_try_has_a_seed_of_its_own() -> None:
    seeds = {seed_of(1, step, slot, repeat) for step in range(5) for slot in range(5) for repeat in range(9)}
    assert len(seeds) == 225 and all(0 <= seed < 2**31 for seed in seeds)

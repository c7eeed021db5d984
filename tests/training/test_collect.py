import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from scripted import Agent, Blank, task

from groundhop.errors import CredentialError, ServerError
from groundhop.records import Rollout, Task, Verdict
from groundhop.training.collect import Collected, Plan, collect

TASKS = [task(f"t{n}") for n in range(8)]


def plan(**changed: Any) -> Plan:
    settings = {"prompts": 2, "group": 4, "refill_rounds": 2, "max_length": 100, "concurrency": 64, "seed": 5}
    return Plan(**{**settings, **changed})


def agent(script: Callable[[str, int, int], str]) -> Agent:
    return Agent(Blank(), script)


def gather(solve: Any, tasks: list[Task] = TASKS, **changed: Any) -> Collected:
    return asyncio.run(collect(tasks, solve, plan(**changed), 1))


def shape(got: Collected) -> list[tuple[str, str, str]]:
    return [(g.task.id, g.fate, "".join(one.mark[0] for one in g.tries)) for g in got.groups]


def test_groups_with_a_signal_are_sampled_once() -> None:
    got = gather(agent(lambda task, step, repeat: "yn"[repeat % 2]))
    assert (len(got.groups), len(got.trained), got.backfilled, len(got.tries)) == (2, 2, 0, 8)


def test_groups_all_right_or_all_wrong_are_replaced_by_further_tasks() -> None:
    first = [g.task.id for g in gather(agent(lambda task, step, repeat: "y"), refill_rounds=0).groups]
    script = {first[0]: "y", first[1]: "n"}
    got = gather(agent(lambda task, step, repeat: script.get(task, "yn"[repeat % 2])))
    assert [g.fate for g in got.groups] == ["all_right", "all_wrong", "alive", "alive"]
    assert [g.slot for g in got.trained] == [2, 3]
    assert len({g.task.id for g in got.groups}) == 4


def test_lost_rollouts_are_sampled_again_and_the_group_keeps_its_size() -> None:
    got = gather(agent(lambda task, step, repeat: "?ex"[repeat] if repeat < 3 else "yn"[repeat % 2]))
    assert got.backfilled == 6
    for group in got.trained:
        assert [one.mark for one in group.tries] == ["no_verdict", "error", "error", "wrong", "right", "wrong", "right"]
        assert len(group.kept) == 4


def test_rounds_are_bounded_and_what_has_a_signal_is_trained_all_the_same() -> None:
    got = gather(agent(lambda task, step, repeat: "?" if repeat in (0, 4, 5) else "yn"[repeat % 2]), refill_rounds=1)
    assert [len(group.kept) for group in got.trained] == [3, 3]
    none = gather(agent(lambda task, step, repeat: "n"), refill_rounds=2)
    assert (len(none.trained), len(none.groups)) == (0, 6)


def test_refill_ends_when_there_is_no_further_task() -> None:
    assert len(gather(agent(lambda task, step, repeat: "n"), tasks=TASKS[:3], refill_rounds=9).groups) == 3


def test_the_outcome_does_not_depend_on_who_finishes_first() -> None:
    def script(task: str, step: int, repeat: int) -> str:
        return "yn?tyn"[(int(task[1:]) * 3 + repeat) % 6]

    class Late(Agent):
        async def __call__(self, *args: Any, **settings: Any) -> tuple[Rollout, Verdict]:
            for _ in range(settings["seed"] % 23):
                await asyncio.sleep(0)
            return await super().__call__(*args, **settings)

    one = list(gather(agent(script)).records())
    assert one == list(gather(Late(Blank(), script)).records())
    assert one == list(gather(agent(script), concurrency=1).records())


def test_no_more_rollouts_run_at_once_than_allowed() -> None:
    running, most = 0, 0

    class Counting(Agent):
        async def __call__(self, *args: Any, **settings: Any) -> tuple[Rollout, Verdict]:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            return await super().__call__(*args, **settings)

    gather(Counting(Blank(), lambda task, step, repeat: "yn"[repeat % 2]), concurrency=3)
    assert most == 3


def test_a_step_without_one_verdict_stops_the_run() -> None:
    with pytest.raises(ServerError, match="step 1: none of 24 rollouts got a verdict"):
        gather(agent(lambda task, step, repeat: "e"))


def test_a_refused_key_stops_the_run_at_once() -> None:
    async def refused(task: Task, **_: Any) -> tuple[Rollout, Verdict]:
        raise CredentialError("key refused")

    with pytest.raises(CredentialError, match="key refused"):
        gather(refused)


def test_records_say_what_each_rollout_counted_for() -> None:
    got = gather(agent(lambda task, step, repeat: "ynt?n"[repeat]), prompts=1)
    rows = list(got.records())
    assert [(row.mark, row.reward, row.trained) for row in rows] == [
        ("right", 1.0, True),
        ("wrong", 0.0, True),
        ("over_budget", 0.0, False),
        ("no_verdict", None, False),
        ("wrong", 0.0, True),
    ]
    assert [row.advantage is None for row in rows] == [False, False, False, True, False]
    assert {(row.step, row.slot) for row in rows} == {(1, 0)}

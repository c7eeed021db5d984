import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from scripted import Agent, Server, rollout_of, task

from groundhop import jsonl
from groundhop.config import GrpoConfig, LograConfig
from groundhop.errors import InputError, ServerError
from groundhop.records import GrpoStep, Rollout, StepRollout, Task, TokenSpan, Verdict
from groundhop.runs import StageFolder
from groundhop.training import grpo
from groundhop.training.hotload.refit import RefitResult
from groundhop.training.policy_trainer import PolicyTrainer

TASKS = [task(f"t{n}") for n in range(6)]


def settings(**changed: Any) -> GrpoConfig:
    usual = {
        "steps": 1,
        "prompts": 2,
        "group": 4,
        "micro_batch": 3,
        "learning_rate": 1e-3,
        "bf16": False,
        "checkpoint_steps": 2,
        "refill_rounds": 1,
        "max_length": 64,
    }
    return GrpoConfig(**{**usual, **changed})


def half_right(task: str, step: int, repeat: int) -> str:
    return "yn"[repeat % 2]


def train(tiny: Path, folder: Path, solve: Agent, tasks: list[Task] = TASKS, **changed: Any) -> list[GrpoStep]:
    grpo.run(
        config=settings(**changed),
        tasks=tasks,
        model=tiny,
        folder=StageFolder(folder, "grpo"),
        seed=3,
        solve=solve,
        refitter=solve.server,  # type: ignore[arg-type]
    )
    return list(jsonl.read(folder / "steps.jsonl", GrpoStep))


def rollouts(folder: Path) -> list[StepRollout]:
    return list(jsonl.read(folder / "rollouts.jsonl", StepRollout))


def by_hand(folder: Path, tiny: Path, temperature: float = 1.0) -> float:
    """Loss of the first step from what it wrote down: plain torch on full logits, ratios against the server."""
    model = Server(tiny).model.requires_grad_(False)
    rows = [row for row in rollouts(folder) if row.step == 1 and row.trained]
    total = torch.zeros(())
    tokens = 0
    for row in rows:
        assert row.rollout is not None and row.advantage is not None
        ids = torch.tensor([row.rollout.token_ids])
        logits = model(input_ids=ids).logits[0, :-1].float() / temperature
        now = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None]).squeeze(-1)
        ratio = (now - torch.tensor(row.rollout.log_probs[1:])).exp()
        clipped = ratio.clamp(1 - 0.2, 1 + 0.28)
        mask = torch.tensor(row.rollout.mask[1:])
        total -= (torch.minimum(ratio * row.advantage, clipped * row.advantage) * mask).sum()
        tokens += int(mask.sum())
    return (total / tokens).item()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_ratios_are_one_where_server_and_trainer_hold_the_same_weights(
    tiny: Path, tmp_path: Path, temperature: float
) -> None:
    (row,) = train(tiny, tmp_path, Agent(Server(tiny, temperature=temperature), half_right), temperature=temperature)
    assert row.log_ratio_abs_mean is not None and row.log_ratio_abs_mean < 1e-5
    assert row.clip_share == 0.0
    assert row.loss == pytest.approx(by_hand(tmp_path, tiny, temperature), abs=1e-6)


def test_log_probabilities_at_another_temperature_show_at_the_first_step(tiny: Path, tmp_path: Path) -> None:
    (row,) = train(tiny, tmp_path, Agent(Server(tiny, temperature=1.0), half_right), temperature=0.6)
    assert row.log_ratio_abs_mean is not None and row.log_ratio_abs_mean > 0.01


def test_over_budget_tokens_stay_out_of_the_loss_and_count_in_the_baseline(tiny: Path, tmp_path: Path) -> None:
    (row,) = train(tiny, tmp_path, Agent(Server(tiny), lambda task, step, repeat: "yntt"[repeat]))
    written = rollouts(tmp_path)
    assert row.marks == {"over_budget": 4, "right": 2, "wrong": 2}
    assert row.trained_rollouts == 4
    assert row.trained_tokens == sum(sum(r.rollout.mask) for r in written if r.rollout and r.mark != "over_budget")
    assert written[0].advantage == pytest.approx(1.5 / 1.0002, abs=1e-4)  # rewards 1 0 0 0: mean 1/4, deviation 1/2
    assert row.loss == pytest.approx(by_hand(tmp_path, tiny), abs=1e-6)


def test_lost_rollouts_are_masked_not_zero(tiny: Path, tmp_path: Path) -> None:
    solve = Agent(Server(tiny), lambda task, step, repeat: "yy?n"[repeat] if repeat < 4 else "e")
    (row,) = train(tiny, tmp_path, solve)
    assert row.marks == {"error": 2, "no_verdict": 2, "right": 4, "wrong": 2}
    assert row.reward_mean == pytest.approx(2 / 3)
    values = [r.advantage for r in rollouts(tmp_path) if r.slot == 0]
    assert values[:2] == pytest.approx([0.57725] * 2, abs=1e-4)  # mean 2/3, deviation sqrt(1/3): not 2/4
    assert values[2] is None
    assert row.loss == pytest.approx(by_hand(tmp_path, tiny), abs=1e-6)


def test_trl_normalises_a_group_as_we_do(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    theirs = PolicyTrainer._generate_and_score_completions

    def spy(self: Any, inputs: Any) -> Any:
        batch = theirs(self, inputs)
        seen.append(batch["advantages"])
        return batch

    monkeypatch.setattr(PolicyTrainer, "_generate_and_score_completions", spy)
    train(tiny, tmp_path, Agent(Server(tiny), lambda task, step, repeat: "y?nt"[repeat] if repeat < 4 else "e"))
    ours = [r.advantage for r in rollouts(tmp_path) if r.advantage is not None]
    assert [value for value in seen[0].tolist() if value] == pytest.approx(ours, abs=1e-5)


def test_tool_text_has_no_part_in_the_gradient(tiny: Path, tmp_path: Path) -> None:
    class Noisy(Agent):
        async def __call__(self, *args: Any, **named: Any) -> tuple[Rollout, Verdict]:
            rollout, verdict = await super().__call__(*args, **named)
            wild = [p if flag else 50.0 for p, flag in zip(rollout.log_probs, rollout.mask, strict=True)]
            return Rollout(**{**as_fields(rollout), "log_probs": tuple(wild)}), verdict

    train(tiny, tmp_path / "plain", Agent(Server(tiny), half_right))
    train(tiny, tmp_path / "noisy", Noisy(Server(tiny), half_right))
    assert same_model(tmp_path / "plain", tmp_path / "noisy")


def as_fields(rollout: Rollout) -> dict[str, Any]:
    return {name: getattr(rollout, name) for name in rollout.__struct_fields__}


def same_model(one: Path, two: Path) -> bool:
    left, right = (load_file(folder / "model" / "model.safetensors") for folder in (one, two))
    return all(torch.equal(left[key], right[key]) for key in left)


def test_a_sampled_padding_id_stays_in_the_text(tiny: Path, tmp_path: Path) -> None:
    class Padded(Agent):
        async def __call__(self, task: Task, *, repeat: int, seed: int, **named: Any) -> tuple[Rollout, Verdict]:
            _, verdict = await super().__call__(task, repeat=repeat, seed=seed, **named)
            whole = rollout_of(self.server, task.id, repeat, seed)
            ids = [*whole.token_ids[:7], 0, 2, *whole.token_ids[9:-2], 0, 0]  # 0 is the padding id, 2 the turn end
            scored = self.server.log_probs(ids)
            kept = tuple(p if flag else 0.0 for p, flag in zip(scored, whole.mask, strict=True))
            return Rollout(**{**as_fields(whole), "token_ids": tuple(ids), "log_probs": kept}), verdict

    (row,) = train(tiny, tmp_path, Padded(Server(tiny), half_right))
    assert row.trained_tokens == sum(sum(r.rollout.mask) for r in rollouts(tmp_path) if r.rollout)
    assert row.loss == pytest.approx(by_hand(tmp_path, tiny), abs=1e-6)
    assert row.log_ratio_abs_mean is not None and row.log_ratio_abs_mean < 1e-5


def test_right_rollouts_become_likelier_and_wrong_ones_less_likely(tiny: Path, tmp_path: Path) -> None:
    solve = Agent(Server(tiny), half_right)
    train(tiny, tmp_path, solve)
    moved: dict[str, list[float]] = {"right": [], "wrong": []}
    for row in rollouts(tmp_path):
        assert row.rollout is not None
        after = solve.server.log_probs(list(row.rollout.token_ids))
        pairs = zip(after, row.rollout.log_probs, row.rollout.mask, strict=True)
        moved[row.mark].append(sum(now - before for now, before, flag in pairs if flag))
    assert min(moved["right"]) > 0 > max(moved["wrong"])


def test_a_step_without_a_signal_leaves_weights_and_optimizer_alone(tiny: Path, tmp_path: Path) -> None:
    kept: dict[str, Any] = {}

    class Watching(Server):
        async def refit(self, named: Iterable[tuple[str, torch.Tensor]]) -> RefitResult:
            kept["steps"] = [int(s["step"]) for s in kept["trainer"].optimizer.state.values()] if kept else []
            return await super().refit(named)

    made = grpo.make_trainer

    def remember(*args: Any) -> Any:
        kept["trainer"] = made(*args)
        return kept["trainer"]

    grpo.make_trainer = remember  # type: ignore[assignment]
    try:
        script = Agent(Watching(tiny), lambda task, step, repeat: "n" if step == 2 else "yn"[repeat % 2])
        rows = train(tiny, tmp_path, script, steps=2)
    finally:
        grpo.make_trainer = made
    dead = rows[1]
    assert (dead.loss, dead.grad_norm, dead.trained_tokens, dead.changed, dead.groups) == (0.0, None, 0, 0, 0)
    assert (dead.all_wrong, dead.groups_tried) == (4, 4)
    assert set(kept["steps"]) == {1}
    masked = [row["grpo/all_masked"] for row in jsonl.read(tmp_path / "metrics.jsonl", dict[str, Any])]
    assert masked == [0, 1]


def test_a_gradient_that_is_no_number_moves_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = PolicyTrainer._compute_loss
    monkeypatch.setattr(
        PolicyTrainer, "_compute_loss", lambda self, model, inputs: theirs(self, model, inputs) * float("nan")
    )
    (row,) = train(tiny, tmp_path, Agent(Server(tiny), half_right))
    assert (row.loss, row.grad_norm, row.changed) == (None, None, 0)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())


def test_servers_hold_each_steps_weights_and_the_next_rollouts_come_from_them(tiny: Path, tmp_path: Path) -> None:
    solve = Agent(Server(tiny), half_right)
    rows = train(tiny, tmp_path, solve, steps=3)
    assert [(row.sampled_version, row.version) for row in rows] == [("v0", "v1"), ("v1", "v2"), ("v2", "v3")]
    assert all(row.stale_share == 0 and row.changed > 0 for row in rows)
    assert [row.log_ratio_abs_mean is not None and row.log_ratio_abs_mean < 0.01 for row in rows] == [True] * 3
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(saved[name].float(), solve.server.weights[name]) for name in saved)
    spans = {(r.step, span.version) for r in rollouts(tmp_path) if r.rollout for span in r.rollout.spans}
    assert spans == {(1, "v0"), (2, "v1"), (3, "v2")}


def test_tokens_of_another_version_are_counted(tiny: Path, tmp_path: Path) -> None:
    class Old(Agent):
        async def __call__(self, *args: Any, **named: Any) -> tuple[Rollout, Verdict]:
            rollout, verdict = await super().__call__(*args, **named)
            first, second = rollout.spans
            stale = TokenSpan(start=first.start, end=first.end, version="older")
            return Rollout(**{**as_fields(rollout), "spans": (stale, second)}), verdict

    (row,) = train(tiny, tmp_path, Old(Server(tiny), half_right))
    sampled = [sum(r.rollout.mask) for r in rollouts(tmp_path) if r.rollout]
    assert row.stale_share == pytest.approx(4 * len(sampled) / sum(sampled))


def test_a_kl_term_pulls_only_on_groups_with_a_signal(tiny: Path, tmp_path: Path) -> None:
    def script(task: str, step: int, repeat: int) -> str:
        return "y" if task < "t3" else "yn"[repeat % 2]

    rows = train(tiny, tmp_path, Agent(Server(tiny), script), steps=2, kl_coefficient=0.1, bf16=True)
    assert all(row.trained_rollouts == 4 * row.groups for row in rows)
    assert all(torch.isfinite(torch.tensor(row.loss)) for row in rows)


def test_no_tasks_no_run(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no tasks to train on"):
        train(tiny, tmp_path, Agent(Server(tiny), half_right), tasks=[])


def test_a_step_without_a_verdict_stops_the_run_and_a_later_one_goes_on(tiny: Path, tmp_path: Path) -> None:
    def down(task: str, step: int, repeat: int) -> str:
        return "e" if step == 4 else half_right(task, step, repeat)

    with pytest.raises(ServerError, match="step 4"):
        train(tiny, tmp_path, Agent(Server(tiny), down), steps=4)
    rows = train(tiny, tmp_path, Agent(Server(tiny), half_right), steps=4)
    train(tiny, tmp_path / "straight", Agent(Server(tiny), half_right), steps=4)
    assert [row.step for row in rows] == [1, 2, 3, 4]
    assert same_model(tmp_path, tmp_path / "straight")


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from scripted import Agent, Server
from test_grpo import half_right, train

def script(task, step, repeat):
    if step == 4 and repeat == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return half_right(task, step, repeat)

train(Path({tiny!r}), Path({folder!r}), Agent(Server(Path({tiny!r})), script), steps=5, **{changed!r})
"""


@pytest.mark.parametrize(
    "changed",
    [{}, {"optimizer": "logra", "kl_budget": 1e-7, "sync": "sketch"}],
    ids=["adamw", "logra, budget and sketches"],
)
def test_a_killed_run_ends_with_the_same_rows_rollouts_and_weights(
    tiny: Path, tmp_path: Path, changed: dict[str, Any]
) -> None:
    train(tiny, tmp_path / "straight", Agent(Server(tiny), half_right), steps=5, **changed)
    code = KILLED.format(
        tests=str(Path(__file__).parent), tiny=str(tiny), folder=str(tmp_path / "killed"), changed=changed
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    assert len(list(jsonl.read(tmp_path / "killed" / "steps.jsonl", GrpoStep))) == 3
    solve = Agent(Server(tiny, first=2), half_right)
    train(tiny, tmp_path / "killed", solve, steps=5, **changed)
    assert same_model(tmp_path / "straight", tmp_path / "killed")
    assert timeless(tmp_path / "killed") == timeless(tmp_path / "straight")
    assert rollouts(tmp_path / "killed") == rollouts(tmp_path / "straight")
    assert min(step for step, _, _ in solve.asked) == 3
    assert not (tmp_path / "killed" / "checkpoints").exists()


def timeless(folder: Path) -> list[dict[str, Any]]:
    # A resumed run's site begins with masters that are all up to date, so other weights go as sketches than without a kill.
    rows = jsonl.read(folder / "steps.jsonl", GrpoStep)
    kept = [n for n in GrpoStep.__struct_fields__ if not n.endswith("_s") and n not in ("site_bytes", "sketched")]
    return [{name: getattr(row, name) for name in kept} for row in rows]


def test_metrics_carry_each_step_once_and_the_model_is_whole(tiny: Path, tmp_path: Path) -> None:
    train(tiny, tmp_path, Agent(Server(tiny), half_right), steps=2)
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    rows = list(jsonl.read(tmp_path / "metrics.jsonl", dict[str, Any]))
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["grpo/reward_mean"] == 0.5 and rows[0]["grpo/marks_right"] == 4


@pytest.mark.parametrize("optimizer", ["adamw", "logra"])
def test_a_step_that_would_move_the_policy_past_the_budget_is_scaled(
    tiny: Path, tmp_path: Path, optimizer: str
) -> None:
    solve = Agent(Server(tiny), half_right)
    for row in train(tiny, tmp_path, solve, steps=2, optimizer=optimizer, kl_budget=1e-7, bf16=True):
        assert row.kl_budget is not None and row.kl_predicted is not None and row.step_scale is not None
        assert 0.5e-7 <= row.kl_budget <= 1e-7 < row.kl_predicted
        assert row.step_scale == pytest.approx((row.kl_budget / row.kl_predicted) ** 0.5)
        assert row.kl_realised == pytest.approx(row.kl_budget, rel=0.05)


def test_a_step_within_the_budget_is_taken_whole(tiny: Path, tmp_path: Path) -> None:
    plain = train(tiny, tmp_path / "plain", Agent(Server(tiny), half_right), optimizer="logra")
    (row,) = train(tiny, tmp_path / "wide", Agent(Server(tiny), half_right), optimizer="logra", kl_budget=1e3)
    assert row.step_scale == 1.0
    assert same_model(tmp_path / "plain", tmp_path / "wide")
    assert plain[0].step_scale is None and plain[0].kl_predicted is None


def test_logra_moves_every_kind_of_weight_and_reports_its_norm(tiny: Path, tmp_path: Path) -> None:
    (row,) = train(tiny, tmp_path, Agent(Server(tiny), half_right), optimizer="logra")
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny, tmp_path / "model"))
    same = [name for name in before if torch.equal(before[name], after[name])]
    assert [name for name in same if "norm" not in name] == []  # norms at 1.0 need more than one step to change in BF16
    assert row.grad_norm is not None and row.grad_norm > 0


def test_a_step_of_logra_without_a_finite_gradient_is_left_out(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = PolicyTrainer._compute_loss
    monkeypatch.setattr(
        PolicyTrainer, "_compute_loss", lambda self, model, inputs: theirs(self, model, inputs) * float("nan")
    )
    (row,) = train(tiny, tmp_path, Agent(Server(tiny), half_right), optimizer="logra", kl_budget=1e-6)
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny, tmp_path / "model"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "took no step" in caplog.text
    assert row.kl_predicted is None


def test_steps_sent_as_sketches_reach_the_servers_as_the_trainers_own_bits(tiny: Path, tmp_path: Path) -> None:
    server = Server(tiny)
    few = {"optimizer": "logra", "logra": LograConfig(rank=2), "learning_rate": 1e-2}
    rows = train(tiny, tmp_path, Agent(server, half_right), steps=3, sync="sketch", **few)
    final = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(final[name].float(), weight) for name, weight in server.weights.items())
    assert sum(row.sketched or 0 for row in rows) > 0
    assert [row.site_bytes is not None and row.site_bytes > 0 for row in rows] == [True] * 3


@pytest.mark.parametrize(("offset", "left"), [(-1.0, 1.0), (1.0, 0.5)])
def test_what_servers_overrate_is_taken_from_the_budget_down_to_its_half(
    tiny: Path, tmp_path: Path, offset: float, left: float
) -> None:
    class Off(Server):
        def log_probs(self, ids: list[int]) -> list[float]:
            return [value + offset for value in super().log_probs(ids)]

    (row,) = train(tiny, tmp_path, Agent(Off(tiny), half_right), kl_budget=1e-3)
    assert row.kl_budget == pytest.approx(left * 1e-3)

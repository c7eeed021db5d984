import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer.sft_trainer import SFTTrainer

from groundhop import jsonl
from groundhop.config import SftConfig
from groundhop.errors import InputError
from groundhop.records import Failure, Trace
from groundhop.runs import StageFolder
from groundhop.training import sft
from groundhop.training.masks import Encoded, encode

SCHEMA = {"name": "search", "description": "Search.", "parameters": {"type": "object", "properties": {}}}
TOOLS = ({"type": "function", "function": SCHEMA},)


def trace(number: int) -> Trace:
    call = {"type": "function", "function": {"name": "search", "arguments": {"queries": [f"bridge {number}"]}}}
    return Trace(
        id=f"t{number:02}",
        question_id=f"q{number:02}",
        origin="construction",
        tools=TOOLS,
        messages=(
            {"role": "user", "content": "when " * (number % 5 + 1)},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": f"It was opened in 18{number:02}."},
            {"role": "assistant", "content": f"Exact Answer: 18{number:02}"},
        ),
    )


def settings(**changed: Any) -> SftConfig:
    return SftConfig(**{"batch": 4, "micro_batch": 2, "learning_rate": 1e-3, "checkpoint_steps": 2, **changed})


def train(tiny: Path, folder: Path, traces: list[Trace], **changed: Any) -> StageFolder:
    stage = StageFolder(folder, "sft")
    sft.run(config=settings(**changed), traces=traces, model=tiny, folder=stage, seed=5)
    return stage


def losses(folder: Path) -> list[float]:
    return [row["sft/loss"] for row in jsonl.read(folder / "metrics.jsonl", dict[str, Any])]


def rows(tiny: Path) -> list[Encoded]:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    return [encode(tokenizer, trace(number)) for number in range(4)]


def test_the_loss_falls_and_the_model_is_a_whole_bf16_folder(tiny: Path, tmp_path: Path) -> None:
    stage = train(tiny, tmp_path, [trace(number) for number in range(12)], epochs=3)
    assert losses(tmp_path)[-1] < losses(tmp_path)[0] - 0.3
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    template = (tmp_path / "model" / "chat_template.jinja").read_text()
    assert template == (tiny / "chat_template.jinja").read_text()
    assert (stage.summary()["traces"], stage.summary()["steps"]) == (12, 9)
    assert [row["step"] for row in jsonl.read(tmp_path / "metrics.jsonl", dict[str, Any])] == list(range(1, 10))


def test_logra_lowers_the_loss_too(tiny: Path, tmp_path: Path) -> None:
    train(tiny, tmp_path, [trace(number) for number in range(12)], epochs=4, optimizer="logra", learning_rate=3e-3)
    assert losses(tmp_path)[-1] < losses(tmp_path)[0] - 0.5


def test_the_loss_equals_that_of_full_logits_and_that_of_plain_trl(tiny: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    trainer = sft.make_trainer(settings(bf16=False), tokenizer, rows(tiny), tiny, tmp_path, seed=0)
    batch = trainer.data_collator([{"input_ids": row.input_ids, "labels": row.labels} for row in rows(tiny)])
    plain = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    count = (batch["labels"] != -100).sum()
    full = plain(**batch, num_items_in_batch=count).loss
    ours = trainer.compute_loss(trainer.model, batch, num_items_in_batch=count)
    theirs = SFTTrainer.compute_loss(trainer, trainer.model, dict(batch))
    assert ours.item() == pytest.approx(full.item(), rel=2e-7)  # the same terms, summed in another order
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)


def test_gradients_equal_those_of_full_logits(tiny: Path, tmp_path: Path) -> None:
    trainer = sft.make_trainer(
        settings(bf16=False), AutoTokenizer.from_pretrained(tiny), rows(tiny), tiny, tmp_path, seed=0
    )
    batch = trainer.data_collator([{"input_ids": row.input_ids, "labels": row.labels} for row in rows(tiny)])
    trainer.compute_loss(trainer.model, batch).backward()
    plain = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    plain(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"]).loss.backward()
    for ours, theirs in zip(trainer.model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-6)


def test_padding_that_shares_the_turn_ends_id_carries_no_label(tiny: Path, tmp_path: Path) -> None:
    same = AutoTokenizer.from_pretrained(tiny, pad_token="<|im_end|>")
    trainer = sft.make_trainer(settings(), same, rows(tiny), tiny, tmp_path, seed=0)
    batch = trainer.data_collator([{"input_ids": row.input_ids, "labels": row.labels} for row in rows(tiny)])
    lengths = [len(row.input_ids) for row in rows(tiny)]
    assert batch["attention_mask"].sum(1).tolist() == lengths
    ends = (batch["labels"] == same.eos_token_id).sum(1)
    assert ends.tolist() == [2, 2, 2, 2]
    padding = torch.arange(batch["labels"].shape[1]) >= torch.tensor(lengths)[:, None]
    assert set(batch["labels"][padding].tolist()) == {-100}
    assert set(batch["input_ids"][padding].tolist()) == {same.eos_token_id}


def test_the_split_into_micro_batches_does_not_change_the_loss(tiny: Path, tmp_path: Path) -> None:
    traces = [trace(number) for number in range(8)]
    train(tiny, tmp_path / "whole", traces, micro_batch=4, bf16=False)
    train(tiny, tmp_path / "split", traces, micro_batch=1, bf16=False)
    assert losses(tmp_path / "split") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "logra"])
def test_a_run_killed_between_checkpoints_ends_with_the_same_bits(tiny: Path, tmp_path: Path, optimizer: str) -> None:
    traces = [trace(number) for number in range(12)]
    train(tiny, tmp_path / "straight", traces, epochs=2, optimizer=optimizer)
    kill_at_step(5, tiny, tmp_path / "killed", epochs=2, optimizer=optimizer)
    half = tmp_path / "killed" / "checkpoints" / "checkpoint-5"
    half.mkdir()  # as a kill in the middle of writing leaves it
    (half / "model.safetensors").write_bytes(b"torn")
    train(tiny, tmp_path / "killed", traces, epochs=2, optimizer=optimizer)
    one, two = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("straight", "killed"))
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert losses(tmp_path / "killed") == losses(tmp_path / "straight")
    assert not (tmp_path / "killed" / "checkpoints").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from transformers import TrainerCallback
from groundhop.runs import StageFolder
from groundhop.training import sft
sys.path.insert(0, {tests!r})
from test_sft import settings, trace

class Kill(sft.StepLog):
    def on_log(self, args, state, control, logs=None, **kwargs):
        super().on_log(args, state, control, logs)
        if state.global_step == {step}:
            os.kill(os.getpid(), signal.SIGKILL)

sft.StepLog = Kill
folder = StageFolder(Path({folder!r}), "sft")
sft.run(config=settings(**{changed!r}), traces=[trace(n) for n in range(12)], model=Path({tiny!r}), folder=folder, seed=5)
"""


def kill_at_step(step: int, tiny: Path, folder: Path, **changed: Any) -> None:
    code = KILLED.format(
        tests=str(Path(__file__).parent), step=step, folder=str(folder), changed=changed, tiny=str(tiny)
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr


def test_dropped_traces_are_kept_with_their_reason(tiny: Path, tmp_path: Path) -> None:
    silent = Trace(id="z", question_id="z", origin="rollout", messages=({"role": "user", "content": "q"},), tools=TOOLS)
    stage = train(tiny, tmp_path, [trace(1), silent])
    assert [(f.item, f.reason) for f in jsonl.read(tmp_path / "failures.jsonl", Failure)] == [("z", "no_trained_token")]
    assert stage.summary()["dropped"] == {"no_trained_token": 1}


def test_a_set_of_which_nothing_is_left_stops_the_run(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none of 2 traces can be trained: too_long 2"):
        train(tiny, tmp_path, [trace(1), trace(2)], max_length=10)
    assert not (tmp_path / "model").exists()


def test_traces_come_from_files_too_and_each_id_once(tiny: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        jsonl.write(tmp_path / f"{name}.jsonl", [trace(1), trace(2)])
    assert [t.id for t in sft.read_traces([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])] == ["t01", "t02"]


def test_a_finished_stage_is_left_alone(tiny: Path, tmp_path: Path) -> None:
    stage = StageFolder(tmp_path, "sft")
    stage.finish({"traces": 1})
    sft.run(config=settings(), traces=[], model=tiny, folder=stage, seed=0)
    assert json.loads((tmp_path / "done.json").read_text()) == {"traces": 1}

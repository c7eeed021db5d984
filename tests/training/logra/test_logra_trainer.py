"""LoGRA inside Hugging Face's Trainer, and under KL control, on a tiny Llama."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sketched import same, weights_of
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from groundhop.errors import ConfigError
from groundhop.training.kl.budget import Budget
from groundhop.training.kl.controlled import Controlled
from groundhop.training.kl.probe import Probe
from groundhop.training.logra.factory import LograFactory
from groundhop.training.logra.optimizer import Logra
from groundhop.training.logra.settings import LograSettings

SETTINGS: dict[str, Any] = {"rank": 8, "learning_rate": 3e-3, "others": "adamw", "others_learning_rate": 1e-3}


def load(tiny: Path) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    return model


def rows(count: int) -> list[dict[str, list[int]]]:
    drawn = torch.randint(3, 260, (count, 12), generator=torch.Generator().manual_seed(3)).tolist()
    return [{"input_ids": ids, "labels": ids} for ids in drawn]


def trainer(tiny: Path, folder: Path, *, steps: int = 4, **changed: Any) -> Trainer:
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        max_grad_norm=0.0,
        save_steps=2,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    return Trainer(
        model=load(tiny),
        args=args,
        train_dataset=rows(16),  # type: ignore[arg-type]
        optimizer_cls_and_kwargs=(LograFactory, {**SETTINGS, **changed}),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("others", ["frozen", "adamw"])
def test_the_trainer_makes_it_by_the_factory_and_resumes_bit_for_bit(tiny: Path, tmp_path: Path, others: str) -> None:
    whole = trainer(tiny, tmp_path, others=others)
    whole.train()
    start, end = weights_of(load(tiny)), weights_of(whole.model)  # type: ignore[arg-type]
    moved = {name for name, weight in end.items() if not torch.equal(weight, start[name])}
    resumed = trainer(tiny, tmp_path, others=others)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert moved == ({name for name in end if "proj" in name} if others == "frozen" else set(end))
    assert same(weights_of(resumed.model), end)  # type: ignore[arg-type]


def test_a_name_that_is_no_setting_is_refused(tiny: Path) -> None:
    with pytest.raises(TypeError, match="ranks"):
        LograFactory()(load(tiny), ranks=3)


def test_a_model_without_the_named_layers_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="no module of the model is named"):
        LograFactory()(load(tiny), targets=("c_attn",))


@pytest.mark.parametrize("others", ["frozen", "adamw"])
@pytest.mark.parametrize("quantise", ["none", "int16"])
def test_under_control_the_realised_kl_meets_the_budget_within_five_percent(
    tiny: Path, others: Any, quantise: Any
) -> None:
    model = load(tiny)
    settings = LograSettings(**{**SETTINGS, "learning_rate": 3e-2, "others": others, "quantise": quantise})
    control = Controlled(Logra(model, settings), model, Budget(1e-4, 1e-4, 1), measure=True)
    ids = torch.tensor([row["input_ids"] for row in rows(4)])
    targets = torch.ones_like(ids, dtype=torch.bool)
    targets[:, 0] = False
    control.probe = lambda: [Probe(ids, torch.ones_like(ids), targets)]
    model(input_ids=ids, labels=ids).loss.backward()
    control.step()
    last = control.last
    assert last is not None
    assert 0 < last.alpha < 1
    assert last.realised == pytest.approx(last.budget, rel=0.05)

"""The memory formulas: what our notes on the published systems computed, and what small models show."""

import math
from pathlib import Path

import pytest
from safetensors import safe_open

from groundhop.cli import main
from groundhop.errors import InputError
from groundhop.training.logra.memory import Shapes, dense, logra, read_shapes, shapes_of

MODELS = Path(__file__).parents[3] / "configs" / "models"
GIB = 2**30


@pytest.mark.parametrize(("name", "adamw", "others_adamw", "others_frozen"), [
    # Section 2.4 of the notes on LoGRA, four processes, rank 256: there projections are float32 and BF16, six bytes a sign; here one.
    ("qwen2.5-7b", 28.4, 13.1, 10.0),
    ("27b-like", 87.0, None, 29.5),
])  # fmt: skip
def test_the_large_models_come_out_as_in_the_notes(
    name: str, adamw: float, others_adamw: float | None, others_frozen: float
) -> None:
    shapes = read_shapes(MODELS / f"{name}.json")
    wide_signs = 5 * 256 * shapes.columns
    assert dense(shapes, ranks=4).total / GIB == pytest.approx(adamw, abs=0.06)
    frozen = logra(shapes, rank=256, ranks=4, others="frozen").total + wide_signs
    assert frozen / GIB == pytest.approx(others_frozen, abs=0.06)
    if others_adamw is not None:
        trained = logra(shapes, rank=256, ranks=4, others="adamw").total + wide_signs
        assert trained / GIB == pytest.approx(others_adamw, abs=0.06)


def test_parts_by_hand() -> None:
    shapes = shapes_of([("embed.weight", (10, 4)), ("layers.0.q_proj.weight", (6, 4)), ("norm.weight", (4,))])
    assert shapes == Shapes(parameters=68, target_parameters=24, rows=6, columns=4)
    found = logra(shapes, rank=2, ranks=1, others="adamw")
    assert (found.weights, found.gradients, found.adam) == (272, 176, 352)
    assert (found.sketches, found.projections, found.row_moments) == (48, 8, 24)
    assert dense(shapes, ranks=1).total == 16 * 68


def test_a_tied_head_counts_once(tiny: Path) -> None:
    with safe_open(tiny / "model.safetensors", "np") as weights:
        stored = sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    assert read_shapes(tiny).parameters == stored


def test_the_command_prints_a_line_for_each_way(capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    assert main(["memory", "--model-config", str(tiny), "--rank", "8"]) == 0
    printed = capsys.readouterr().out
    assert [line.split("  ")[0] for line in printed.splitlines()[2:]] == [
        "AdamW", "LoGRA, others AdamW", "LoGRA, others frozen",
    ]  # fmt: skip


@pytest.mark.parametrize("text", [None, "{}", '{"model_type": "bert"', '{"model_type": "no-such-model"}'])
def test_what_is_no_model_config_is_refused_by_name(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=r"config\.json"):
        read_shapes(path)


def test_a_model_without_targets_is_refused() -> None:
    with pytest.raises(InputError, match="nothing to sketch"):
        shapes_of([("embed.weight", (10, 4))])

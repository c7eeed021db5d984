"""How much memory a trainer holds for weights, gradients and optimizer state, with AdamW and with LoGRA.

Formulas: docs/logra.md, after LoGRA (arXiv 2610.06647). Activations are not in them: they depend on the
batch, not on the optimizer, except that a target layer keeps its input as rank instead of columns wide.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from groundhop.errors import InputError

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Last part of the names of the modules that LoGRA trains by sketch."""

_F32 = 4
_ADAM_BYTES = 2 * _F32
_SIGN_BYTES = 1


@dataclass(frozen=True, slots=True)
class Shapes:
    """What of a model the formulas need."""

    parameters: int
    """All of them; a tied head counts once."""
    target_parameters: int
    rows: int
    """Sum of output features over the target layers."""
    columns: int
    """Sum of input features over the target layers."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that one process holds between two steps' backward passes, gradients included."""

    weights: int
    gradients: int
    adam: int
    sketches: int
    projections: int
    row_moments: int

    @property
    def optimizer_and_gradients(self) -> int:
        """All but the weights."""
        return self.gradients + self.adam + self.sketches + self.projections + self.row_moments

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.optimizer_and_gradients


def dense(shapes: Shapes, *, ranks: int) -> Memory:
    """AdamW with float32 weights, sharded over `ranks` processes: 16 bytes a parameter."""
    share = -(-shapes.parameters // ranks)
    return Memory(_F32 * share, _F32 * share, _ADAM_BYTES * share, 0, 0, 0)


def logra(shapes: Shapes, *, rank: int, ranks: int, others: Literal["adamw", "frozen"]) -> Memory:
    """LoGRA with float32 weights: sketches and signs are held whole by every process, weights and row moments are sharded.

    Signs are held as int8; each weight's are widened for the moment they are multiplied with.
    """
    trained = shapes.parameters - shapes.target_parameters if others == "adamw" else 0
    share = -(-trained // ranks)
    return Memory(
        weights=_F32 * -(-shapes.parameters // ranks),
        gradients=_F32 * share,
        adam=_ADAM_BYTES * share,
        sketches=_F32 * rank * shapes.rows,
        projections=_SIGN_BYTES * rank * shapes.columns,
        row_moments=_F32 * -(-shapes.rows // ranks),
    )


def shapes_of(named: Iterable[tuple[str, tuple[int, ...]]], targets: Iterable[str] = TARGETS) -> Shapes:
    """Count parameters by name and shape, each tied weight given once.

    Raises: InputError when no weight belongs to a target module.
    """
    wanted = set(targets)
    total = inside = rows = columns = 0
    for name, shape in named:
        size = 1
        for extent in shape:
            size *= extent
        total += size
        parts = name.split(".")
        if len(shape) == 2 and parts[-1] == "weight" and len(parts) > 1 and parts[-2] in wanted:
            inside, rows, columns = inside + size, rows + shape[0], columns + shape[1]
    if not inside:
        raise InputError(f"none of the model's weights is one of {', '.join(sorted(wanted))}: nothing to sketch")
    return Shapes(total, inside, rows, columns)


def read_shapes(source: Path) -> Shapes:
    """Shapes of the model that a Hugging Face `config.json` (or the folder that holds one) describes; no weight is made.

    Raises: InputError when the file is missing, or when it describes no causal language model that transformers knows.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path = source / "config.json" if source.is_dir() else source
    if not path.is_file():
        raise InputError(f"{path}: no such file; a model's config.json is wanted, or its folder")
    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, OSError, TypeError) as error:
        raise InputError(f"{path}: not the config of a causal language model: {error}") from error
    return shapes_of((name, tuple(weight.shape)) for name, weight in model.named_parameters())


def table(shapes: Shapes, *, rank: int, ranks: int) -> str:
    """A table for people, in GiB a process."""
    rows = {
        "AdamW": dense(shapes, ranks=ranks),
        "LoGRA, others AdamW": logra(shapes, rank=rank, ranks=ranks, others="adamw"),
        "LoGRA, others frozen": logra(shapes, rank=rank, ranks=ranks, others="frozen"),
    }
    head = ("GiB a process", "weights", "gradients", "Adam m, v", "sketches", "signs", "row v", "total", "of AdamW")
    whole = rows["AdamW"].total
    lines = [
        f"{shapes.parameters:,} parameters, {shapes.target_parameters:,} of them in target layers, rank {rank}, "
        f"{ranks} process{'es' if ranks > 1 else ''}; without activations",
        "  ".join([f"{head[0]:<20}", *(f"{text:>9}" for text in head[1:])]),
    ]
    for name, memory in rows.items():
        parts = (memory.weights, memory.gradients, memory.adam, memory.sketches, memory.projections)
        cells = [f"{part / 2**30:9.2f}" for part in (*parts, memory.row_moments, memory.total)]
        lines.append("  ".join([f"{name:<20}", *cells, f"{memory.total / whole:9.1%}"]))
    return "\n".join(lines)

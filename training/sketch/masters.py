"""FP32 masters: which tensors have one, and what they begin as."""

from collections.abc import Collection, Mapping

from groundhop.errors import InputError
from groundhop.training.hotload.bits import TensorSpec, Weights
from groundhop.training.sketch.expand import MASTER_TYPES, Master, widened


def master_specs(specs: Mapping[str, TensorSpec], targets: Collection[str]) -> dict[str, TensorSpec]:
    """The F32 tensors that masters of `targets` are, in the order of their names.

    Raises: InputError for no target at all, and for one that is not there, has not two axes or follows from no FP32 master.
    """
    if not targets:
        raise InputError("need at least one weight that is updated by sketches")
    found = {}
    for name in sorted(targets):
        spec = specs.get(name)
        if spec is None or len(spec.shape) != 2 or spec.dtype not in MASTER_TYPES:
            said = "absent" if spec is None else f"{spec.dtype}{list(spec.shape)}"
            raise InputError(f"{name}: need two axes of {' or '.join(MASTER_TYPES)} for a sketch, it is {said}")
        found[name] = TensorSpec(name=name, dtype="F32", shape=spec.shape)
    return found


def named_targets(specs: Mapping[str, TensorSpec], modules: Collection[str]) -> list[str]:
    """The weights of layers whose own name is in `modules`, e.g. `q_proj`. Raises: InputError where there are none."""
    found = [name for name in sorted(specs) if name.endswith(".weight") and name.split(".")[-2] in modules]
    if not found:
        raise InputError(f"the checkpoint has no weight of {', '.join(modules)}")
    return found


def read_masters(weights: Weights, wanted: Mapping[str, TensorSpec]) -> dict[str, Master]:
    """Masters of `wanted` out of a checkpoint of F32 or BF16; copies. Raises: InputError for another shape or type."""
    masters = {}
    for name, spec in wanted.items():
        given = weights.specs.get(name)
        if given is None or given.shape != spec.shape:
            raise InputError(f"{name}: need the shape {list(spec.shape)}, the masters' checkpoint has {given}")
        masters[name] = widened(weights.bits(name), given.dtype, spec.shape)
    return masters

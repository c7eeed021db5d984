"""Small states and checkpoints for the tests of files and commands."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from groundhop.training.hotload.bits import Bits, TensorSpec
from groundhop.training.hotload.safetensors_file import make_header


class Held:
    """A state in memory."""

    def __init__(self, specs: Mapping[str, TensorSpec], held: dict[str, Bits]) -> None:
        self.specs = specs
        self.held = held

    def bits(self, name: str) -> Bits:
        return self.held[name]

    def copy(self) -> "Held":
        return Held(self.specs, {name: bits.copy() for name, bits in self.held.items()})


def state(tied: bool = False, seed: int = 5) -> Held:
    """Five tensors of four types, one of them empty; bits at random, NaN and all. `tied` adds an equal output head."""
    shapes = {
        "model.embed_tokens.weight": ("BF16", (48, 16)),
        "model.layers.0.mlp.weight": ("F32", (7, 33)),
        "model.layers.0.norm.weight": ("F16", (65,)),
        "model.layers.1.none.weight": ("BF16", (0, 4)),
        "model.scales": ("U8", (3, 11)),
    }
    if tied:
        shapes["lm_head.weight"] = ("BF16", (48, 16))
    specs = {name: TensorSpec(name=name, dtype=kind, shape=shape) for name, (kind, shape) in shapes.items()}
    random = np.random.default_rng(seed)
    held = {
        name: random.integers(0, 256, spec.nbytes, dtype=np.uint8).view(spec.unit)
        for name, spec in specs.items()
        if name != "lm_head.weight"
    }
    if tied:
        held["lm_head.weight"] = held["model.embed_tokens.weight"].copy()
    return Held(specs, held)


def changed(before: Held, share: float = 0.05, seed: int = 9) -> Held:
    """A copy with about `share` of each tensor's elements changed, at least one where there is one; a tied head follows."""
    after, random = before.copy(), np.random.default_rng(seed)
    for name, bits in after.held.items():
        if bits.size and name != "lm_head.weight":
            places = random.choice(bits.size, max(1, int(bits.size * share)), replace=False)
            bits[places] ^= random.integers(1, 5, places.size).astype(bits.dtype)
    if "lm_head.weight" in after.held:
        after.held["lm_head.weight"] = after.held["model.embed_tokens.weight"].copy()
    return after


def write_folder(weights: Held, folder: Path, shards: int = 2) -> Path:
    """A folder as transformers writes it: shards, index, config, a tokenizer in a sub-folder."""
    folder.mkdir(parents=True)
    names, table = sorted(weights.specs), {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[number::shards]
        head, order = make_header([weights.specs[name] for name in mine], {"format": "pt", "shard": str(number)})
        (folder / file).write_bytes(head + b"".join(weights.bits(spec.name).tobytes() for spec in order))
        table.update(dict.fromkeys(mine, file))
    index = {"metadata": {"total_size": 1}, "weight_map": table}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "none"}')
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.txt").write_text("a\nb\n")
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    """All files below a folder by their relative names."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def held_by(weights: object) -> dict[str, bytes]:
    """All bytes of a state by name."""
    return {name: weights.bits(name).tobytes() for name in weights.specs}  # type: ignore[attr-defined]

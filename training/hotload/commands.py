"""`groundhop hotload diff | apply | fold | inspect | verify`: deltas between checkpoints on disk. No torch is needed.

Each returns the text to print, writes its result at once or not at all, and raises one of our errors on bad input.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from groundhop.errors import ChecksumError, InputError, MissingError
from groundhop.training.hotload.atomic import replacing
from groundhop.training.hotload.bits import Weights
from groundhop.training.hotload.changes import Encoding
from groundhop.training.hotload.checkpoint import Checkpoint, open_checkpoint, same_tensors, watched, write_checkpoint
from groundhop.training.hotload.delta import Delta, DeltaSummary, TensorDelta, encode_tensor, read_delta, write_delta
from groundhop.training.hotload.fingerprint import state_digest
from groundhop.training.hotload.fold import fold as fold_deltas
from groundhop.training.hotload.moved import Moved, WithHead, WithoutHead, tied
from groundhop.training.hotload.named import EMBEDDING, TIED_HEAD


def diff(base: Path, target: Path, out: Path, encoding: Encoding = "auto", version: int = 1) -> str:
    """Write the delta from one checkpoint to another. Raises: InputError where their tensors differ in name, type or shape."""
    _check_out_file(out, (base, target))
    old = open_checkpoint(base)
    new = _seen_like(open_checkpoint(target), old)
    same_tensors(new.specs, old.specs, str(base))
    deltas = list(_encoded(old, new, encoding))
    prints = {**old.prints, **{delta.spec.name: delta.fingerprint for delta in deltas}}
    digest = state_digest(old.specs, prints)
    summary = _write(out, deltas, version, old.digest, digest)
    total = sum(spec.size for spec in old.specs.values())
    return (
        f"{out}: {summary.bytes:,} bytes, {share(summary.bytes, old.nbytes)} of {base} ({old.nbytes:,} bytes)\n"
        f"{summary.changed:,} of {total:,} elements changed ({share(summary.changed, total)}), "
        f"{len(deltas)} of {len(old.specs)} tensors; {_encodings(summary)}\n"
        f"version {version}, from {old.digest}\n{' ' * len(f'version {version},')}   to {digest}"
    )


def apply(base: Path, delta: Path, out: Path) -> str:
    """Write the checkpoint that a delta makes of `base`. Raises: ChecksumError for another base, or a wrong result."""
    source, read = open_checkpoint(base), _read(delta)
    moved = Moved(source, read)
    write_checkpoint(moved, out, like=source)
    state = f"the state {read.digest}" if read.digest else "all fingerprints right"
    if not moved.moved:
        return f"{out}: version {read.version}, {state}; {base} held it already"
    return f"{out}: version {read.version}, {state}; {moved.moved} of {len(source.specs)} tensors changed"


def fold(deltas: Sequence[Path], out: Path, base: Path | None = None) -> str:
    """Write one delta that does what several in a row do. Raises: InputError where they do not follow on each other."""
    _check_out_file(out, (*deltas, *([base] if base else [])))
    before = open_checkpoint(base) if base else None
    made = fold_deltas([_read(path) for path in deltas], before)
    parts = [entry.tensor_delta for entry in made.entries]
    summary = _write(out, parts, made.version, made.base_digest, made.digest)
    sizes = sum(path.stat().st_size for path in deltas)
    return (
        f"{out}: {summary.bytes:,} bytes for {len(deltas)} deltas of {sizes:,} bytes; {summary.changed:,} elements in "
        f"{len(parts)} tensors; {_encodings(summary)}\nversion {made.version}, from {made.base_digest}\n"
        f"{' ' * len(f'version {made.version},')}   to {made.digest}"
    )


def inspect(delta: Path) -> str:
    """Say what a delta holds."""
    read = _read(delta)
    rows = [("tensor", "type", "shape", "elements", "changed", "share", "bytes", "encodings")]
    modes: Counter[str] = Counter()
    for entry in read.entries:
        used = Counter({chunk.mode: 0 for chunk in entry.chunks})
        for chunk in entry.chunks:
            used[chunk.mode] += len(chunk.body)
        modes += used
        size = entry.spec.size
        shape = "x".join(map(str, entry.shape)) or "scalar"
        counts = (f"{size:,}", f"{entry.changed:,}", share(entry.changed, size), f"{sum(used.values()):,}")
        rows.append((entry.name, entry.dtype, shape, *counts, " ".join(sorted(used))))
    changed, total = sum(entry.changed for entry in read.entries), sum(entry.spec.size for entry in read.entries)
    encodings = ", ".join(f"{mode} {size:,}" for mode, size in modes.most_common()) or "none"
    head = [
        f"version      {read.version}",
        f"from state   {read.base_digest or 'not said: a part of a snapshot'}",
        f"to state     {read.digest or 'not said: a part of a snapshot'}",
        f"tensors      {len(read.entries)} with changes",
        f"elements     {changed:,} of their {total:,} ({share(changed, total)})",
        f"bytes        {delta.stat().st_size:,}; by encoding: {encodings}",
        f"needs        {'the old weights (context)' if any(map(read.needs_old, read.entries)) else 'no old weights'}; "
        f"operations: {', '.join(sorted(read.operations)) or 'none'}",
    ]
    return "\n".join([*head, *(["", *_aligned(rows)] if read.entries else [])])


def verify(checkpoint: Path, digest: str | None = None) -> str:
    """Check a checkpoint's headers, index and lengths, and give its digest. Raises: ChecksumError unless it is `digest`."""
    opened = open_checkpoint(checkpoint)
    if digest is not None and not (len(digest) >= 12 and opened.digest.startswith(digest.lower())):
        raise ChecksumError(f"{checkpoint} holds the state {opened.digest}, wanted was {digest}")
    head = "; the output head equals the embedding" if tied(opened) else ""
    return (
        f"{checkpoint}: {len(opened.specs)} tensors, {opened.nbytes:,} bytes, files: {len(opened.shards)}{head}\n"
        f"state {opened.digest}"
    )


def share(part: int, whole: int) -> str:
    """A share in per cent with three digits after the point."""
    return f"{100 * part / whole:.3f} %" if whole else "0.000 %"


def _encoded(old: Checkpoint, new: Weights, encoding: Encoding) -> Iterator[TensorDelta]:
    for spec in watched("comparing, MB", [old.specs[name] for name in sorted(old.specs)]):
        prints = old.prints[spec.name], None
        delta = encode_tensor(spec, old.bits(spec.name), new.bits(spec.name), encoding=encoding, prints=prints)
        if delta is not None:
            yield delta


def _seen_like(target: Checkpoint, base: Checkpoint) -> Weights:
    """The target with the base's names, where only a tied output head is stored on one side and not on the other."""
    if TIED_HEAD in base.specs and TIED_HEAD not in target.specs and EMBEDDING in target.specs:
        if not tied(base):
            raise InputError(f"{target.path} does not store {TIED_HEAD!r}, which {base.path} does not tie")
        return WithHead(target)
    if TIED_HEAD in target.specs and TIED_HEAD not in base.specs:
        if not tied(target):
            raise InputError(f"{target.path} does not tie {TIED_HEAD!r}, which {base.path} does not store")
        return WithoutHead(target)
    return target


def _read(path: Path) -> Delta:
    if not path.is_file():
        raise MissingError(f"no delta file {path}")
    return read_delta(path)


def _write(out: Path, deltas: Sequence[TensorDelta], version: int, base_digest: str, digest: str) -> DeltaSummary:
    with replacing(out) as path:
        return write_delta(path, deltas, version=version, base_digest=base_digest, digest=digest)


def _check_out_file(out: Path, inputs: Sequence[Path]) -> None:
    real = Path(os.path.realpath(out))
    if real.is_dir():
        raise InputError(f"{out} is a folder: need the name of a file to write")
    for path in inputs:
        source = Path(os.path.realpath(path))
        if real == source or source in real.parents:
            raise InputError(f"{out} is an input, or lies in one: not replaced")


def _encodings(summary: DeltaSummary) -> str:
    sizes = sorted(summary.encodings.items(), key=lambda item: -item[1])
    return ", ".join(f"{mode} {size:,} bytes" for mode, size in sizes) or "nothing coded"


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = {0, 1, 2, len(widths) - 1}
    for row in rows:
        cells = (
            cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()

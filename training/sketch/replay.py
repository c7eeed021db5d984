"""What a record makes of a site's masters: sketches replayed and proved, masters that came whole, what changes in the checkpoint."""

import logging
from collections.abc import Iterator, Mapping

import numpy as np

from groundhop.errors import ChecksumError, InputError
from groundhop.training.hotload.bits import Bits
from groundhop.training.hotload.delta import Entry, TensorDelta, encode_tensor, read_delta
from groundhop.training.hotload.fingerprint import fingerprint
from groundhop.training.logra.signs import sign_matrix
from groundhop.training.sketch.expand import Master, check_step, digest_signs, expand, rounded
from groundhop.training.sketch.record import Record, Sketch
from groundhop.training.sketch.site_state import State

logger = logging.getLogger(__name__)


def expand_all(record: Record, state: State) -> tuple[dict[str, Master], list[str]]:
    """Masters after their sketches, and the weights whose sketch is of no use here."""
    masters: dict[str, Master] = {}
    wrong: list[str] = []
    for sketch in record.sketches:
        name = sketch.row.name
        try:
            masters[name] = _replayed(sketch, state)
        except (InputError, ChecksumError) as error:
            logger.warning("version %d: asking for the delta of %s: %s", record.head.version, name, error)
            wrong.append(name)
    return masters, wrong


def masters_sent(record: Record, state: State) -> dict[str, Master]:
    """Masters that came whole."""
    masters = {}
    for entry in record.masters.entries:
        held = state.masters.get(entry.name)
        if held is None or held.shape != entry.shape:
            raise InputError(f"the record has a master of {entry.name}{list(entry.shape)}, this site has none")
        bits: Bits = np.zeros(entry.spec.size, np.uint32)
        for change in record.masters.changes(entry):
            change.scatter(bits, change.result(change.gather(bits)))
        if fingerprint(bits) != entry.fingerprint:
            raise ChecksumError(f"{entry.name}: its master has another fingerprint than promised")
        masters[entry.name] = bits.view(np.float32).reshape(entry.shape)
    return masters


def mended(repair: bytes | None, wrong: list[str]) -> tuple[Entry, ...]:
    """The entries of a delta that was asked for; `apply_delta` checks where they lead. Raises: InputError for other weights."""
    entries = read_delta(repair).entries if repair is not None else ()
    if odd := [entry.name for entry in entries if entry.name not in wrong]:
        raise InputError(f"need the delta of {', '.join(wrong)}, got one of {', '.join(odd)}")
    return entries


def checkpoint_deltas(masters: Mapping[str, Master], state: State) -> Iterator[TensorDelta]:
    """What changes in the checkpoint where masters move."""
    for name, master in masters.items():
        spec = state.specs[name]
        delta = encode_tensor(spec, state.arrays[name], rounded(master, spec.dtype), prints=(state.prints[name], None))
        if delta is not None:
            yield delta


def _replayed(sketch: Sketch, state: State) -> Master:
    """Raises: InputError, ChecksumError that say why the sketch does not give the promised bits."""
    row = sketch.row
    master = state.masters.get(row.name)
    if master is None or master.shape != (row.rows, row.columns):
        raise InputError(f"no master of [{row.rows}, {row.columns}]")
    if state.since[row.name] != row.since:
        raise ChecksumError(f"the sketch starts from version {row.since}, the master is at {state.since[row.name]}")
    for number, step in enumerate(sketch.steps()):
        where = f"step {number} of {row.name}"
        check_step(step, master.shape, where)
        signs = sign_matrix(step.seed, step.rank, row.columns)
        if digest_signs(signs) != step.sign_digest:
            raise ChecksumError(f"{where}: the trainer drew other signs from its seed")
        master = expand(master, step, signs)
    if fingerprint(rounded(master, state.specs[row.name].dtype)) != sketch.fingerprint:
        raise ChecksumError("its bits have another fingerprint than promised")
    return master

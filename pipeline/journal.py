"""Records on disk by (question, repeat): appended while a stage runs, put in order at its end.

A run killed at any moment leaves whole lines and at most one torn one, which is cut off. Of two records of one pair the
later counts. Only offsets are held in memory: rollouts with token ids can be large.
"""

from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec

from groundhop import jsonl
from groundhop.errors import InputError

R = TypeVar("R", bound=msgspec.Struct)


class Pair(NamedTuple):
    """One try at one question."""

    question_id: str
    repeat: int


class _Key(msgspec.Struct):
    """What is read of each line; everything else is skipped."""

    question_id: str
    repeat: int


class Journal(Generic[R]):
    """An append-only file of records that have a `question_id` and a `repeat`."""

    def __init__(self, path: Path, kind: type[R]) -> None:
        self.path = path
        self._kind = kind
        self._out = jsonl.Appender(path)
        self._offsets: dict[Pair, tuple[int, int]] = {}
        self._end = 0
        decoder = msgspec.json.Decoder(_Key)
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                self._note(self._key(decoder, line, number), len(line))

    def __contains__(self, pair: Pair) -> bool:
        return pair in self._offsets

    def append(self, record: R) -> None:
        """Write one record; it replaces an earlier one of its pair."""
        self._out.append(record)
        size = self.path.stat().st_size - self._end
        self._note(Pair(record.question_id, record.repeat), size)  # type: ignore[attr-defined]

    def get(self, pair: Pair) -> R:
        """Read a pair's last record. Raises: KeyError without one, InputError when it is not of this kind."""
        raw = self._raw(pair)
        try:
            return msgspec.json.decode(raw, type=self._kind)
        except msgspec.MsgspecError as error:
            raise InputError(f"{self.path}, {pair.question_id}/{pair.repeat}: {error}") from error

    def settle(self, pairs: list[Pair]) -> None:
        """Close the file, and replace it by the last records of these pairs, in this order."""
        self._out.close()
        jsonl.write(self.path, (msgspec.Raw(self._raw(pair).rstrip(b"\n")) for pair in pairs if pair in self))

    def close(self) -> None:
        """Close the file as it is."""
        self._out.close()

    def _raw(self, pair: Pair) -> bytes:
        offset, size = self._offsets[pair]
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def _note(self, pair: Pair | None, size: int) -> None:
        if pair is not None:
            self._offsets[pair] = (self._end, size)
        self._end += size

    def _key(self, decoder: "msgspec.json.Decoder[_Key]", line: bytes, number: int) -> Pair | None:
        if not line.strip():
            return None
        try:
            key = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise InputError(f"{self.path}, line {number}: {error}") from error
        return Pair(key.question_id, key.repeat)

"""Make one delta of several in a row: applied once, it gives what applying each in order gives."""

from collections.abc import Sequence

from groundhop.errors import InputError
from groundhop.training.hotload.bits import Weights
from groundhop.training.hotload.delta import Delta


def fold(deltas: Sequence[Delta], base: Weights | None = None) -> Delta:
    """Compose `deltas`, oldest first. `base`: the state before the first, which chunks in context encoding need.

    Raises: InputError where they do not follow on each other, or mix operations that cannot be composed.
    """
    if not deltas:
        raise InputError("need at least one delta to fold")
    raise InputError("folding is not there yet")

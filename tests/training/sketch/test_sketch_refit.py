"""Sketch sync in front of a refitter."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sketch_builders import TARGETS, Trainer

from groundhop.errors import ServerError
from groundhop.training.hotload.named import Whole
from groundhop.training.hotload.refit import RefitResult
from groundhop.training.sketch.refit import make_sketch_refitter
from groundhop.training.sketch.site import Site


class Servers:
    """The fan-out behind the site: keeps what reached it."""

    def __init__(self) -> None:
        self.held: dict[str, Whole] = {}
        self.failures = 0

    async def refit(self, named: Iterable[tuple[str, Any]]) -> RefitResult:
        if self.failures:
            self.failures -= 1
            raise ServerError("gone")
        self.held = dict(named)
        return RefitResult("1", 0, 0, 0, 0.0, "")

    def hold(self, trainer: Trainer) -> bool:
        wanted = trainer.canonical()
        return all(np.array_equal(self.held[name].bits, wanted[name]) for name in wanted)


def test_servers_behind_the_site_hold_the_trainers_bits_and_the_record_is_smaller(tmp_path: Path) -> None:
    trainer, servers = Trainer(), Servers()
    # A trainer whose masters are not what the checkpoint holds, as after a resumed run.
    trainer.step()
    refitter = make_sketch_refitter(servers, trainer.named(), trainer.checkpoint(), TARGETS, tmp_path / "site")
    for _ in range(3):
        refitter.add(trainer.step())
        asyncio.run(refitter.refit(trainer.named()))
        assert servers.hold(trainer)
    assert all(one.record_bytes < one.delta_bytes and one.sketched == 2 for one in refitter.traffic)


def test_a_refit_that_failed_behind_the_site_or_before_it_is_made_good_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, servers = Trainer(), Servers()
    refitter = make_sketch_refitter(servers, trainer.named(), trainer.checkpoint(), TARGETS, tmp_path / "site")
    servers.failures = 1
    refitter.add(trainer.step())
    with pytest.raises(ServerError, match="gone"):
        asyncio.run(refitter.refit(trainer.named()))
    with monkeypatch.context() as patch:
        patch.setattr("groundhop.training.sketch.site.log_record", full)
        refitter.add(trainer.step())
        with pytest.raises(OSError, match="full"):
            asyncio.run(refitter.refit(trainer.named()))
    refitter.add(trainer.step())
    asyncio.run(refitter.refit(trainer.named()))
    assert (servers.hold(trainer), [one.version for one in refitter.traffic]) == (True, [1, 2, 3])
    assert Site(tmp_path / "site").version == 3


def full(*_: object) -> None:
    raise OSError("full")

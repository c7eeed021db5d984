"""The real publisher through the real control plane to replicas that restore every version and compare its digest."""

from pathlib import Path

import numpy as np
import pytest
from restoring import DEPLOYMENT, Restoring, control_plane

from groundhop.errors import FencedError, ServerError
from groundhop.training.hotload.control.client import ControlClient, ControlFleet
from groundhop.training.hotload.control.wire import HotLoadBody
from groundhop.training.hotload.publisher import Publisher
from groundhop.training.hotload.store.objects import open_objects

pytestmark = pytest.mark.slow


def test_versions_reach_every_replica_bit_for_bit_and_an_older_publisher_none(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = {f"layers.{i}.weight": rng.normal(size=(32, 16)).astype(np.float32) for i in range(3)}
    store = str(tmp_path / "store")
    objects = open_objects(store)
    with control_plane(tmp_path / "ledger", store) as url:
        replicas = [Restoring(url, store, name, tmp_path / name) for name in ("a", "b")]
        for replica in replicas:
            replica.start()
        fleet = ControlFleet(url, DEPLOYMENT, timeout_s=240)
        first = Publisher(objects, tmp_path / "one", fleet, run_id="run", owner="one")
        published = [first.start(weights.items())]
        for _ in range(2):
            weights["layers.1.weight"][rng.integers(32), rng.integers(16)] *= np.float32(1.5)
            published.append(first.publish(weights.items()))
        second = Publisher(objects, tmp_path / "two", fleet, run_id="run", owner="two", take_over=True)
        second.start(weights.items())
        weights["layers.2.weight"][0, 0] = np.float32(-0.0)
        published.append(second.publish(weights.items()))
        with pytest.raises(FencedError):
            first.publish(weights.items())
        with pytest.raises(ServerError, match="not whole: a file is missing"):
            fleet._create(HotLoadBody(deployment_id=DEPLOYMENT, identity="weight_v000099", kind="full"))
        view = ControlClient(url).deployment(DEPLOYMENT)
        for replica in replicas:
            replica.stopping = True
            replica.join()
    digests = {one.identity: one.digest for one in published}
    assert list(digests) == [f"weight_v{version:06d}" for version in range(4)]
    assert [replica.served for replica in replicas] == [digests, digests]
    assert (view.head, view.announced, view.epoch) == ("weight_v000003", "weight_v000003", 2)

"""Publishing from TRL's weight transfer, from a trainer's callback, from a plain loop."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from memory_fleet import MemoryObjects

from groundhop.errors import InputError
from groundhop.training.hotload.hooks.plain import make_fleet, start_publisher
from groundhop.training.hotload.publisher import Publisher

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from groundhop.training.hotload.hooks.trl import PublishSteps, WeightTransfer, plain_names  # noqa: E402


def weights(step: int) -> dict[str, Any]:
    return {"a": torch.full((4,), 1.0 + step), "b": torch.full((3,), 2.0 + step)}


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    made = Publisher(MemoryObjects(), tmp_path / "publisher", run_id="run", owner="me")
    made.start(weights(0).items())
    return made


def held(publisher: Publisher, name: str) -> list[float]:
    values: list[float] = publisher.baseline.bits(name).view(np.float32).tolist()
    return values


def test_trl_sends_its_weights_through_the_publisher(publisher: Publisher) -> None:
    transfer = WeightTransfer(publisher)
    transfer.init_weight_transfer()
    transfer.pause()
    transfer.send_weights(iter(weights(1).items()))
    transfer.resume()
    assert (publisher.baseline.version, held(publisher, "a"), held(publisher, "b")) == (1, [2.0] * 4, [3.0] * 3)


def test_frozen_parameters_that_trl_leaves_out_stay(publisher: Publisher) -> None:
    WeightTransfer(publisher).send_weights(iter([("b", weights(1)["b"])]))
    assert (held(publisher, "a"), held(publisher, "b")) == ([1.0] * 4, [3.0] * 3)


def test_the_iterator_ends_whatever_fails_so_that_no_rank_waits(publisher: Publisher) -> None:
    ended: list[bool] = []

    def gathering() -> Iterator[tuple[str, Any]]:
        yield "a", torch.ones(5)
        yield "b", torch.ones(3)
        ended.append(True)

    with pytest.raises(InputError):
        WeightTransfer(publisher).send_weights(gathering())
    assert ended == [True]


def test_the_object_has_every_method_of_trls_protocol() -> None:
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no TRL here")
    # Read, not imported: the module brings half a minute of other imports.
    source = Path(spec.submodule_search_locations[0]) / "experimental" / "async_grpo" / "async_grpo_trainer.py"
    classes = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)]
    (protocol,) = (node for node in classes if node.name == "WeightTransferProtocol")
    wanted = {node.name for node in protocol.body if isinstance(node, ast.FunctionDef)}
    assert wanted == {"init_weight_transfer", "pause", "send_weights", "resume", "destroy"}
    assert wanted <= set(dir(WeightTransfer))


def test_the_callback_publishes_at_the_start_and_after_every_second_step(publisher: Publisher) -> None:
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(tensor) for name, tensor in weights(0).items()})
    callback = PublishSteps(publisher.publish, every=2)
    callback.on_train_begin(None, None, None, model=model)
    for step in (1, 2, 3):
        callback.on_step_end(None, SimpleNamespace(global_step=step), None, model=model)
    assert callback.last is not None
    assert callback.last.version == 2


def test_names_lose_what_wrappers_put_into_them() -> None:
    given = {"module._orig_mod.layers.0._checkpoint_wrapped_module.weight": torch.ones(1)}
    assert [name for name, _ in plain_names(given.items())] == ["layers.0.weight"]


def test_three_lines_publish_from_any_loop(tmp_path: Path) -> None:
    publisher = start_publisher(tmp_path / "store", tmp_path / "folder", weights(0).items(), run_id="run")
    publisher.publish(weights(1).items())
    again = start_publisher(str(tmp_path / "store"), tmp_path / "folder", weights(0).items(), run_id="run")
    done = again.publish(weights(2).items())
    assert (done.version, held(again, "b")) == (2, [4.0] * 3)


def test_servers_and_a_control_plane_at_once_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        make_fleet(MemoryObjects(), tmp_path, ["http://a"], {}, ("http://c", "d"), None)

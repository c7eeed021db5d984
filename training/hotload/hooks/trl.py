"""Publishing from TRL and other trainers of transformers.

TRL 1.16's asynchronous trainers take an object that brings weights to the servers (`experimental.async_grpo`,
`WeightTransferProtocol`): `AsyncGRPOTrainer(..., weight_transfer=WeightTransfer(publisher))`. For every other trainer there is
a callback: `trainer.add_callback(PublishSteps(publisher.publish))`.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

from transformers import TrainerCallback

from groundhop.training.hotload.named import TIED_HEAD, Named, Whole
from groundhop.training.hotload.publisher import Published, Publisher

logger = logging.getLogger(__name__)

WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""What DDP, torch.compile, gradient checkpointing and FSDP1 put into a parameter's name."""


class WeightTransfer:
    """TRL's five methods, on the main process. `publisher` was started; it pauses the servers itself, and only while bits change."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    def init_weight_transfer(self) -> None:
        """Called once before the first `send_weights`."""
        logger.info("weights go out from version %d on", self._publisher.baseline.version)

    def pause(self) -> None:
        """Called before `send_weights`: sampling goes on while changes are found, coded and fetched."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Publish all tensors. Parameters that TRL leaves out because they are frozen stay as they are.

        Raises: as `Publisher.publish`, after the iterator has ended: the other ranks gather each tensor with this one.
        """
        try:
            self._publisher.publish(completed(iterator, self._publisher))
        finally:
            for _ in iterator:
                pass

    def resume(self) -> None:
        """Called after `send_weights`: the servers run again already."""

    def destroy(self) -> None:
        """Called at the end of training."""
        self._publisher.close()


class PublishSteps(TrainerCallback):
    """Publishes when training begins, as after a restart servers may hold something else, and after optimizer steps."""

    def __init__(self, publish: Callable[[Named], Published], every: int = 1) -> None:
        """`publish`: of a `Publisher`, or of a `RankPublisher` in a job of many ranks; `every`: so many steps a version."""
        self._publish, self._every = publish, every
        self.last: Published | None = None
        """The last version."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Before the first step."""
        self.last = self._publish(plain_names(given["model"].named_parameters()))

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """After the optimizer."""
        if state.global_step % self._every == 0:
            self.last = self._publish(plain_names(given["model"].named_parameters()))


def plain_names(named: Named) -> Iterator[tuple[str, Any]]:
    """Parameters under the names that the checkpoint has for them."""
    for name, parameter in named:
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "") if wrapper.startswith("_") else name.removeprefix(wrapper)
        yield name, parameter.detach()


def completed(named: Named, publisher: Publisher) -> Iterator[tuple[str, Any]]:
    """The tensors given, then those of the last version that were not, but for a tied head, which follows the embedding."""
    baseline = publisher.baseline
    left = dict(baseline.specs)
    for name, tensor in named:
        left.pop(name, None)
        yield name, tensor
    for name, spec in left.items():
        if name != TIED_HEAD:
            yield name, Whole(spec, baseline.bits(name))

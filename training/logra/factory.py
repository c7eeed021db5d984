"""LoGRA in the form that Hugging Face's Trainer takes: `optimizer_cls_and_kwargs=(LograFactory, {"rank": 64, ...})`."""

from typing import Any

from torch import nn

from groundhop.training.logra.optimizer import Logra
from groundhop.training.logra.settings import LograSettings


class LograFactory:
    """The Trainer calls `LograFactory()(model, **settings)` when it makes its optimizer. Set its `max_grad_norm` to 0: LoGRA clips."""

    def __call__(self, model: nn.Module, **settings: Any) -> Logra:
        """An optimizer with `settings`, the fields of `LograSettings`.

        Raises: ConfigError for a setting out of range or a model without targets; TypeError for a name that is no setting.
        """
        return Logra(model, LograSettings(**settings))

"""What happens to the parameters that no sketch trains: AdamW, or nothing."""

import torch
from torch import nn

from groundhop.training.logra.capture import Target
from groundhop.training.logra.settings import LograSettings


def adamw_for_others(model: nn.Module, targets: list[Target], settings: LograSettings) -> torch.optim.AdamW | None:
    """AdamW for all trainable parameters but the targets; None, and all of them frozen, where the settings say so."""
    taken = {id(target.weight) for target in targets}
    others = [weight for weight in model.parameters() if id(weight) not in taken]
    if settings.others == "frozen":
        for weight in others:
            weight.requires_grad_(False)
        return None
    trained = [weight for weight in others if weight.requires_grad]
    matrices, vectors = [one for one in trained if one.dim() >= 2], [one for one in trained if one.dim() < 2]
    decays = ((matrices, settings.others_weight_decay), (vectors, 0.0))
    groups = [{"params": part, "weight_decay": decay} for part, decay in decays if part]
    if not groups:
        return None
    return torch.optim.AdamW(groups, lr=settings.others_learning_rate, betas=settings.others_betas)

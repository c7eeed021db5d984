from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from groundhop.training.heads import log_probs_at, projected_only_at


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chosen_positions_equal_the_plain_way(tiny: Path, temperature: float) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    torch.manual_seed(0)
    ids = torch.randint(3, 300, (3, 17))
    attention = torch.ones_like(ids)
    attention[1, 12:] = 0
    targets = torch.rand(3, 17) < 0.3
    targets[:, 0] = False
    targets &= attention.bool()
    got, entropy = log_probs_at(model, ids, attention, targets, temperature=temperature)

    logits = model(input_ids=ids, attention_mask=attention).logits.float()[:, :-1] / temperature
    plain = torch.log_softmax(logits, -1)
    wanted = plain.gather(-1, ids[:, 1:, None]).squeeze(-1)[targets[:, 1:]]
    assert torch.allclose(got, wanted, atol=1e-6)
    assert torch.allclose(entropy, -(plain.exp() * plain).sum(-1)[targets[:, 1:]], atol=1e-5)


def test_the_model_is_whole_again_afterwards(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7]])
    log_probs_at(model, ids, torch.ones_like(ids), torch.tensor([[False, False, True]]))
    assert model(input_ids=ids).logits.shape[:2] == (1, 3)


def test_logits_at_chosen_positions_are_bit_for_bit_those_of_the_full_pass(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    torch.manual_seed(1)
    ids = torch.randint(3, 300, (2, 40))
    wanted = torch.rand(2, 40) < 0.4
    with projected_only_at(model, wanted):
        chosen = model(input_ids=ids).logits
    assert torch.equal(chosen, model(input_ids=ids).logits[wanted])

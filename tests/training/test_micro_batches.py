from typing import Any

import torch

from groundhop.training.policy_trainer import Batch, micro_batches


def batch(lengths: list[int], advantages: list[float], trained: list[int] | None = None) -> Batch:
    """Rows whose prompt has length 1 to 3 and whose completion has these lengths; ids name their row."""
    rows, width = len(lengths), max(lengths)
    prompt_lengths = torch.tensor([row % 3 + 1 for row in range(rows)])
    completion_mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    flags = torch.tensor(trained or [1] * rows)[:, None]
    return {
        "prompt_ids": torch.arange(rows)[:, None].expand(rows, 3),
        "prompt_mask": (torch.arange(3) >= 3 - prompt_lengths[:, None]).long(),
        "completion_ids": torch.arange(rows)[:, None].expand(rows, width),
        "completion_mask": completion_mask,
        "tool_mask": flags.expand(rows, width),
        "old_per_token_logps": torch.zeros(rows, width),
        "advantages": torch.tensor(advantages),
        "num_items_in_batch": torch.tensor(99),
    }


def rows_of(parts: list[Batch | None]) -> list[Any]:
    return [None if part is None else part["completion_ids"][:, 0].tolist() for part in parts]


def test_rows_without_a_gradient_are_left_out_and_like_lengths_lie_together() -> None:
    got = micro_batches(batch([4, 9, 2, 8, 3], [1.0, -1.0, 0.0, 0.5, -0.5]), 2, 3, keep_level=False)
    assert rows_of(got) == [[1, 3], [0, 4], None]


def test_rows_of_level_advantage_stay_where_they_have_a_kl_gradient() -> None:
    got = micro_batches(batch([4, 9, 2], [1.0, -1.0, 0.0]), 2, 3, keep_level=True)
    assert rows_of(got) == [[1, 0], [2], None]


def test_rows_without_a_trained_token_are_left_out_even_then() -> None:
    assert rows_of(micro_batches(batch([4, 9], [1.0, -1.0], [0, 0]), 2, 1, keep_level=True)) == [None]


def test_each_micro_batch_is_as_wide_as_its_longest_row() -> None:
    one, two = micro_batches(batch([4, 9, 2, 8], [1.0, -1.0, 1.0, 0.5]), 2, 2, keep_level=False)
    assert one is not None and two is not None
    assert (one["completion_ids"].shape[1], two["completion_ids"].shape[1]) == (9, 4)
    assert (one["prompt_ids"].shape[1], two["prompt_ids"].shape[1]) == (2, 3)
    assert two["old_per_token_logps"].shape == two["tool_mask"].shape == two["completion_mask"].shape
    assert int(one["num_items_in_batch"]) == 99

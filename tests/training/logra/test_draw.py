"""Projections drawn together are those drawn alone."""

import torch

from groundhop.training.logra.draw import draw_signs, draw_together
from groundhop.training.logra.signs import projection_seed, sign_matrix


def test_all_projections_at_once_equal_each_drawn_alone_in_both_ways() -> None:
    seeds, columns = [projection_seed(42, 3, name) for name in "abc"], [5, 129, 64]
    alone = [torch.from_numpy(sign_matrix(seed, 7, width)) for seed, width in zip(seeds, columns, strict=True)]
    for draw in (draw_signs, draw_together):
        found = draw(seeds, 7, columns, torch.device("cpu"))
        assert [one.dtype for one in found] == [torch.int8] * 3
        assert all(map(torch.equal, found, alone))

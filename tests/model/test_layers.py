"""Steps of layers over parts of wider rows."""

from __future__ import annotations

import pytest
import torch

from freight.model import layers


@pytest.mark.parametrize(("first", "width"), [(0, 8), (8, 8), (0, 16), (4, 8), (0, 6)])
def test_rows_are_added_to_where_they_lie(first: int, width: int) -> None:
    """Whether rows are a whole part of wider ones, all of them, or something else."""
    wide = torch.randn(7, 16, generator=torch.Generator().manual_seed(0))
    before = wide.clone()
    ids, update = torch.tensor([6, 0, 3]), torch.ones(3, width)
    rows, numbers = layers._side_by_side(wide[:, first : first + width], ids)
    rows.index_add_(0, numbers, update)
    before[ids, first : first + width] += 1
    assert torch.equal(wide, before)

"""Which products the loops over pairs of bfloat16 take, with whatever registers there are."""

from __future__ import annotations

import pytest
import torch

from freight.kernels import pairs
from freight.kernels.product import Product
from freight.kernels.threads import find_loops


def test_any_number_of_tokens_is_for_the_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch makes code for each number of tokens that it meets and keeps the last few: where rows
    are of many lengths it would be making some all the time."""
    loops = find_loops()
    if loops is None or loops.pairs is None:
        pytest.skip("the processor has no instruction for pairs")
    monkeypatch.setattr(pairs, "_are_faster", lambda tokens, has_plain: True)
    rows = torch.zeros(2048, 5632, dtype=torch.bfloat16)
    for count in (1, 16, 17, 256, 257, 300, 447, 448, 2049):
        x = torch.zeros(count, 5632, dtype=torch.bfloat16)
        one = [Product(rows=rows, out=torch.zeros(count, 2048, dtype=torch.bfloat16))]
        assert pairs.plain_pairs_are_better(x, one) or pairs.pairs_are_better(x, one), count
    assert pairs.pairs_are_always_better({2048, 5632, 14336})


def test_loops_for_any_number_of_tokens_are_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One trial that came out badly decides nothing where loops take all numbers of tokens; where
    they do not, each number of tokens is for the faster way."""
    loops = find_loops()
    if loops is None or loops.pairs is None:
        pytest.skip("the processor has no instruction for pairs")
    slower = {2: 0.8, 8: 1.3, 64: 1.4, 512: 1.0}
    monkeypatch.setattr(pairs, "_times", lambda tokens: (1.0, 5.0, slower[tokens]))
    chosen = [pairs._are_faster(tokens, has_plain=True) for tokens in (2, 12, 100, 600)]
    if loops.tile_blocks is None:
        assert chosen == [True, False, False, True]
    else:
        assert all(chosen)
        slower[512] = 1.6
        assert not pairs._are_faster(2, has_plain=True)
    assert pairs._are_faster(100, has_plain=False)

"""Random rows on their way to another device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from freight.runtime import loaders
from freight.runtime.loaders import BOUNCE_BYTES, DummyWeights


def test_random_rows_for_another_device_pass_through_little_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No budget has room for a whole matrix on the way. The "meta" device stands for another."""
    made: list[tuple[int, torch.Tensor]] = []
    dummy_rows = loaders.dummy_rows

    def record(name: str, first_row: int, seed: int, out: Any, kept: torch.dtype) -> None:
        dummy_rows(name, first_row, seed, out, kept)
        made.append((first_row, out))

    monkeypatch.setattr(loaders, "dummy_rows", record)
    out = torch.empty(5000, 1024, device="meta")
    DummyWeights(3, torch.bfloat16, tied_embeddings=False).fill("layers.0.mlp.up", 7, out)
    assert all(rows.nbytes <= BOUNCE_BYTES for _, rows in made)
    assert [first for first, _ in made] == [7 + i * 2048 for i in range(3)]
    whole = torch.empty(5000, 1024)
    dummy_rows("layers.0.mlp.up", 7, 3, whole, torch.bfloat16)
    assert torch.equal(torch.cat([rows for _, rows in made]), whole)

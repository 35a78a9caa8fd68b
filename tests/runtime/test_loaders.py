"""Random rows on their way to another device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from freight.kernels.grouped import quantise
from freight.model.number_format import Grouped
from freight.model.sources import TensorSource
from freight.runtime import loaders
from freight.runtime.loaders import BOUNCE_BYTES, DummyWeights

NAME = "layers.0.mlp.up"


def _dice(dtype: str) -> DummyWeights:
    own = TensorSource(path=Path("dummy"), offset=0, num_bytes=0, dtype=dtype, shape=(5000, 1024))
    return DummyWeights(
        3,
        torch.bfloat16,
        tied_embeddings=False,
        sources={NAME: own},
        device=torch.device("cpu"),
    )


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
    _dice("bfloat16").fill(NAME, 7, out)
    assert all(rows.nbytes <= BOUNCE_BYTES for _, rows in made)
    assert [first for first, _ in made] == [7 + i * 2048 for i in range(3)]
    whole = torch.empty(5000, 1024)
    dummy_rows("layers.0.mlp.up", 7, 3, whole, torch.bfloat16)
    assert torch.equal(torch.cat([rows for _, rows in made]), whole)


def test_compressed_random_rows_are_random_rows_compressed() -> None:
    own = Grouped(bits=4, group_size=64)
    out = torch.empty(3000, own.row_bytes(1024), dtype=torch.uint8)
    _dice(own.name).fill(NAME, 11, out)
    plain = torch.empty(3000, 1024, dtype=torch.bfloat16)
    loaders.dummy_rows(NAME, 11, 3, plain)
    assert torch.equal(out, quantise(plain, own))

"""The residual stream split over tiers, against the same tokens in one tensor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.memory.activations import Activations, TokenCut, gather, scatter, slot_bytes
from freight.memory.disk import BLOCK, Traffic, create_scratch
from freight.memory.tier import host_arena
from freight.memory.transfer import copy_bytes

COLUMNS, MOST, BLOCKS = 12, 90, 3
ROW_BYTES = COLUMNS * 4
STRIDE = 2 * BLOCK


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("scratch")


def make(directory: Path, has_disk: bool = True) -> tuple[Activations, torch.Tensor]:
    arena = host_arena(2 * BLOCKS * STRIDE + 2 * STRIDE)
    file = create_scratch(directory, BLOCKS * STRIDE, Traffic()) if has_disk else None
    activations = Activations(
        resident=arena.take(BLOCKS * STRIDE, "near").view(BLOCKS, STRIDE),
        cpu=arena.take(BLOCKS * STRIDE, "host").view(BLOCKS, STRIDE),
        file=file,
        disk_stride=STRIDE,
        num_columns=COLUMNS,
        dtype=torch.float32,
    )
    return activations, arena.take(2 * STRIDE, "slot")


cuts = st.builds(
    TokenCut, resident=st.integers(0, 40), cpu=st.integers(0, 25), disk=st.integers(0, 25)
)


@settings(deadline=None, max_examples=40)
@given(cut=cuts, data=st.data())
def test_tokens_go_home_and_come_back(cut: TokenCut, data: st.DataObject, directory: Path) -> None:
    activations, slot = make(directory)
    expected = {k: torch.randn(cut.total, COLUMNS) for k in range(BLOCKS)}
    for k, x in expected.items():
        scatter(activations.parts(k, cut, slot), 0, x)
        copy_bytes(*activations.pair_out(k, cut, slot))
        activations.write_disk(k, cut, slot)
    for k, x in expected.items():
        slot.fill_(255)
        copy_bytes(*activations.pair_in(k, cut, slot))
        activations.read_disk(k, cut, slot)
        start = data.draw(st.integers(0, cut.total))
        out = torch.empty(data.draw(st.integers(0, cut.total - start)), COLUMNS)
        gather(activations.parts(k, cut, slot), start, out)
        assert torch.equal(out, x[start : start + out.shape[0]])
    assert slot_bytes(cut, ROW_BYTES) <= slot.numel()


def test_a_tier_without_tokens_needs_no_memory() -> None:
    """Empty stretches of micro-batches after the first lie at any byte: nothing may look there."""
    empty = torch.zeros(BLOCKS, 0, dtype=torch.uint8)
    activations = Activations(
        resident=empty,
        cpu=empty,
        file=None,
        disk_stride=0,
        num_columns=COLUMNS,
        dtype=torch.float32,
    )
    slot = torch.zeros(BLOCK, dtype=torch.uint8)
    cut = TokenCut(resident=0, cpu=5, disk=0)
    parts = activations.parts(1, cut, slot)
    assert [(first, rows.shape) for first, rows in parts] == [(0, (5, COLUMNS))]

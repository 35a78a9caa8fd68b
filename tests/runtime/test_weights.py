"""Weights as they come through the ring, wherever in it a unit begins.

Held against the checkpoint as safetensors reads it: the parts that a unit is computed with are its
matrices, row for row, also where they lie across the ring's end.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from freight.memory.disk import Traffic
from freight.memory.tier import host_arena
from freight.memory.transfer import host_view
from freight.plan.policy import Policy
from freight.plan.ring import size_ring
from freight.quantities import MIB
from freight.runtime.loaders import BOUNCE_BYTES, CheckpointFiles
from freight.runtime.weights import WeightStore

from ..plan.test_layout import DTYPES, KINDS, Checkpoint, lay, load, policies

MANY_ROWS: dict[str, Any] = {"vocab_size": 1100, "hidden_size": 60, "head_dim": 18}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    kinds = {**KINDS, "many rows": MANY_ROWS}
    return {
        kind: load(tmp_path_factory.mktemp("model"), changes) for kind, changes in kinds.items()
    }


@given(
    kind=st.sampled_from([*KINDS, "many rows"]),
    policy=policies(),
    dtype=st.sampled_from([*DTYPES]),
    more_blocks=st.integers(0, 2),
    start=st.integers(0, 99),
)
def test_a_unit_is_its_matrices_wherever_it_begins(
    kind: str,
    policy: Policy,
    dtype: str,
    more_blocks: int,
    start: int,
    checkpoints: dict[str, Checkpoint],
) -> None:
    checkpoint = checkpoints[kind]
    layout = lay(checkpoint, policy, dtype)
    near = host_arena(64 * MIB)
    near.take(near.num_bytes, "junk").fill_(255)
    near.rewind()
    bounce = host_arena(BOUNCE_BYTES).take(BOUNCE_BYTES, "bounce")
    staging = host_arena(policy.piece_bytes).take(policy.piece_bytes, "staging")
    files = CheckpointFiles(checkpoint.sources, Traffic(), bounce)
    ring = size_ring(layout, policy.piece_bytes)
    store = WeightStore(
        layout,
        home=near,
        near=near,
        host=host_arena(4 * MIB),
        ring=replace(ring, num_blocks=ring.num_blocks + more_blocks),
        loader=files,
        files=files,
    )
    for number, unit in enumerate(layout.all_units):
        slot = (start + number) % max(1, store.ring.num_blocks)
        for index, piece in enumerate(unit.pieces):
            if piece.path is not None and policy.compute_tier == "cpu":
                store.read_into_slots([(piece, slot)])
                continue
            source = staging[: piece.num_bytes]
            if piece.path is None:
                source = store.host_stretch(number, store.piece(number, index))
            else:
                store.read(piece, [host_view(source)])
            for part, target in store.bring_into_slot(source, piece, slot):
                target.copy_(part)
        store.decode(number, slot)
        for name, parts in store.parts(number, slot).items():
            weight = next(own for own in unit.unit.weights if own.name == name)
            if weight.is_matrix:
                found = torch.cat([rows for _, rows in sorted(parts, key=lambda own: own[0])])
                rows = slice(weight.first_row, weight.first_row + weight.num_rows)
                assert torch.equal(found, checkpoint.matrix(name)[rows].to(DTYPES[dtype]))
    files.close()

"""Angles from a table are those that are made anew, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from freight.model.batch import MicroBatch, RowKey, RowSpan
from freight.model.config import parse_config
from freight.runtime import angles as angles_module
from freight.runtime.angles import RotaryAngles

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 4096,
}
SCALINGS: dict[str, Any] = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}
CPU = torch.device("cpu")


def batch_of(*rows: tuple[int, int]) -> MicroBatch:
    """Rows with so many tokens before, and so many new ones."""
    spans, start = [], 0
    for number, (kv_len, num_new) in enumerate(rows):
        spans.append(
            RowSpan(
                row=RowKey(number),
                start=start,
                num_new=num_new,
                kv_len=kv_len,
                logit_positions=(),
                prompt_len=kv_len + num_new,
            )
        )
        start += num_new
    return MicroBatch(index=0, rows=tuple(spans), token_ids=[0] * start)


def positions_of(batch: MicroBatch) -> torch.Tensor:
    ranges = [np.arange(span.kv_len, span.total_len) for span in batch.rows]
    return torch.from_numpy(np.concatenate(ranges))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_table_has_what_would_be_made(
    scaling: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of longer and longer rows, the last behind the end of any table."""
    monkeypatch.setattr(angles_module, "_MOST_BYTES", 1000 * 64 * dtype.itemsize)
    config = parse_config({**CONFIG, "rope_scaling": SCALINGS[scaling]})
    (rope,) = config.rotations
    kept = RotaryAngles(config, dtype, CPU)
    for batch in (
        batch_of((0, 7), (3, 1)),
        batch_of((250, 1), (0, 300), (17, 1)),
        batch_of((999, 1)),
        batch_of((999, 2), (1500, 1)),
    ):
        found = kept.of(batch, positions_of(batch), rope)
        wanted = RotaryAngles(config, dtype, CPU)._made(batch, rope)
        assert torch.equal(found.cos, wanted.cos) and torch.equal(found.sin, wanted.sin)
    lengths = {len(table.cos) for table in kept._tables.values()}
    assert lengths == (set() if scaling == "dynamic" else {1000})

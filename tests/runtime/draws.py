"""How rows enter sweeps, drawn at random: options of a run, and changes of its policy."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

__all__ = ["draw_entering"]


def draw_entering(data: st.DataObject) -> tuple[dict[str, Any], dict[str, Any]]:
    admission = data.draw(st.sampled_from(["zigzag", "diagonal", "refill", "refill"]))
    options = {
        "admission": admission,
        "micro_batch_size": data.draw(st.integers(1, 6)),
        "num_micro_batches": data.draw(st.integers(1, 3)),
        "batch_tokens": data.draw(st.sampled_from([None, 1, 5, 17, 40])),
    }
    changes: dict[str, Any] = {"entry_pace": data.draw(st.sampled_from([1.0, 2.0, 1000.0]))}
    if admission != "zigzag":
        changes["row_tokens"] = data.draw(st.sampled_from([0, 1, 20, 40]))
    if chunk := data.draw(st.sampled_from([0, 1, 7])):
        changes["chunk_tokens"] = chunk
    return options, changes

"""The same layouts on processes that send each other tensors: gloo on this machine."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from .processes import run_ranks


def test_every_layout_on_eight_processes(tmp_path: Path) -> None:
    """What each rank has is right, or it would have failed; all together have sent what the algebra
    counts, to the byte."""
    found = run_ranks("layouts", 8, tmp_path)
    assert len(found[0]) >= 50
    for ranks in zip(*found, strict=True):
        total: Counter = Counter()
        for _, own in ranks:
            total.update(own)
        assert not any(total.values()), (ranks[0][0], total)

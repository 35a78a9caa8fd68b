"""What is asked of a CUDA device, where there is none: its questions are answered by the test."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from freight.quantities import GIB
from freight.runtime.device import ComputeDevice

CUDA = ComputeDevice(kind="cuda", torch_device=torch.device("cuda", 0))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked, in order; memory that torch keeps is free once it has been given back."""
    steps: list[str] = []

    def empty_cache() -> None:
        steps.append("empty cache")

    def mem_get_info(device: Any) -> tuple[int, int]:
        steps.append("device memory")
        return (70 if "empty cache" in steps else 7) * GIB, 80 * GIB

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    return steps


def test_memory_that_an_earlier_engine_let_go_of_is_free(steps: list[str]) -> None:
    assert CUDA.room_bytes(None) > 60 * GIB
    assert CUDA.room_bytes(60 * GIB) > 59 * GIB

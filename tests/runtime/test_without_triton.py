"""Where there is no triton, or no device, nothing is tried and the references work."""

from __future__ import annotations

import pytest
import torch

from freight.kernels.cuda.choice import NO_KERNELS, Kernels, kernels_of, use_kernels
from freight.runtime.kernel_choice import choose_kernels

LOAD = "freight.runtime.kernel_choice.load_kernels"


def test_a_device_without_triton_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier run used there is not used any more."""
    monkeypatch.setattr(LOAD, lambda: None)
    said: list[str] = []
    device = torch.device("cuda", 0)
    use_kernels(device, Kernels(attend=lambda *_, **__: None))
    choose_kernels(device, torch.float32, weights=[], steps=[], say=said.append)
    assert kernels_of(device) == NO_KERNELS
    assert len(said) == 1 and said[0].startswith("triton is not installed")


def test_a_cpu_asks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOAD, lambda: pytest.fail("triton was loaded"))
    cpu = torch.device("cpu")
    choose_kernels(cpu, torch.float32, weights=[], steps=[], say=pytest.fail)
    assert kernels_of(cpu) == NO_KERNELS

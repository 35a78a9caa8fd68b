"""Arenas: stretches that never overlap, aligned, within a budget that is kept."""

from __future__ import annotations

import resource
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freight.errors import BudgetError, DeviceError
from freight.memory.process import process_bytes
from freight.memory.tier import device_arena, host_arena
from freight.quantities import MIB, align_up

requests = st.lists(
    st.tuples(st.integers(0, 20_000), st.sampled_from(["weights", "KV cache"])), max_size=12
)


@settings(deadline=None, max_examples=40)
@given(requests=requests)
def test_stretches(requests: list[tuple[int, str]]) -> None:
    arena = host_arena(1 * MIB)
    usage = {"weights": 0, "KV cache": 0}
    taken = []
    for size, purpose in requests:
        view = arena.take(size, purpose)
        assert view.dtype == torch.uint8 and view.shape == (size,)
        taken.append(view)
        usage[purpose] += align_up(size, 4096)
    for mark, view in enumerate(taken):
        assert not view.numel() or view.data_ptr() % 4096 == 0
        view.fill_(mark)
    assert all((view == mark).all() for mark, view in enumerate(taken))
    assert arena.usage == {
        purpose: size for purpose, size in usage.items() if purpose in arena.usage
    }
    assert sum(arena.usage.values()) <= arena.num_bytes


def test_the_budget_is_kept() -> None:
    arena = host_arena(2 * MIB)
    arena.take(2 * MIB - 4096, "weights")
    with pytest.raises(AssertionError, match=r"KV cache needs 8.00 KiB, 4.00 KiB of 2.00 MiB"):
        arena.take(4097, "KV cache")
    arena.take(4096, "KV cache")
    with pytest.raises(AssertionError):
        arena.take(1, "KV cache")


def test_memory_is_there_before_it_is_used() -> None:
    """Touched when it is made: writing to it later faults no page in."""
    arena = host_arena(64 * MIB)
    view = arena.take(64 * MIB, "weights")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    view.fill_(1)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 64 * MIB // 4096 // 20


def test_what_an_arena_takes_shows_in_the_process() -> None:
    before = process_bytes()
    arena = host_arena(96 * MIB)
    assert 90 * MIB < process_bytes() - before < 110 * MIB
    assert arena.num_bytes == 96 * MIB


def test_a_device_s_arena_on_the_host() -> None:
    arena = device_arena(8192, torch.device("cpu"))
    assert arena.take(8192, "weights").shape == (8192,)
    with pytest.raises(AssertionError):
        arena.take(1, "weights")


def test_memory_that_the_system_refuses() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, hard))
    try:
        with pytest.raises(BudgetError, match=r"2048.00 GiB of memory.*--cpu-memory"):
            host_arena(2 << 40)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_memory_that_the_driver_will_not_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_error(status: int) -> None:
        raise RuntimeError(f"out of memory ({status})")

    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    with pytest.raises(DeviceError, match=r"2.00 MiB.*pinned.*out of memory \(2\)"):
        host_arena(2 * MIB, pinned=True)


def test_memory_that_the_device_no_longer_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(BudgetError, match=r"8.00 KiB of the device.*--gpu-memory"):
        device_arena(8192, torch.device("cuda", 0))

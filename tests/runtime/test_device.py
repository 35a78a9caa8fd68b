"""What is asked of a CUDA device, where there is none: its questions are answered by the test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from freight.errors import InputError
from freight.model.checkpoint import imagined_sources
from freight.model.config import read_config
from freight.plan.workload import Workload
from freight.quantities import GIB
from freight.runtime import planning
from freight.runtime.device import ComputeDevice, choose_dtype
from freight.runtime.options import EngineOptions

from . import tiny

CUDA = ComputeDevice(kind="cuda", torch_device=torch.device("cuda", 0))
WORKLOAD = Workload(
    num_rows=1,
    max_prompt_tokens=1,
    max_new_tokens=1,
    max_total_tokens=2,
    total_prompt_tokens=1,
    total_new_tokens=1,
)


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


def test_the_context_is_made_before_the_host_is_measured(
    steps: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    room_on_cpu = planning.room_on_cpu

    def measure(budget_bytes: int | None, held_bytes: int) -> tuple[int, int]:
        steps.append("host memory")
        return room_on_cpu(budget_bytes, held_bytes)

    monkeypatch.setattr(planning, "room_on_cpu", measure)
    LlamaConfig(**tiny.SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    config = read_config(tmp_path)
    sources = imagined_sources(config, "float32")
    planning.plan_run(config, sources, "float32", CUDA, EngineOptions(), WORKLOAD)
    assert steps == ["empty cache", "device memory", "host memory"]


@pytest.mark.parametrize(("native", "chosen"), [(True, "bfloat16"), (False, "float16")])
def test_emulated_bfloat16_is_not_chosen(
    native: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_supported(including_emulation: bool = True) -> bool:
        return native or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
    assert choose_dtype("auto", CUDA) == chosen


def test_float16_is_for_devices() -> None:
    assert choose_dtype("float16", CUDA) == "float16"
    cpu = ComputeDevice(kind="cpu", torch_device=torch.device("cpu"))
    with pytest.raises(InputError, match="slow at it"):
        choose_dtype("float16", cpu)

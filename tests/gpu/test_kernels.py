"""Runs on a CUDA device with Triton's kernels and with torch alone: the same answers.

Skipped where there is none. The kernels themselves are tested in ``tests/kernels``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig

from freight.kernels.cuda.choice import NO_KERNELS, kernels_of, use_kernels
from freight.kernels.grouped import quantise
from freight.model.number_format import Grouped
from freight.runtime import engine as engine_module
from freight.runtime.engine import build_engine
from freight.runtime.options import EngineOptions

from ..runtime import tiny
from .test_cuda import BLOCK, PLACEMENTS, greedy_on_cuda

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

STEPS = 8
DEVICE = torch.device("cuda", 0)
SIZES: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
FORMATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "4 bits": {"weight_bits": 4, "kv_bits": 4},
    "8 bits": {"weight_bits": 8, "kv_bits": 8, "group_size": 32},
    "sparse": {"kv_bits": 4, "sparse_attention": 0.3},
}


def without_kernels(*_: Any, **__: Any) -> None:
    use_kernels(DEVICE, NO_KERNELS)


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("placement", ["all on the gpu", "an odd mix", "attention on both"])
def test_same_tokens_with_and_without(
    formats: str, placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.make_model(tmp_path, **SIZES)
    prompts = tiny.prompts(7, 40)
    options = {**BLOCK, **PLACEMENTS[placement], **FORMATS[formats]}
    options |= {"compressed_dir": tmp_path / "kept"}
    with tiny.engine(tmp_path, prompts, STEPS, **options) as engine:
        assert kernels_of(DEVICE).attend is not None
        found = tiny.run(engine, prompts, STEPS)
    monkeypatch.setattr(engine_module, "choose_kernels", without_kernels)
    with tiny.engine(tmp_path, prompts, STEPS, **options) as engine:
        assert kernels_of(DEVICE) == NO_KERNELS
        assert tiny.run(engine, prompts, STEPS) == found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("formats", FORMATS)
def test_every_kernel_works_here(formats: str, dtype: str, tmp_path: Path) -> None:
    """Nothing is left out, so nothing is said."""
    tiny.make_model(tmp_path, **SIZES)
    prompts, said = tiny.prompts(3, 20), list[str]()
    options = {**BLOCK, **PLACEMENTS["all on the gpu"], **FORMATS[formats], "dtype": dtype}
    options |= {"compressed_dir": tmp_path / "kept"}
    engine = build_engine(
        tmp_path,
        options=EngineOptions(**options),
        workload=tiny.workload(prompts, STEPS),
        say=said.append,
    )
    engine.close()
    assert not [line for line in said if "Triton" in line or "triton" in line]


@pytest.mark.parametrize("placement", ["all on the gpu", "all on disk", "an odd mix in turn"])
def test_experts_are_asked_for_when_their_router_has_run(tmp_path: Path, placement: str) -> None:
    config = MixtralConfig(**tiny.SIZES, num_local_experts=6, num_experts_per_tok=2)
    model = tiny.make_model(tmp_path, config=config).cuda()
    prompts = tiny.prompts(7, 40)
    with tiny.engine(tmp_path, prompts, STEPS, **{**BLOCK, **PLACEMENTS[placement]}) as engine:
        found = tiny.run(engine, prompts, STEPS)
    assert found == [greedy_on_cuda(model, prompt, STEPS) for prompt in prompts]


def test_what_cuda_compresses_is_what_a_cpu_does() -> None:
    """A row's keys may be made on the device and attended on the CPU, or the other way."""
    numbers = torch.randn(1000, 128) * torch.logspace(-9, 6, 1000)[:, None]
    for bits in (3, 4, 8):
        own = Grouped(bits=bits, group_size=64)
        assert torch.equal(quantise(numbers.cuda(), own).cpu(), quantise(numbers, own))

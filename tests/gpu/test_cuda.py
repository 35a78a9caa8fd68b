"""On a CUDA device: the same tokens as transformers on it, wherever things lie, within the budget.

Skipped where there is none. ``make gpu`` runs these from the source tree.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel

from freight.errors import BudgetError
from freight.kernels.cuda.choice import kernels_of
from freight.model.config import read_config
from freight.quantities import MIB
from freight.runtime.beside_probe import of_both_ways
from freight.runtime.device import find_device, room_on_cpu
from freight.runtime.link_probe import measure_link_both_ways, measure_links

from ..runtime import tiny
from ..runtime.classics import CLASSICS
from ..runtime.test_engine_parity import CONFIGS, FAMILIES
from ..runtime.test_engine_recurrence import CONFIGS as RECURRENT
from ..runtime.test_engine_recurrence import without_pages
from ..runtime.test_engine_windows import MODELS as WINDOWED

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

STEPS = 8
ODD = (37.0, 21.0, 42.0)
PLACEMENTS: dict[str, dict[str, Any]] = {
    "all on the gpu": {"weights_percent": (100.0, 0.0, 0.0), "kv_percent": (100.0, 0.0, 0.0)},
    "all on the cpu": {
        "weights_percent": (0.0, 100.0, 0.0),
        "kv_percent": (0.0, 100.0, 0.0),
        "activations_percent": (0.0, 100.0, 0.0),
    },
    "all on disk": {
        "weights_percent": (0.0, 0.0, 100.0),
        "kv_percent": (0.0, 0.0, 100.0),
        "activations_percent": (0.0, 0.0, 100.0),
    },
    "an odd mix": {"weights_percent": ODD, "kv_percent": ODD, "activations_percent": ODD},
    "an odd mix in turn": {
        "weights_percent": ODD,
        "kv_percent": ODD,
        "activations_percent": ODD,
        "overlap": False,
    },
    "attention on the cpu": {
        "weights_percent": (100.0, 0.0, 0.0),
        "kv_percent": (0.0, 100.0, 0.0),
        "cpu_attention_percent": 100.0,
    },
    "attention on both": {
        "weights_percent": ODD,
        "kv_percent": (0.0, 50.0, 50.0),
        "cpu_attention_percent": 60.0,
        "micro_batch_size": 5,
    },
    "keys computed again": {
        "weights_percent": ODD,
        "kv_percent": (20.0, 40.0, 40.0),
        "cpu_attention_percent": 0.0,
        "recompute_percent": 50.0,
    },
    "as planned": {"micro_batch_size": None, "num_micro_batches": None},
}
BLOCK = {"device": "cuda", "micro_batch_size": 3, "num_micro_batches": 2}
LARGE = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True)
def empty_device() -> Iterator[None]:
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@torch.inference_mode()
def logits_on_cuda(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """[T, V] after each of the tokens."""
    return model(torch.tensor([list(ids)], device="cuda")).logits[0].float()


def greedy_on_cuda(model: PreTrainedModel, prompt: Sequence[int], steps: int) -> list[int]:
    ids = list(prompt)
    for _ in range(steps):
        ids.append(int(logits_on_cuda(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_float32_gives_the_tokens_of_transformers(tmp_path: Path, placement: str) -> None:
    model = tiny.make_model(tmp_path, head_dim=32).cuda()
    prompts = tiny.prompts(7, 40)
    with tiny.engine(tmp_path, prompts, STEPS, **{**BLOCK, **PLACEMENTS[placement]}) as engine:
        found = tiny.run(engine, prompts, STEPS)
    assert found == [greedy_on_cuda(model, prompt, STEPS) for prompt in prompts]


NEW_MEANINGS = {"gpt-oss, all in sight", "minimax m2"}
"""Whose configurations older releases of transformers read otherwise, on any device."""


@pytest.mark.parametrize("name", [*FAMILIES, *CLASSICS, "mistral, window", "qwen2, window layers"])
def test_families_give_the_tokens_of_transformers(tmp_path: Path, name: str) -> None:
    if name in NEW_MEANINGS and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("transformers 5.17 leaves out a limit, and how much of a head is rotated")
    model = tiny.make_model(tmp_path, config=CONFIGS[name]).cuda()
    prompts = tiny.prompts(5, 30)
    options: dict[str, Any] = {**BLOCK, **PLACEMENTS["an odd mix"]}
    if read_config(tmp_path).sharing is not None:
        options = tiny.with_keys_near(options)
    with tiny.engine(tmp_path, prompts, STEPS, **options) as engine:
        found = tiny.run(engine, prompts, STEPS)
    assert found == [greedy_on_cuda(model, prompt, STEPS) for prompt in prompts]


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("placement", ["all on the gpu", "an odd mix"])
def test_rows_with_states_give_the_tokens_of_transformers(
    tmp_path: Path, placement: str, name: str
) -> None:
    model = tiny.make_model(tmp_path, config=RECURRENT[name]).cuda()
    prompts = tiny.prompts(7, 80)
    options = {**BLOCK, **PLACEMENTS[placement], "cpu_attention_percent": 0.0}
    with tiny.engine(tmp_path, prompts, STEPS, **options) as engine:
        if "lfm2" not in name and not without_pages(name):
            assert kernels_of(torch.device("cuda", 0)).recur is not None
        if not without_pages(name):
            assert kernels_of(torch.device("cuda", 0)).convolve is not None
        found = tiny.run(engine, prompts, STEPS)
    assert found == [greedy_on_cuda(model, prompt, STEPS) for prompt in prompts]


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("placement", ["all on the gpu", "all on disk", "attention on the cpu"])
def test_windows_roll_and_give_the_tokens_of_transformers(
    tmp_path: Path, placement: str, name: str
) -> None:
    model = tiny.make_model(tmp_path, config=WINDOWED[name]).cuda()
    prompts = tiny.prompts(7, 80)
    options = {**BLOCK, **PLACEMENTS[placement]}
    with tiny.engine(tmp_path, prompts, STEPS, **options) as engine:
        assert engine.plan.geometry.rolls
        found = tiny.run(engine, prompts, STEPS)
    assert found == [greedy_on_cuda(model, prompt, STEPS) for prompt in prompts]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_16_bits_choose_no_worse_token(tmp_path: Path, placement: str, dtype: str) -> None:
    """Rounding may break ties otherwise: each token is one that transformers in the same type puts
    within rounding of its best, given the same tokens before."""
    kept = getattr(torch, dtype)
    model = tiny.make_model(tmp_path, head_dim=32, dtype=kept).to(kept).cuda()
    prompts = tiny.prompts(7, 40)
    options = {**BLOCK, **PLACEMENTS[placement], "dtype": dtype}
    with tiny.engine(tmp_path, prompts, STEPS, **options) as engine:
        found = tiny.run(engine, prompts, STEPS)
    num_same = 0
    for prompt, ids in zip(prompts, found, strict=True):
        logits = logits_on_cuda(model, [*prompt, *ids])[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(ids, device="cuda")[:, None])[:, 0]
        best = logits.max(dim=1).values
        scale = logits.abs().amax(dim=1)
        assert ((best - chosen) <= scale * 2**-5).all()
        num_same += int((best == chosen).sum())
    assert num_same >= 0.9 * STEPS * len(prompts)


def test_bfloat16_is_the_same_over_placements_of_weights(tmp_path: Path) -> None:
    """Where bytes lie changes no arithmetic: the same shapes give the same bits."""
    tiny.make_model(tmp_path, dtype=torch.bfloat16)
    prompts = tiny.prompts(7, 40)
    found = []
    for shares in ((100.0, 0.0, 0.0), (0.0, 100.0, 0.0), (0.0, 0.0, 100.0)):
        options = {**BLOCK, "dtype": "bfloat16", "weights_percent": shares}
        options["kv_percent"] = (100.0, 0.0, 0.0)
        with tiny.engine(tmp_path, prompts, STEPS, **options) as engine:
            found.append(tiny.run(engine, prompts, STEPS))
    assert found[0] == found[1] == found[2]


def test_sampling_is_fixed_by_the_seed(tmp_path: Path) -> None:
    tiny.make_model(tmp_path)
    prompts = tiny.prompts(6, 20)
    drawn = []
    for placement in ("all on the gpu", "an odd mix"):
        with tiny.engine(tmp_path, prompts, STEPS, **{**BLOCK, **PLACEMENTS[placement]}) as engine:
            drawn.append(tiny.run(engine, prompts, STEPS, temperature=1.0, top_p=0.9, seed=5))
    assert drawn[0] == drawn[1]


def test_the_device_gives_no_more_than_its_budget(tmp_path: Path) -> None:
    """Weights of about 1.2 GiB under a cap of 1.5 GiB, of which the context takes its part: all
    that the driver counts for this process."""
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    budget = 1536 * MIB
    torch.mm(torch.ones(64, 64, device="cuda"), torch.ones(64, 64, device="cuda"))
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    free, total = torch.cuda.mem_get_info()
    context = total - free - torch.cuda.memory_reserved()
    if context > 768 * MIB:
        pytest.skip("other processes use the device, too: what of it this one takes is not known")
    prompts = [[1 + i] * 64 for i in range(16)]
    options = {"device": "cuda", "dtype": "bfloat16", "dummy_seed": 0, "gpu_memory_bytes": budget}
    with tiny.engine(tmp_path, prompts, 4, **options) as engine:
        held = engine.plan.layout.tier_bytes()
        assert held["cpu"] + held["disk"] > 0
        tiny.run(engine, prompts, 4)
        free, total = torch.cuda.mem_get_info()
    assert torch.cuda.max_memory_allocated() <= budget
    given_back = torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()
    assert total - free + given_back <= budget


def test_what_does_not_fit_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    torch.cuda.init()
    before = torch.cuda.memory_allocated()
    options = {"device": "cuda", "dtype": "bfloat16", "dummy_seed": 0}
    options |= {"gpu_memory_bytes": 1100 * MIB, "weights_percent": (100.0, 0.0, 0.0)}
    with pytest.raises(BudgetError, match="on gpu"), tiny.engine(tmp_path, [[1]], 4, **options):
        pass
    assert torch.cuda.memory_allocated() == before


def test_pinned_memory_is_exactly_what_was_planned(tmp_path: Path) -> None:
    tiny.make_model(tmp_path)
    prompts = tiny.prompts(6, 20)
    _, own = room_on_cpu(None)
    budget = own + 512 * MIB
    options = {**BLOCK, **PLACEMENTS["all on the cpu"], "cpu_memory_bytes": budget}
    with tiny.engine(tmp_path, prompts, STEPS, **options) as engine:
        host = engine.placement.host
        assert host._buffer.is_pinned()
        assert sum(host.usage.values()) <= host.num_bytes
        assert host.num_bytes <= engine.plan.geometry.total("cpu") + 32 * MIB
        tiny.run(engine, prompts, STEPS)


def test_engines_follow_one_another(tmp_path: Path) -> None:
    """Pinned memory is given back: the next engine may be handed the same addresses."""
    tiny.make_model(tmp_path)
    prompts = tiny.prompts(4, 20)
    found = []
    for _ in range(4):
        with tiny.engine(
            tmp_path, prompts, STEPS, **{**BLOCK, **PLACEMENTS["all on the cpu"]}
        ) as engine:
            found.append(tiny.run(engine, prompts, STEPS))
        del engine
        gc.collect()
    assert all(ids == found[0] for ids in found)


def test_both_directions_of_the_link_are_measured_alone_and_together() -> None:
    device = find_device("cuda")
    links = measure_links(device)
    assert set(links) == {"host to device", "device to host"}
    found = measure_link_both_ways(device)
    assert len({own.num_bytes for own in (*found.alone, *found.beside)}) == 1
    assert all(own.seconds > 0.0 for own in (*found.alone, *found.beside))
    assert all(0.0 < own.share.at(1) <= 1.0 for own in of_both_ways([found]))

"""What a run takes is what was planned: arenas by purpose, the scratch of the arithmetic, files.

And an engine that is told to take less than it needs, or what is not there, refuses with the
amounts and a way out.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freight.errors import BudgetError, DeviceError, InputError
from freight.memory.tier import Arena
from freight.model import attention, kv_view, stems
from freight.model.config import read_config
from freight.model.dummy import write_dummy_checkpoint
from freight.plan import scratch
from freight.quantities import MIB, align_up, parse_bytes
from freight.runtime import batches, device, planning
from freight.runtime import engine as engine_module
from freight.runtime.engine import Engine
from freight.runtime.request import Prefix, Request, SamplingParams

from ..jobs.tiny_model import write_tiny_tokenizer
from . import tiny
from .test_engine_policies import POLICIES

NUM_TAKES = 12
"""The most stretches that one purpose is cut into; each is rounded up to a block."""


def write_config(directory: Path, **sizes: Any) -> None:
    config = {"architectures": ["LlamaForCausalLM"], **sizes}
    (directory / "config.json").write_text(json.dumps(config))


def check_arena(arena: Arena, planned: dict[str, int], room: int) -> None:
    for purpose, size in planned.items():
        taken = arena.usage.get(purpose, 0)
        assert size <= taken <= align_up(size, 4096) + NUM_TAKES * 4096, purpose
    assert not {purpose for purpose, size in arena.usage.items() if size} - set(planned)
    assert sum(arena.usage.values()) <= room <= arena.num_bytes


def check_memory(engine: Engine) -> None:
    planned, place = engine.plan.geometry, engine.placement
    host = dict(planned.usage["cpu"])
    host["read buffer"] = place.host.usage["read buffer"]
    check_arena(place.host, host, planned.total("cpu") + align_up(host["read buffer"], 4096))
    if engine.device.kind == "sim":
        check_arena(place.near, planned.usage["gpu"], planned.total("gpu"))
    assert place.workspace.peak_bytes <= planned.workspace_bytes


@pytest.mark.parametrize("name", [n for n in POLICIES if "slow" not in n and "K=" not in n])
def test_arenas_hold_what_was_planned(name: str, tmp_path: Path) -> None:
    write_config(tmp_path, **tiny.SIZES)
    prompts = tiny.prompts(9, 40)
    with tiny.engine(tmp_path, prompts, 3, dummy_seed=1, **POLICIES[name]) as engine:
        tiny.run(engine, prompts, 3)
        check_memory(engine)


def test_random_weights_are_kept_as_the_configuration_says(tmp_path: Path) -> None:
    """A try without weights holds and reads what the run with them will, wherever they are."""
    biases = {"architectures": ["Qwen2ForCausalLM"], "dtype": "bfloat16"}
    write_config(tmp_path, **{**tiny.SIZES, **biases})
    prompts, answers = tiny.prompts(5, 40), []
    for name in ("cpu: all in memory", "cpu: all on disk", "sim: odd mix"):
        with tiny.engine(tmp_path, prompts, 4, dummy_seed=1, **POLICIES[name]) as engine:
            answers.append(tiny.run(engine, prompts, 4))
            parts = [part for unit in engine.plan.layout.units for part in unit.parts]
            matrices = {part.dtype for part in parts if part.weight.num_rows > 1}
            assert matrices == {"bfloat16"} and engine.dtype == torch.float32
    written = tmp_path / "written"
    written.mkdir()
    (written / "config.json").write_bytes((tmp_path / "config.json").read_bytes())
    write_dummy_checkpoint(read_config(written), written, seed=1)
    with tiny.engine(written, prompts, 4) as engine:
        answers.append(tiny.run(engine, prompts, 4))
    assert all(own == answers[0] for own in answers)


SHAPES: list[dict[str, Any]] = [
    {},
    {"architectures": ["GPTNeoXForCausalLM"], "hidden_size": 96, "rotary_pct": 0.5},
    {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 8},
    {
        "architectures": ["Gemma4ForCausalLM"],
        "sliding_window": 8,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 48,
        "head_dim": 16,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 30,
    },
    {
        "architectures": ["OPTForCausalLM"],
        "hidden_size": 24,
        "ffn_dim": 50,
        "word_embed_proj_dim": 40,
        "num_attention_heads": 2,
    },
    {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 30,
    },
    {
        "architectures": ["Qwen3NextForCausalLM"],
        "num_hidden_layers": 2,
        "full_attention_interval": 2,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 30,
        "shared_expert_intermediate_size": 20,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 10,
        "partial_rotary_factor": 1.0,
    },
    {
        "architectures": ["Qwen3_5ForCausalLM"],
        "layer_types": ["linear_attention"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 1,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "partial_rotary_factor": 1.0,
    },
    {
        "architectures": ["FalconH1ForCausalLM"],
        "mamba_d_ssm": 20,
        "mamba_d_state": 8,
        "mamba_n_heads": 2,
        "mamba_rms_norm": False,
        "mlp_multipliers": [0.5, 2.0],
        "ssm_out_multiplier": 0.5,
    },
    {
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": "ME*-",
        "num_hidden_layers": 4,
        "n_routed_experts": 5,
        "moe_intermediate_size": 30,
        "moe_latent_size": 12,
        "moe_shared_expert_intermediate_size": 20,
        "mamba_num_heads": 6,
        "mamba_head_dim": 10,
        "n_groups": 2,
        "ssm_state_size": 8,
    },
    {
        "architectures": ["HYV4ForCausalLM"],
        "mlp_layer_types": ["sparse"],
        "moe_intermediate_size": 30,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "q_lora_rank": 12,
        "kv_lora_rank": 14,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 10,
    },
    {
        "architectures": ["DeepseekV4ForCausalLM"],
        "num_attention_heads": 6,
        "head_dim": 12,
        "qk_rope_head_dim": 4,
        "layer_types": ["compressed_sparse_attention"],
        "num_hash_layers": 1,
        "sliding_window": 5,
        "index_topk": 3,
        "index_n_heads": 7,
        "index_head_dim": 10,
        "o_groups": 3,
        "o_lora_rank": 14,
        "q_lora_rank": 12,
        "moe_intermediate_size": 30,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
    },
    {
        "architectures": ["MistralLarge4ForConditionalGeneration"],
        "no_rope_layers": [0],
        "first_k_dense_replace": 1,
        "index_topk": 5,
        "index_n_heads": 7,
        "index_head_dim": 10,
        "kv_lora_rank": 14,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 10,
    },
    {
        "architectures": ["DeepseekV32ForCausalLM"],
        "first_k_dense_replace": 1,
        "index_topk": 5,
        "index_n_heads": 7,
        "index_head_dim": 10,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 12,
        "kv_lora_rank": 14,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 10,
    },
]


@settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_scratch_of_the_arithmetic(data: st.DataObject, tmp_path: Path) -> None:
    """Random shapes and rows, with the floors lowered under which small ones would not count."""
    kv_heads = data.draw(st.integers(1, 3))
    sizes = {
        "hidden_size": data.draw(st.integers(3, 40)),
        "intermediate_size": data.draw(st.integers(2, 90)),
        "num_hidden_layers": 1,
        "num_attention_heads": kv_heads * data.draw(st.sampled_from([1, 2, 4])),
        "num_key_value_heads": kv_heads,
        "head_dim": 2 * data.draw(st.integers(1, 8)),
        "vocab_size": data.draw(st.integers(5, 700)),
    }
    write_config(tmp_path, **{**sizes, **data.draw(st.sampled_from(SHAPES))})
    lengths = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=6))
    prompts = [[place % 5 for place in range(length)] for length in lengths]
    most, floor = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 4096, 65536]))
    chosen = {
        "micro_batch_size": data.draw(st.integers(1, 6)),
        **data.draw(
            st.sampled_from(
                [
                    {
                        "device": "sim",
                        "kv_percent": (kv, 100.0 - kv, 0.0),
                        "activations_percent": (60.0, 40.0, 0.0),
                    }
                    for kv in (50.0, 100.0)
                ]
                + [{"device": "cpu", "kv_percent": (0.0, 100.0, 0.0)}]
            )
        ),
    }
    shared, together = data.draw(st.sampled_from([16, 32])), data.draw(st.sampled_from([1, 65536]))
    chosen |= data.draw(st.sampled_from([{}, {"compute": "int8"}]))
    asks: dict[str, Any] = data.draw(
        st.sampled_from([{}, {"n": 3, "temperature": 1.0, "logprobs": 1}, {"prompt_logprobs": 3}])
    )
    with pytest.MonkeyPatch.context() as patch:
        for module in (stems, kv_view, scratch):
            patch.setattr(module, "GROUP_BYTES", floor)
            patch.setattr(module, "QUERY_BLOCK", 16)
        patch.setattr(attention, "QUERY_BLOCK", 16)
        for module in (stems, scratch):
            patch.setattr(module, "STEM_BYTES", together)
        patch.setattr(batches, "LEAST_SHARERS", {"cpu": 2, "gpu": 2})
        patch.setattr(device, "computes_int8", lambda _: True)
        asked = SamplingParams(**asks)
        with tiny.engine(tmp_path, prompts, most, asked, dummy_seed=3, **chosen) as engine:
            rows = (
                Request(
                    index=row,
                    prompt_ids=prompt,
                    params=replace(asked, max_tokens=most),
                    prefix=Prefix(key=0, num_tokens=shared) if len(prompt) > shared else None,
                )
                for row, prompt in enumerate(prompts)
            )
            assert sum(1 for _ in engine.run(rows)) == len(prompts)
            assert 0 < engine.placement.workspace.peak_bytes
            check_memory(engine)


@pytest.mark.parametrize("place", ["cpu", "sim"])
@pytest.mark.parametrize("shape", [0, 2], ids=["llama", "gemma2"])
@pytest.mark.parametrize("together", [1, 1 << 20])
def test_scratch_of_shared_beginnings(
    place: str, shape: int, together: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where attention takes most, sweeps are full, and what is shared is most of each row."""
    sizes = {"hidden_size": 8, "intermediate_size": 2, "vocab_size": 320, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 16}
    write_config(tmp_path, **sizes, **heads, **SHAPES[shape])
    for module in (stems, kv_view, scratch):
        monkeypatch.setattr(module, "GROUP_BYTES", 1)
    for module in (stems, scratch):
        monkeypatch.setattr(module, "STEM_BYTES", together)
    prompts = [[*range(32), *own] for own in tiny.prompts(8, 16)]
    prompts = [(own * 2)[:48] for own in prompts]
    kv = (0.0, 100.0, 0.0) if place == "cpu" else (100.0, 0.0, 0.0)
    options = {"device": place, "kv_percent": kv, "micro_batch_size": 8, "batch_tokens": 64}
    with tiny.engine(tmp_path, prompts, 2, dummy_seed=3, **options) as engine:
        params, prefix = SamplingParams(max_tokens=2), Prefix(key=0, num_tokens=32)
        rows = (
            Request(index=row, prompt_ids=prompt, params=params, prefix=prefix)
            for row, prompt in enumerate(prompts)
        )
        monkeypatch.setattr(batches, "LEAST_SHARERS", {"cpu": 2, "gpu": 2})
        assert sum(1 for _ in engine.run(rows)) == len(prompts)
        check_memory(engine)


def test_closing_gives_files_back(tmp_path: Path) -> None:
    write_config(tmp_path, **tiny.SIZES)
    prompts = tiny.prompts(3, 10)
    before = set(os.listdir("/proc/self/fd"))
    with tiny.engine(tmp_path, prompts, 2, dummy_seed=1, **POLICIES["cpu: all on disk"]) as engine:
        tiny.run(engine, prompts, 2)
        assert len(os.listdir("/proc/self/fd")) >= len(before) + 3
    assert set(os.listdir("/proc/self/fd")) == before
    assert os.listdir(tmp_path) == ["config.json"]


# -- refusals ----------------------------------------------------------------------------------

PROMPTS = tiny.prompts(4, 30)


def refusal(directory: Path, error: type[Exception], **options: Any) -> str:
    write_config(directory, **tiny.SIZES)
    with (
        pytest.raises(error) as caught,
        tiny.engine(directory, PROMPTS, 4, dummy_seed=1, **options),
    ):
        pass
    return str(caught.value)


@pytest.mark.parametrize("form", [None, {"regex": "[a-z]+"}])
def test_the_tokenizer_is_there_when_the_process_is_measured(
    form: dict[str, str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it takes would otherwise come on top of the budget, and what keeps answers to a form."""
    tiny.make_model(tmp_path)
    write_tiny_tokenizer(tmp_path)
    steps = []

    def spy(name: str) -> None:
        original = getattr(engine_module, name)

        def wrapper(*arguments: Any, **keywords: Any) -> Any:
            found = original(*arguments, **keywords)
            steps.append((name, "guides" in getattr(found, "__dict__", ())))
            return found

        monkeypatch.setattr(engine_module, name, wrapper)

    spy("open_tokenizer")
    spy("plan_run")
    params = SamplingParams(structured_outputs=form)
    with tiny.engine(tmp_path, [[1]], 1, params):
        assert steps == [("open_tokenizer", form is not None), ("plan_run", False)]


def test_directories_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.make_model(tmp_path)
    monkeypatch.setattr(engine_module, "Placement", None)  # nothing is loaded before
    gone = tmp_path / "gone"
    with (
        pytest.raises(InputError, match="--trace"),
        tiny.engine(tmp_path, [[1]], 1, trace_path=gone / "trace.json"),
    ):
        pass
    on_disk = {"weights_percent": (0.0, 0.0, 100.0), "dummy_seed": 0, "disk_dir": gone}
    with (
        pytest.raises(BudgetError, match=r"Random weights.*--disk-dir"),
        tiny.engine(tmp_path, [[1]], 1, **on_disk),
    ):
        pass


def test_a_budget_of_the_device_below_the_least(tmp_path: Path) -> None:
    message = refusal(tmp_path, BudgetError, device="sim", gpu_memory_bytes=64 * 1024)
    for words in ("on gpu", "workspace", "The budget is 64.00 KiB", "missing", "--gpu-memory"):
        assert words in message


@pytest.fixture
def steady_process_bytes(monkeypatch: pytest.MonkeyPatch) -> int:
    """What this process is said to have: what other tests left in it goes back at any time, and
    with it the budget below would be enough."""
    monkeypatch.setattr(device, "process_bytes", lambda: 500 * MIB)
    return 500 * MIB


def test_a_budget_of_the_process_below_the_least(tmp_path: Path, steady_process_bytes: int) -> None:
    budget = steady_process_bytes + 30 * MIB
    message = refusal(tmp_path, BudgetError, device="cpu", cpu_memory_bytes=budget)
    for words in ("on cpu", "workspace", "the process itself", "missing", "--cpu-memory"):
        assert words in message


def test_a_budget_below_what_the_process_has(tmp_path: Path) -> None:
    message = refusal(tmp_path, BudgetError, device="cpu", cpu_memory_bytes=1)
    assert "the process itself" in message and "The budget is 1 B" in message


def test_the_least_that_is_named_is_enough(tmp_path: Path) -> None:
    """The refusal says how much is missing: with that much more the run is not refused."""
    write_config(tmp_path, **tiny.SIZES)
    chosen = {"device": "sim", "dummy_seed": 1}
    low, high = 1, 256 * MIB
    while high - low > 4096:
        middle = (low + high) // 2
        try:
            with tiny.engine(tmp_path, PROMPTS, 4, gpu_memory_bytes=middle, **chosen) as engine:
                assert sum(engine.placement.near.usage.values()) <= middle
            high = middle
        except BudgetError as error:
            low, last = middle, error
    named = parse_bytes(last.asked.split("needs ")[1].split(" on ")[0])
    assert abs(named - high) < 0.01 * MIB + 4096


def test_all_tiers_that_are_too_small_are_named_at_once(
    tmp_path: Path, steady_process_bytes: int
) -> None:
    message = refusal(
        tmp_path,
        BudgetError,
        device="sim",
        gpu_memory_bytes=64 * 1024,
        cpu_memory_bytes=steady_process_bytes + 30 * MIB,
        weights_percent=(0.0, 100.0, 0.0),
    )
    assert "missing on gpu" in message and "missing on cpu" in message
    assert "--gpu-memory" in message and "--cpu-memory" in message


def test_more_than_the_machine_has(tmp_path: Path) -> None:
    message = refusal(tmp_path, BudgetError, device="cpu", cpu_memory_bytes=1 << 60)
    assert "The machine has" in message and "Lower it" in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    message = refusal(tmp_path, DeviceError, device="cuda")
    assert "No CUDA device" in message and "--device" in message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "sim", "gpu_memory_bytes": 0}, "--gpu-memory 0"),
        ({"cpu_memory_bytes": 0}, "--cpu-memory 0"),
        ({"cpu_memory_bytes": -5}, "--cpu-memory -5"),
        ({"micro_batch_size": 0}, "--micro-batch-size 0"),
        ({"num_micro_batches": -1}, "--num-micro-batches -1"),
        ({"device": "tpu"}, "--device tpu"),
        ({"dtype": "int4"}, "--dtype int4"),
        ({"weights_percent": (0.0, 50.0, 49.0)}, "--weights 0/50/49"),
        ({"weights_percent": (0.0, 150.0, -50.0)}, "--weights 0/150/-50"),
        ({"kv_percent": (0.0, float("nan"), 100.0)}, "--kv 0/nan/100"),
        ({"device": "cpu", "kv_percent": (10.0, 90.0, 0.0)}, "--kv 10/90/0"),
        ({"device": "cpu", "gpu_memory_bytes": 5}, "--gpu-memory"),
        ({"device": "cpu", "sim_bytes_per_s": 5}, "--sim-bandwidth"),
        ({"kv_percent": (0.0, 0.0, 100.0), "disk_dir": None}, "--disk-dir"),
    ],
    ids=str,
)
def test_nonsense_is_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in refusal(tmp_path, InputError, **options)


@pytest.mark.parametrize(("dtype", "spared"), [("bfloat16", 96 * MIB), ("float32", 0)])
def test_less_is_kept_for_libraries_whose_products_are_ours(
    dtype: str, spared: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows that enter at any time, in a number format that torch would keep code for."""
    tiny.make_model(tmp_path, dtype=getattr(torch, dtype))
    prompts, kept = tiny.prompts(6, 30), []
    for is_ours in (False, True):
        monkeypatch.setattr(planning, "pairs_are_always_better", lambda _, own=is_ours: own)
        with tiny.engine(
            tmp_path, prompts, 5, device="cpu", dtype=dtype, admission="refill"
        ) as own:
            kept.append(own.plan.geometry.index_bytes)
    assert kept[0] - kept[1] == spared

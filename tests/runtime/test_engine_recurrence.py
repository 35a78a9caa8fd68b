"""Models of which some layers keep a state instead of keys, against transformers: logits, tokens,
any admission, samples, prompts in pieces, on any tier; and what is refused of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import (
    BambaConfig,
    DeepseekV32Config,
    FalconH1Config,
    Glm5NextConfig,
    GlmMoeDsaConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Lfm3Config,
    NemotronHConfig,
    PretrainedConfig,
    Qwen3NextConfig,
)
from transformers.models.bailing_hybrid.configuration_bailing_hybrid import BailingHybridConfig
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.hy_v4.configuration_hy_v4 import HYV4Config
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.mistral_large4.configuration_mistral_large4 import MistralLarge4Config
from transformers.models.olmo_hybrid.configuration_olmo_hybrid import OlmoHybridConfig
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

from freight.errors import InputError, ModelError
from freight.model.config import read_config
from freight.model.decoder import count_parameters
from freight.plan.page_sizes import fitting_page_tokens
from freight.runtime import device
from freight.runtime.engine import build_engine
from freight.runtime.options import EngineOptions
from freight.runtime.request import Prefix, Request, SamplingParams

from . import tiny
from .draws import draw_entering
from .test_engine_admission import (
    BEGINNINGS,
    PROMPTS,
    Asked,
    asked_alike,
    asked_rows,
    check,
    engine,
    run_counted,
    score,
)
from .test_engine_admission import STEPS as FEW
from .test_engine_admission import workload as work_of
from .test_engine_parity import deepseek

STEPS = 16
ERROR = 6e-4
"""transformers differs from itself by as much, a token at a time or all at once, and from what it
finds in float64 by up to 2e-4: in such models roundings grow. Of the dense one, where they grow
least, logits are held against float64 as well, to 1e-4."""

SIZES: dict[str, Any] = {
    **tiny.SIZES,
    "num_hidden_layers": 4,
    "head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}


def granite(**changes: Any) -> PretrainedConfig:
    sizes = {**tiny.SIZES, "num_hidden_layers": 4, "shared_intermediate_size": 40}
    mixer = {"mamba_n_heads": 4, "mamba_d_state": 16, "mamba_d_head": 32}
    kinds = ["linear_attention", "full_attention"] * 2
    factors = {"embedding_multiplier": 2.0, "attention_multiplier": 0.2, "logits_scaling": 2.0}
    return GraniteMoeHybridConfig(
        **{**sizes, "intermediate_size": 48, **mixer, **factors, "layer_types": kinds, **changes},
        residual_multiplier=0.5,
        pad_token_id=1,
    )


OLMO: dict[str, Any] = {**tiny.SIZES, "num_hidden_layers": 4, "pad_token_id": 1}
KIMI: dict[str, Any] = {
    **{name: size for name, size in OLMO.items() if name != "max_position_embeddings"},
    "model_max_length": 256,
    "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_head_dim": 32,
    "linear_num_heads": 2,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "num_experts": 6,
    "num_experts_per_token": 3,
    "moe_intermediate_size": 48,
}
LING = {name: size for name, size in KIMI.items() if not name.startswith(("linear_", "layer_"))}
LING |= {"head_dim": 32, "layer_group_size": 2, "first_k_dense_replace": 1}
LING |= {"num_experts": 8, "num_expert_group": 4, "topk_group": 2}


GLM5: dict[str, Any] = {
    **{name: size for name, size in KIMI.items() if name != "model_max_length"},
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "mlp_layer_types": ["dense", "sparse"] * 2,
    "linear_num_heads": 4,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 0,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "swiglu_limit": 0.5,
    "index_topk": 128,
    "index_kpool": 4,
    "index_head_dim": 24,
    "index_n_heads": 3,
    "pad_token_id": None,
}


CHOOSING: dict[str, Any] = {"index_topk": 9, "index_head_dim": 24, "index_n_heads": 32}
"""Fewer keys than rows have; few heads would find many keys equally unlike."""
STRETCHED: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


def deepseek_v4(**changes: Any) -> PretrainedConfig:
    """Windows and keys of few tokens, so that rows complete many and rings turn often."""
    sizes = {name: size for name, size in tiny.SIZES.items() if name != "intermediate_size"}
    sizes |= {"num_hidden_layers": 4, "head_dim": 32, "qk_rope_head_dim": 8, "q_lora_rank": 40}
    sizes |= {"o_groups": 2, "o_lora_rank": 24, "moe_intermediate_size": 48, "sliding_window": 9}
    sizes |= {"n_routed_experts": 6, "num_experts_per_tok": 3, "num_hash_layers": 1}
    sizes |= {"index_n_heads": 3, "index_head_dim": 16, "index_topk": 48, "swiglu_limit": 0.5}
    kinds = ["heavily_compressed_attention", "compressed_sparse_attention"] * 2
    given = {"layer_types": kinds, "num_key_value_heads": 1, "pad_token_id": None}
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
    return DeepseekV4Config(**{**sizes, **given, "compress_rates": rates, **changes})


def glm5_next(**changes: Any) -> PretrainedConfig:
    """Only as a part of a model that also sees."""
    sees = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    sees |= {"out_hidden_size": 64, "projection_intermediate_size": 64}
    return Glm5NextConfig(text_config={**GLM5, **changes}, vision_config=sees)


def mistral_large4(**changes: Any) -> PretrainedConfig:
    """Only as a part of a model that also sees; every other layer rotates nothing."""
    sees = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32}
    sees |= {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32}
    sizes = {**tiny.SIZES, "num_key_value_heads": 4}
    sizes |= {"num_hidden_layers": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "v_head_dim": 24}
    sizes |= {"qk_nope_head_dim": 16, "n_routed_experts": 6, "num_experts_per_tok": 3}
    sizes |= {"moe_intermediate_size": 48, "no_rope_layers": [1, 0] * 2, "pad_token_id": None}
    sizes |= CHOOSING
    return MistralLarge4Config(text_config={**sizes, **changes}, vision_config=sees)


def nemotron(pattern: str, **changes: Any) -> PretrainedConfig:
    """Layers by letters: M keeps a state, * attends, - is an MLP, E has experts."""
    sizes = {name: size for name, size in tiny.SIZES.items() if name != "num_hidden_layers"}
    sizes |= {"ssm_state_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2}
    sizes |= {"head_dim": 24, "n_routed_experts": 6, "num_experts_per_tok": 3}
    sizes |= {"moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 40}
    return NemotronHConfig(**{**sizes, "hybrid_override_pattern": pattern, **changes})


def bamba(**changes: Any) -> PretrainedConfig:
    sizes = {**tiny.SIZES, "num_hidden_layers": 4, "attn_layer_indices": [1, 2], "pad_token_id": 1}
    mixer = {"mamba_n_heads": 4, "mamba_d_state": 16, "mamba_n_groups": 2}
    return BambaConfig(**{**sizes, **mixer, **changes})


def falcon_h1(**changes: Any) -> PretrainedConfig:
    mixer = {"mamba_d_ssm": 96, "mamba_n_heads": 4, "mamba_d_state": 16, "mamba_n_groups": 2}
    factors = {
        "attention_in_multiplier": 0.9,
        "attention_out_multiplier": 0.8,
        "embedding_multiplier": 2.0,
        "key_multiplier": 0.7,
        "lm_head_multiplier": 0.6,
        "mlp_multipliers": [0.9, 0.5],
        "ssm_in_multiplier": 1.2,
        "ssm_multipliers": [0.5, 0.9, 0.7, 1.3, 1.1],
        "ssm_out_multiplier": 0.7,
    }
    return FalconH1Config(**{**tiny.SIZES, "pad_token_id": 1, **mixer, **factors, **changes})


LFM2_KINDS = ["conv", "full_attention", "conv", "conv"]
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3-next": Qwen3NextConfig(**SIZES, **EXPERTS),
    "qwen3-next, plain layers": Qwen3NextConfig(**SIZES, **EXPERTS, mlp_only_layers=[1]),
    "qwen3.5": Qwen3_5TextConfig(**SIZES),
    "qwen3.5, tied": Qwen3_5TextConfig(
        **{**SIZES, "linear_num_value_heads": 2, "linear_value_head_dim": 24},
        linear_conv_kernel_dim=3,
        tie_word_embeddings=True,
        layer_types=["full_attention", "linear_attention"] * 2,
    ),
    "qwen3.5 moe": Qwen3_5MoeTextConfig(**SIZES, **EXPERTS),
    "lfm2": Lfm2Config(**SIZES, layer_types=LFM2_KINDS, pad_token_id=1, block_multiple_of=8),
    "lfm2, width as given": Lfm2Config(
        **SIZES,
        layer_types=LFM2_KINDS,
        pad_token_id=1,
        block_auto_adjust_ff_dim=False,
        tie_word_embeddings=False,
        conv_L_cache=4,
    ),
    "lfm2 moe": Lfm2MoeConfig(
        **SIZES,
        layer_types=LFM2_KINDS,
        pad_token_id=1,
        num_dense_layers=1,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "lfm3": Lfm3Config(**{**SIZES, "num_hidden_layers": 5}, sliding_window=9, pad_token_id=1),
    "lfm3, neither norms nor gates": Lfm3Config(
        **SIZES,
        sliding_window=9,
        pad_token_id=1,
        conv_L_cache=4,
        use_sandwich_norm=False,
        use_attention_gate=False,
        layer_types=["conv", "full_attention", "conv", "sliding_attention"],
    ),
    "granite 4, dense": granite(num_local_experts=0, mamba_n_groups=2, tie_word_embeddings=True),
    "granite 4": granite(
        num_local_experts=6, num_experts_per_tok=3, position_embedding_type="rope"
    ),
    "bamba": bamba(),
    "bamba, biases": bamba(
        attention_bias=True,
        mlp_bias=True,
        mamba_conv_bias=False,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
    ),
    "falcon h1": falcon_h1(),
    "falcon h1, norms": falcon_h1(
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        mamba_conv_bias=False,
        tie_word_embeddings=True,
        ssm_multipliers=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e11},
    ),
    "nemotron h": nemotron("M-M*-M"),
    "nemotron h, no biases": nemotron("-MM**-", use_conv_bias=False, conv_kernel=3, n_groups=4),
    "nemotron 3": nemotron("MEM*E", routed_scaling_factor=2.5),
    "nemotron 3, latents": nemotron("ME*E", moe_latent_size=24),
    "nemotron 3, groups": nemotron("E*EM-", n_group=3, topk_group=2, norm_topk_prob=False),
}
CONFIGS |= {
    "olmo hybrid": OlmoHybridConfig(
        **OLMO,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    ),
    "olmo hybrid, positive": OlmoHybridConfig(
        **{**OLMO, "tie_word_embeddings": True},
        layer_types=["full_attention", "linear_attention"] * 2,
        linear_num_key_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=3,
        linear_allow_neg_eigval=False,
        rope_parameters={"rope_type": "default", "rope_theta": None},
    ),
    "kimi linear": KimiLinearConfig(**KIMI),
    "kimi linear, groups": KimiLinearConfig(
        **{**KIMI, "linear_head_dim": 24, "linear_num_heads": 4},
        linear_conv_kernel_dim=3,
        q_lora_rank=40,
        num_expert_group=3,
        topk_group=2,
        num_shared_experts=2,
        moe_renormalize=False,
        mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
    ),
    "deepseek v4": deepseek_v4(),
    "deepseek v4, two layers": deepseek_v4(
        num_hidden_layers=2,
        layer_types=["compressed_sparse_attention", "heavily_compressed_attention"],
        n_routed_experts=3,
        num_experts_per_tok=2,
        index_topk=4,
        index_n_heads=32,
    ),
    "deepseek v4, chosen keys": deepseek_v4(
        layer_types=["compressed_sparse_attention"] * 4, index_topk=3, index_n_heads=32
    ),
    # Rows complete none of the keys of one layer, and of another one key alone.
    "deepseek v4, few keys": deepseek_v4(
        compress_rates={"compressed_sparse_attention": 40, "heavily_compressed_attention": 128},
        index_topk=2,
        index_n_heads=32,
    ),
    "deepseek v4, windows": deepseek_v4(
        layer_types=["sliding_attention"] * 3,
        num_hidden_layers=3,
        sliding_window=2,
        mlp_layer_types=["moe", "moe", "hash_moe"],
    ),
    "deepseek v4, stretched": deepseek_v4(
        layer_types=None,
        compress_ratios=[128, 4, 0, 4, 0],
        compress_rate_hca=8,
        scoring_func="sigmoid",
        num_hash_layers=0,
        hc_mult=2,
        hc_sinkhorn_iters=1,
        swiglu_limit=1e9,
        rope_parameters=STRETCHED,
    ),
    "deepseek v3.2": deepseek(DeepseekV32Config, n_group=3, topk_group=2, **CHOOSING),
    "glm 5": deepseek(
        GlmMoeDsaConfig, attention_bias=True, rope_parameters={"rope_theta": 500.0}, **CHOOSING
    ),
    "glm 5, shared choices": deepseek(
        GlmMoeDsaConfig,
        num_hidden_layers=5,
        indexer_types=["full", "shared", "full", "shared", "shared"],
        **CHOOSING,
    ),
    "hy 4, shared choices": deepseek(HYV4Config, num_hidden_layers=4, swiglu_limit=0.5, **CHOOSING),
    "mistral large 4": mistral_large4(),
    "mistral large 4, shared choices": mistral_large4(
        num_hidden_layers=5,
        no_rope_layers=None,
        indexer_types=["full", "shared", "shared", "full", "shared"],
        mlp_layer_types=["sparse", "dense", "sparse", "sparse", "dense"],
        n_group=3,
        topk_group=2,
        routed_scaling_factor=1.5,
        final_logit_softcapping=2.0,
        n_shared_experts=2,
    ),
    "glm 5.3": glm5_next(),
    "glm 5.3, unbounded": glm5_next(
        layer_types=["linear_attention", "indexed_attention", "linear_attention"],
        num_hidden_layers=3,
        mlp_layer_types=["sparse"] * 3,
        linear_lower_bound=None,
        linear_conv_kernel_dim=3,
        hc_mult=3,
        hc_sinkhorn_iters=2,
        n_group=3,
        topk_group=2,
        n_shared_experts=2,
        rms_norm_eps=1e-6,
    ),
    "ling 3": BailingHybridConfig(**LING),
    "ling 3, unbounded": BailingHybridConfig(
        **{**LING, "head_dim": 24, "layer_group_size": 4, "num_shared_experts": 2},
        kda_safe_gate=False,
        short_conv_kernel_size=3,
    ),
}


UNCOUNTED = {name for name in CONFIGS if name.startswith(("bamba", "falcon h1"))}
"""transformers counts their positions from 0 at every step."""


UNREAD = re.compile(r"\.visual\.|vision_tower|multi_modal_projector")
"""Parts of models that see whose layers nobody asks for."""


def is_read(name: str, parameter: str) -> bool:
    """Of a model of that name; the indexers of some are left out."""
    is_indexer = name.startswith("glm 5.3") and ".indexer." in parameter
    return not is_indexer and not UNREAD.search(parameter)


def without_attention(options: dict[str, Any]) -> dict[str, Any]:
    """On the CPU for a device: where nothing is in pages there is none."""
    return {name: own for name, own in options.items() if name != "cpu_attention_percent"}


def without_pages(name: str) -> bool:
    """Whether what a model of this name keeps of longer rows is a state alone."""
    return name.startswith(("deepseek", "hy", "mistral")) or name in (
        "glm 5",
        "glm 5, shared choices",
    )


def is_kept(buffer: str) -> bool:
    return "bias" in buffer or "tid2eid" in buffer


@pytest.mark.parametrize("options", [tiny.ON_CPU, tiny.ON_SIM], ids=["cpu", "sim"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_tokens(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = tiny.make_model(tmp_path, config=CONFIGS[name])
    options = without_attention(options) if without_pages(name) else options
    named = model.named_parameters()
    parameters = sum(own.numel() for own_name, own in named if is_read(name, own_name))
    parameters += sum(own.numel() for name, own in model.named_buffers() if is_kept(name))
    assert count_parameters(read_config(tmp_path).complete) == parameters
    prompts = tiny.prompts(4, 40)
    answers = tiny.reference(model, prompts, STEPS, with_positions=name in UNCOUNTED)
    with tiny.engine(tmp_path, prompts, STEPS, **options) as built:
        captured = tiny.capture_logits(built)
        found = tiny.run(built, prompts, STEPS)
    error = 1e-4 if name in UNCOUNTED or "nemotron" in name else ERROR
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        mine = torch.stack([captured[row, len(prompt) + step] for step in range(STEPS)])
        torch.testing.assert_close(mine, answer.logits, rtol=0, atol=error)
    assert found == tiny.tokens(answers)


PUBLISHED = {
    "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm",
}


def test_olmo_hybrid_as_it_is_published(tmp_path: Path) -> None:
    """With other names of norms, the convolutions of queries, keys and values each as wide as these
    (transformers saves three of one width), and a configuration that leaves out what is usual."""
    config = OlmoHybridConfig(**OLMO)
    model = tiny.make_model(tmp_path, config=config)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [own for own in tensors if "q_conv1d" in own]:
        names = [name.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
        parts = torch.cat([tensors[own] for own in names]).split((48, 48, 96))
        tensors |= {own: part.clone() for own, part in zip(names, parts, strict=True)}
    for old, new in PUBLISHED.items():
        tensors = {name.replace(old, new): own for name, own in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    raw = {name: own for name, own in raw.items() if not name.startswith(("linear_", "layer_"))}
    (tmp_path / "config.json").write_text(json.dumps({**raw, "rope_parameters": None}))
    model.model.rotary_emb = None
    prompts = tiny.prompts(4, 40)
    answers = tiny.reference(model, prompts, STEPS)
    with tiny.engine(tmp_path, prompts, STEPS, **tiny.ON_CPU) as built:
        assert tiny.run(built, prompts, STEPS) == tiny.tokens(answers)


def test_layers_that_attend_and_keep_a_state(tmp_path: Path) -> None:
    """Some rows are attended by the CPU while the scan waits for its turn."""
    model = tiny.make_model(tmp_path, config=falcon_h1())
    prompts = tiny.prompts(5, 30)
    wanted = tiny.tokens(tiny.reference(model, prompts, FEW, with_positions=True))
    for count in (1, 3):
        options = {**tiny.ON_SIM, "micro_batch_size": 2, "num_micro_batches": count}
        with tiny.engine(tmp_path, prompts, FEW, **options) as built:
            assert tiny.run(built, prompts, FEW) == wanted


def test_layers_of_one_part_without_states(tmp_path: Path) -> None:
    """Keys can be computed again, and guesses taken back."""
    model = tiny.make_model(tmp_path, config=nemotron("*-E*"))
    prompts = tiny.prompts(5, 30)
    wanted = tiny.tokens(tiny.reference(model, prompts, FEW))
    again = {"recompute_percent": 50.0, "cpu_attention_percent": 0.0}
    for more in ({"draft_tokens": 2}, again, {"admission": "diagonal"}):
        with tiny.engine(tmp_path, prompts, FEW, **{**tiny.ON_SIM, **more}) as built:
            assert tiny.run(built, prompts, FEW) == wanted


@pytest.mark.parametrize("pattern", ["MM**M", "**-*"])
def test_layers_that_keep_something_one_after_another(pattern: str, tmp_path: Path) -> None:
    """Of one micro-batch what the next layer keeps is fetched before this one's is stored."""
    model = tiny.make_model(tmp_path, config=nemotron(pattern))
    prompts = tiny.prompts(5, 30)
    wanted = tiny.tokens(tiny.reference(model, prompts, FEW))
    for options in (tiny.ON_CPU, tiny.ON_SIM, {**tiny.ON_SIM, "admission": "refill"}):
        options = {**options, "micro_batch_size": 5, "num_micro_batches": 1}
        with tiny.engine(tmp_path, prompts, FEW, **options) as built:
            assert tiny.run(built, prompts, FEW) == wanted


def test_kimi_linear_as_it_is_published(tmp_path: Path) -> None:
    """Its plain layers by their own name, and layers that keep a state in a part that counts from
    one."""
    model = tiny.make_model(tmp_path, config=KimiLinearConfig(**KIMI))
    tensors = load_file(tmp_path / "model.safetensors")
    for part in ("gate_proj", "up_proj", "down_proj"):
        old = f"model.layers.0.block_sparse_moe.{part}.weight"
        tensors[old.replace("block_sparse_moe", "mlp")] = tensors.pop(old)
    save_file(tensors, tmp_path / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    raw = {name: own for name, own in raw.items() if not name.startswith(("linear_", "layer_"))}
    del raw["mlp_layer_types"]
    raw["linear_attn_config"] = {
        "full_attn_layers": [2, 4],
        "kda_layers": [1, 3],
        "head_dim": 32,
        "num_heads": 2,
        "short_conv_kernel_size": 4,
    }
    more = {"mla_use_nope": True, "first_k_dense_replace": 1, "rope_theta": 1e4}
    (tmp_path / "config.json").write_text(json.dumps({**raw, **more}))
    prompts = tiny.prompts(4, 40)
    answers = tiny.reference(model, prompts, STEPS)
    with tiny.engine(tmp_path, prompts, STEPS, **tiny.ON_SIM) as built:
        assert tiny.run(built, prompts, STEPS) == tiny.tokens(answers)


def one_by_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The gated delta rule over whole rows [B, T, heads, width], a token at a time in float64."""
    q, k = (h * (h.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for h in (query, key))
    q, k = (h.repeat_interleave(value.shape[2] // h.shape[2], 2) for h in (q, k))
    held = torch.zeros(*value[:, 0].shape[:2], k.shape[-1], value.shape[-1], dtype=torch.float64)
    out = torch.zeros_like(value)
    for token in range(value.shape[1]):
        held = held * g[:, token].exp()[..., None, None]
        lacking = value[:, token] - torch.einsum("bhw,bhwu->bhu", k[:, token], held)
        change = lacking * beta[:, token][..., None]
        held = held + torch.einsum("bhw,bhu->bhwu", k[:, token], change)
        out[:, token] = torch.einsum("bhw,bhwu->bhu", q[:, token], held) * k.shape[-1] ** -0.5
    return out, None


@pytest.mark.parametrize("options", [tiny.ON_CPU, tiny.ON_SIM], ids=["cpu", "sim"])
def test_logits_are_those_of_float64(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.make_model(tmp_path, config=CONFIGS["qwen3.5"]).double()
    prompts = tiny.prompts(4, 40)
    with tiny.engine(tmp_path, prompts, STEPS, **options) as built:
        captured = tiny.capture_logits(built)
        found = tiny.run(built, prompts, STEPS)
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", one_by_one)
    for row, prompt in enumerate(prompts):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *found[row]]]), use_cache=False).logits[0]
        mine = torch.stack([captured[row, len(prompt) + step] for step in range(STEPS)])
        wanted = logits[len(prompt) - 1 : -1].float()
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-4)


@pytest.fixture(
    scope="module", params=["qwen3.5", "deepseek v4, two layers", "glm 5, shared choices"]
)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model_dir(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def oracle(family: str, model_dir: Path) -> tuple[list[tiny.Answer], dict[int, torch.Tensor]]:
    model = tiny.make_model(model_dir, config=CONFIGS[family])
    return tiny.reference(model, PROMPTS, FEW), score(model)


homes = st.sampled_from(
    [
        ("cpu", (0.0, 100.0, 0.0)),
        ("cpu", (0.0, 0.0, 100.0)),
        ("cpu", (0.0, 50.0, 50.0)),
        ("sim", (100.0, 0.0, 0.0)),
        ("sim", (34.0, 33.0, 33.0)),
        ("sim", (0.0, 50.0, 50.0)),
    ]
)


@settings(
    deadline=None,
    max_examples=16,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_admission_gives_the_same_answers(
    data: st.DataObject,
    model_dir: Path,
    oracle: tuple[list[tiny.Answer], dict[int, torch.Tensor]],
) -> None:
    """Rows that enter, wait, move, give way and are computed again, with samples, and prompts that
    come in pieces: few pages for what answers become. What crosses links is counted."""
    answers, scores = oracle
    rows = data.draw(st.sampled_from([asked_rows, asked_alike]))
    asked = data.draw(st.lists(rows, min_size=1, max_size=14))
    asked.sort(key=lambda own: BEGINNINGS[own.prompt] if own.is_shared else [])
    entering, changes = draw_entering(data)
    device, kv = data.draw(homes)
    options = {
        "device": device,
        "kv_percent": kv,
        **entering,
    }
    if entering["admission"] != "zigzag":
        changes["page_tokens"] = data.draw(st.sampled_from([8, 16]))
    work = work_of(asked, data.draw(st.integers(1, FEW)))
    with engine(model_dir, work, changes, **options) as built:
        is_plain = max(own.samples for own in asked) == 1
        is_plain &= not built.plan.geometry.shared_page
        run_counted(built, asked, answers, scores, is_counted=is_plain)


def test_a_block_after_another_finds_no_state(
    model_dir: Path, oracle: tuple[list[tiny.Answer], dict[int, torch.Tensor]]
) -> None:
    """Seats are taken again by later rows, of this run and of the next."""
    answers, scores = oracle
    asked = [Asked(prompt=row % 5, max_tokens=3 + row % 4) for row in range(11)]
    options = {"micro_batch_size": 2, "num_micro_batches": 1}
    with engine(model_dir, work_of(asked), {}, **options) as built:
        for _ in range(2):
            requests = [own.request(index, answers) for index, own in enumerate(asked)]
            check([*built.run(iter(requests))], asked, answers, scores)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"draft_tokens": 3}, "Leave --draft-tokens out"),
        ({"recompute_percent": 50.0}, "Leave --recompute-kv out"),
    ],
)
def test_what_a_state_rules_out_is_refused(
    options: dict[str, Any],
    said: str,
    model_dir: Path,
    oracle: tuple[list[tiny.Answer], dict[int, torch.Tensor]],
) -> None:
    with (
        pytest.raises(InputError, match=said),
        tiny.engine(model_dir, PROMPTS, FEW, **options),
    ):
        pass


def test_beginnings_that_stay_keep_rows_out(tmp_path: Path) -> None:
    """Pairs of rows with a beginning each, one soon over: more beginnings stay than a block's rows
    have on average, and who has no room for its state waits."""
    tiny.make_model(tmp_path, config=granite())
    tokens = fitting_page_tokens(read_config(tmp_path), 400, 4)
    prompts, keys = [], [pair for pair in range(24) for _ in range(2)]
    for row, pair in enumerate(keys):
        prompts.append([5 + (7 * pair + i) % 90 for i in range(tokens)] + [100 + row] * 8)
    new = [4, 40] * 24
    work = tiny.begin_alike(
        replace(
            tiny.workload(prompts, 40),
            total_new_tokens=sum(new),
            lengths=tuple((1, tokens + 8, most) for most in new),
        ),
        keys=keys,
        tokens=[tokens] * 48,
        prompts=[tokens + 8] * 48,
        new=new,
        samples=[1] * 48,
    )
    requests = (
        Request(
            index=row,
            prompt_ids=prompt,
            params=SamplingParams(max_tokens=new[row], ignore_eos=True),
            prefix=Prefix(key=keys[row], num_tokens=tokens),
        )
        for row, prompt in enumerate(prompts)
    )
    options = EngineOptions(
        device="cpu",
        dtype="float32",
        micro_batch_size=8,
        num_micro_batches=1,
        admission="refill",
        weights_percent=(0.0, 100.0, 0.0),
        kv_percent=(0.0, 100.0, 0.0),
    )
    built = build_engine(tmp_path, options=options, workload=work)
    try:
        assert built.plan.geometry.state_rows["cpu"] < 8 + 8
        assert sorted(own.index for own in built.run(requests)) == list(range(48))
    finally:
        built.close()


def test_room_for_beginnings_is_taken_where_some_are_shared(tmp_path: Path) -> None:
    """Of rows whose keys are forgotten: no more pages than rows otherwise."""
    tiny.make_model(tmp_path, config=CONFIGS["qwen3.5"])
    prompts = tiny.prompts(6, 30)
    for is_brought, times in ((False, 1), (True, 2)):
        built = build_engine(
            tmp_path,
            options=EngineOptions(device="cpu", dtype="float32", micro_batch_size=3),
            workload=replace(tiny.workload(prompts, 1), is_brought=is_brought),
        )
        assert not built.placement.kv_cache.is_kept
        assert built.plan.geometry.state_rows["cpu"] == 3 * times
        built.close()


MADE_SMALLER: list[tuple[str, dict[str, Any]]] = [
    *((name, {"weight_bits": 4}) for name in ("qwen3.5 moe", "granite 4, dense", "kimi linear")),
    ("kimi linear", {"weight_bits": 8}),
    ("deepseek v4, chosen keys", {"weight_bits": 8}),
    # Groups of heads have 24 rows each, which 32 do not divide.
    ("deepseek v4", {"weight_bits": 4, "group_dim": "output", "group_size": 32}),
    ("deepseek v4", {"compute": "int8"}),
    ("glm 5, shared choices", {"weight_bits": 4}),
    ("glm 5.3", {"weight_bits": 4}),
]


@pytest.mark.parametrize(("name", "smaller"), MADE_SMALLER, ids=str)
def test_compressed_weights_give_the_same_answers_wherever_they_are(
    name: str, smaller: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what says how states change, makes one key of several, or chooses keys is not
    compressed."""
    monkeypatch.setattr(device, "computes_int8", lambda _: True)
    tiny.make_model(tmp_path, config=CONFIGS[name])
    prompts = tiny.prompts(5, 30)
    found = []
    for options in (tiny.ON_CPU, tiny.ON_SIM, {"device": "cpu"}):
        if options.get("device") == "sim" and "compute" in smaller:
            continue
        options = {**options, **smaller, "compressed_dir": tmp_path / "kept"}
        options = without_attention(options) if without_pages(name) else options
        with tiny.engine(tmp_path, prompts, FEW, **options) as built:
            found.append(tiny.run(built, prompts, FEW))
            compressed = built.plan.layout.compressed
    assert found[1:] == found[:-1]
    assert any(".recurrence." in own or "shared" in name for own in compressed)
    rates = tuple(f".recurrence.{own}" for own in ("a", "b", "a_down", "sources", "source_gates"))
    rates += tuple(f".index_{own}" for own in ("q", "k", "weights", "sources", "source_gates"))
    assert not any(own.endswith(rates) for own in compressed)


def test_a_model_of_states_alone(tmp_path: Path) -> None:
    """Without keys there are no pages, on any tier. (transformers keeps no such model's states: it
    computes all tokens again.)"""
    config = Qwen3_5TextConfig(**{**SIZES, "num_hidden_layers": 2})
    config.layer_types = ["linear_attention"] * 2
    model = tiny.make_model(tmp_path, config=config)
    prompts = tiny.prompts(5, 30)
    answers = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(FEW):
            with torch.inference_mode():
                logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
        answers.append(tokens[len(prompt) :])
    for options in (tiny.ON_CPU, without_attention(tiny.ON_SIM), {"device": "cpu"}):
        with tiny.engine(tmp_path, prompts, FEW, **options) as built:
            assert tiny.run(built, prompts, FEW) == answers


def without_indexer(directory: Path) -> None:
    path = directory / "model.safetensors"
    tensors = {name: own for name, own in load_file(path).items() if ".indexer." not in name}
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(("name", "count"), [("deepseek v3.2", 15), ("mistral large 4", 36)])
def test_rows_that_attend_all_their_keys_need_no_indexer(
    name: str, count: int, tmp_path: Path
) -> None:
    """These have pages of keys, and what chooses of them is not read; longer ones are refused where
    it is not there."""
    model = tiny.make_model(tmp_path, config=CONFIGS[name])
    without_indexer(tmp_path)
    prompts = [prompt[:5] for prompt in tiny.prompts(4, 40)]
    answers = tiny.tokens(tiny.reference(model, prompts, 4))
    with tiny.engine(tmp_path, prompts, 4, **tiny.ON_SIM) as built:
        assert built.config.recurrence is None
        assert tiny.run(built, prompts, 4) == answers
    with (
        pytest.raises(
            ModelError,
            match=rf"lacks {count} weights that choose .*layers\.0\.attention\.index",
        ),
        tiny.engine(tmp_path, prompts, 5, **tiny.ON_SIM),
    ):
        pass


GAINS = "lerope.alpha"


@pytest.mark.parametrize(
    ("gains", "said"),
    [
        (torch.zeros(3), "3 of 4 frequencies have gains"),
        (torch.tensor([0.0, 200.0, 0.0, 0.0]), "gains is inf, it must be from"),
        (torch.full((4,), torch.nan), "gains is nan, it must be from"),
        (torch.zeros(4, dtype=torch.int64), "lerope.alpha says nothing .* that can be: "),
    ],
    ids=["few", "large", "none", "integers"],
)
def test_frequencies_that_cannot_have_been_learnt(
    gains: torch.Tensor, said: str, tmp_path: Path
) -> None:
    tiny.make_model(tmp_path, config=CONFIGS["mistral large 4"])
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    config = read_config(tmp_path)
    save_file({**tensors, GAINS: tensors[GAINS].bfloat16()}, path, metadata={"format": "pt"})
    rounded = read_config(tmp_path).rotations[0].gains
    assert rounded == pytest.approx(config.rotations[0].gains, rel=4e-3) and len(set(rounded)) == 4
    save_file({**tensors, GAINS: gains}, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=said):
        read_config(tmp_path)
    elsewhere = {**tensors, f"language_model.{GAINS}": tensors[GAINS]}
    del elsewhere[GAINS], tensors[GAINS]
    save_file(elsewhere, path, metadata={"format": "pt"})
    assert read_config(tmp_path).rotations == config.rotations
    save_file(tensors, path, metadata={"format": "pt"})
    assert not read_config(tmp_path).rotations[0].gains


@pytest.mark.parametrize("name", ["deepseek v4, chosen keys", "deepseek v3.2"])
def test_what_rows_do_not_need_is_left_out(name: str, tmp_path: Path) -> None:
    tiny.make_model(tmp_path, config=CONFIGS[name])
    config = read_config(tmp_path)
    chosen = CONFIGS[name].index_topk * (4 if "v4" in name else 1)
    short, long = config.for_rows(chosen), config.for_rows(chosen + 4)
    kept = [count_parameters(own) for own in (short, long, config.complete)]
    assert kept[0] < kept[1] == kept[2]
    assert short.state_bytes_per_row() < long.state_bytes_per_row()
    assert long.state_bytes_per_row() < config.complete.state_bytes_per_row()


@pytest.mark.parametrize("name", ["deepseek v4", "deepseek v3.2"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_bits": 4}, "Leave --kv-bits out"),
        ({"sparse_attention": 0.1}, "Leave --sparse-attention out"),
        ({**tiny.ON_SIM, "cpu_attention_percent": 50.0}, "Leave --cpu-attention out"),
    ],
    ids=["bits", "share", "attention"],
)
def test_what_is_no_page_of_keys_is_kept_as_it_is(
    name: str, options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    tiny.make_model(tmp_path, config=CONFIGS[name])
    with (
        pytest.raises(InputError, match=said),
        tiny.engine(tmp_path, PROMPTS, FEW, **options),
    ):
        pass


def test_a_table_that_names_no_expert_is_refused(tmp_path: Path) -> None:
    tiny.make_model(tmp_path, config=CONFIGS["deepseek v4"])
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.ffn.gate.tid2eid"][7, 1] = 6
    save_file(tensors, path, metadata={"format": "pt"})
    with (
        pytest.raises(ModelError, match="It has 6 among them; there are 6, from 0 on"),
        tiny.engine(tmp_path, PROMPTS, FEW),
    ):
        pass

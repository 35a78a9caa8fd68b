"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: each layer is one part alone, with one norm: a scan,
attention without rotation, an MLP, or experts that are chosen by sigmoids, with corrections and one
beside them for all, and may work on latents. What is within MLPs and experts is squared, and gated
by nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.scans import scan_tensors, spell_out_scan
from freight.model.families.table import BASE_KEYS, Family, Key, fixed, read, text_part

__all__ = ["NEMOTRON_H"]

_KINDS: Final = {
    "M": "linear_attention",
    "mamba": "linear_attention",
    "*": "full_attention",
    "attention": "full_attention",
    "-": "mlp",
    "E": "moe",
}
_MLPS: Final = ("mlp", "moe")


def _name_layers(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Kinds of layers by the letters of a pattern, or older names. No layer rotates. Of models that
    see or hear, too, the part that reads has another name than elsewhere."""
    raw = text_part({"text_config": raw.get("llm_config"), **raw})
    kinds = raw.get("layers_block_type") or raw.get("hybrid_override_pattern")
    if not isinstance(kinds, list | str):
        return {**raw, "layer_types": kinds}  # to be refused
    kinds = [_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    stated = raw.get("num_hidden_layers")
    changes: dict[str, Any] = {
        "num_hidden_layers": len(kinds) if stated is None else stated,
        "layer_types": ["full_attention" if kind in _MLPS else kind for kind in kinds],
        "layer_parts": ["mlp" if kind in _MLPS else "mixer" for kind in kinds],
        "expert_layers": [kind == "moe" for kind in kinds],
        "rope_layers": [False for _ in kinds],
    }
    if "moe" not in kinds:
        changes |= {"n_routed_experts": 0, "n_shared_experts": 1}
    return {**spell_out_scan(raw), **changes}


_LAYER: Final = "backbone.layers.{i}"
_MIXER: Final = f"{_LAYER}.mixer"
_SCAN_KEYS: Final = {
    "recurrent_rule": fixed("scan"),
    "recurrent_bias": Key(names=("mamba_conv_bias", "use_conv_bias"), default=True),
    "recurrent_taps": Key(names=("mamba_d_conv", "conv_kernel"), default=4),
    "recurrent_key_heads": Key(names=("mamba_n_groups", "n_groups"), default=8),
    "recurrent_heads": read("mamba_num_heads", 128),
    "recurrent_key_width": read("ssm_state_size", 128),
    "recurrent_value_width": read("mamba_head_dim", 64),
}
_EXPERT_KEYS: Final = {
    "num_experts": read("n_routed_experts", 8),
    "experts_per_token": read("num_experts_per_tok", 2),
    "expert_size": read("moe_intermediate_size", 7688),
    "normalised_routes": read("norm_topk_prob", True),
    "route_scores": fixed("sigmoid"),
    "route_scale": read("routed_scaling_factor", 1.0),
    "route_corrections": fixed(True),
    "expert_groups": read("n_group", 1),
    "groups_per_token": read("topk_group", 1),
    "expert_latent": read("moe_latent_size", None),
    "shared_size": read("moe_shared_expert_intermediate_size", 7688),
}

NEMOTRON_H: Final = Family(
    architectures=(
        "NemotronHForCausalLM",
        "NemotronH_Nano_VL_V2",
        "NemotronH_Nano_Omni_Reasoning_V3",
        "NemotronH_Omni_Reasoning_V3",
    ),
    model_types=("nemotron_h", "nemotron_h_omni"),
    keys={
        **BASE_KEYS,
        "hidden_size": read("hidden_size", 4096),
        "intermediate_size": read("intermediate_size", 21_504),
        "num_heads": read("num_attention_heads", 32),
        "num_kv_heads": read("num_key_value_heads", 8),
        "head_dim": Key(names=("head_dim", "attention_head_dim"), default=128),
        "vocab_size": read("vocab_size", 131_072),
        "max_positions": read("max_position_embeddings", 4096),
        "norm_eps": read("layer_norm_epsilon", 1e-5),
        "gated_mlp": fixed(False),
        "activation": read("mlp_hidden_act", "relu2"),
        **_EXPERT_KEYS,
        **_SCAN_KEYS,
    },
    tensors={
        "embedding": "backbone.embeddings.weight",
        "layers.{i}.attention.norm": f"{_LAYER}.norm.weight",
        **{f"layers.{{i}}.attention.{own}": f"{_MIXER}.{own}_proj.weight" for own in "qkv"},
        "layers.{i}.attention.out": f"{_MIXER}.o_proj.weight",
        **scan_tensors(_MIXER),
        "layers.{i}.mlp.norm": f"{_LAYER}.norm.weight",
        "layers.{i}.mlp.up": f"{_MIXER}.up_proj.weight",
        "layers.{i}.mlp.down": f"{_MIXER}.down_proj.weight",
        "layers.{i}.router.weight": f"{_MIXER}.gate.weight",
        "layers.{i}.router.corrections": f"{_MIXER}.gate.e_score_correction_bias",
        "layers.{i}.shared.up": f"{_MIXER}.shared_experts.up_proj.weight",
        "layers.{i}.shared.down": f"{_MIXER}.shared_experts.down_proj.weight",
        "layers.{i}.narrow": f"{_MIXER}.fc1_latent_proj.weight",
        "layers.{i}.widen": f"{_MIXER}.fc2_latent_proj.weight",
        "layers.{i}.experts.{e}.up": f"{_MIXER}.experts.{{e}}.up_proj.weight",
        "layers.{i}.experts.{e}.down": f"{_MIXER}.experts.{{e}}.down_proj.weight",
        "head.norm": "backbone.norm_f.weight",
        "head.weight": "lm_head.weight",
    },
    demands={
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "use_bias": False,
        "mamba_proj_bias": False,
        "mamba_hidden_act": "silu",
        "residual_in_fp32": False,
        "sliding_window": None,
        "time_step_limit": None,
        "n_shared_experts": 1,
    },
    prepare=_name_layers,
)

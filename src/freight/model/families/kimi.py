"""Kimi Linear: of four layers three keep a state by a delta rule of which each row decays by a rate
of its own, the fourth attends over latents, without rotation; experts as in DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.deepseek import DEEPSEEK_V3
from freight.model.families.table import MOST_LAYERS, Family, Key, OneOf, fixed, read

__all__ = ["KIMI_LINEAR"]

_LISTS: Final = {"full_attn_layers": "full_attention", "kda_layers": "linear_attention"}
_SIZES: Final = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_OTHERS: Final = {
    "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group",
    "model_max_length": "max_position_embeddings",
}


def _spell_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Layers that keep a state, and their sizes, may be a part of their own, which counts layers
    from one; what others call otherwise. Nothing is rotated."""
    own = raw.get("linear_attn_config") or {}
    sizes = own if isinstance(own, Mapping) else {"num_heads": [own]}  # to be refused
    names = [(sizes, _SIZES), (raw, _OTHERS)]
    given = {new: part[old] for part, table in names for old, new in table.items() if old in part}
    raw = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, **raw, **given}
    if raw.get("use_grouped_topk") is False:
        raw |= {"n_group": 1, "topk_group": 1}
    num_layers = raw.get("num_hidden_layers", 27)
    if not isinstance(num_layers, int):
        return raw
    num_layers = min(num_layers, MOST_LAYERS)
    kinds = raw.get("layer_types") or _listed_kinds(sizes, num_layers)
    changes = {"layer_types": kinds, "rope_layers": [False] * num_layers}
    return DEEPSEEK_V3.prepare({**raw, **changes, "rope_scaling": None, "rope_parameters": None})


def _listed_kinds(sizes: Mapping[str, Any], num_layers: int) -> list[str | None]:
    """Of layers by two lists of numbers; where there are none every fourth attends."""
    lists = [(sizes[name], kind) for name, kind in _LISTS.items() if name in sizes]
    if not lists:
        return [
            "full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(num_layers)
        ]
    kinds: list[str | None] = [None] * num_layers
    for numbers, kind in lists:
        for number in numbers if isinstance(numbers, list) else []:
            if isinstance(number, int) and 1 <= number <= num_layers:
                kinds[number - 1] = kind
    return kinds


_ATTENTION: Final = "model.layers.{i}.self_attn"
_MOE: Final = "model.layers.{i}.block_sparse_moe"
_EXPERT: Final = f"{_MOE}.experts.{{e}}"
_PROJECTIONS: Final = {
    **{name: name for name in "qkvb"},
    "a_down": "f_a",
    "a": "f_b",
    "gate_down": "g_a",
    "gate": "g_b",
    "out": "o",
}


def _plain(name: str) -> OneOf:
    """Of a layer without experts."""
    return OneOf(first=f"model.layers.{{i}}.mlp.{name}.weight", otherwise=f"{_MOE}.{name}.weight")


KIMI_LINEAR: Final = Family(
    architectures=("KimiLinearForCausalLM",),
    model_types=("kimi_linear",),
    keys={
        **DEEPSEEK_V3.keys,
        "norm_eps": read("rms_norm_eps", 1e-5),
        "max_positions": read("max_position_embeddings", 1_048_576),
        "num_experts": Key(names=("num_experts", "num_local_experts"), default=256),
        "experts_per_token": Key(names=("num_experts_per_token", "num_experts_per_tok"), default=8),
        "expert_size": read("moe_intermediate_size", 1024),
        "normalised_routes": Key(names=("moe_renormalize", "norm_topk_prob"), default=True),
        "route_scale": read("routed_scaling_factor", 2.446),
        "tied_embeddings": fixed(False),
        "recurrent_apart": fixed(True),
        "recurrent_taps": read("linear_conv_kernel_dim", 4),
        "recurrent_key_heads": read("linear_num_heads", 32),
        "recurrent_heads": read("linear_num_heads", 32),
        "recurrent_key_width": read("linear_head_dim", 128),
        "recurrent_value_width": read("linear_head_dim", 128),
        "recurrent_by_row": fixed(True),
        "recurrent_rate_rank": read("linear_head_dim", 128),
    },
    tensors={
        **DEEPSEEK_V3.tensors,
        **{
            f"layers.{{i}}.recurrence.{name}": f"{_ATTENTION}.{own}_proj.weight"
            for name, own in _PROJECTIONS.items()
        },
        **{
            f"layers.{{i}}.recurrence.{x}_convolution": f"{_ATTENTION}.{x}_conv1d.weight"
            for x in "qkv"
        },
        "layers.{i}.recurrence.decay": f"{_ATTENTION}.A_log",
        "layers.{i}.recurrence.decay_bias": f"{_ATTENTION}.dt_bias",
        "layers.{i}.recurrence.read_norm": f"{_ATTENTION}.o_norm.weight",
        **{f"layers.{{i}}.mlp.{x}": _plain(f"{x}_proj") for x in ("gate", "up", "down")},
        "layers.{i}.router.weight": f"{_MOE}.gate.weight",
        "layers.{i}.router.corrections": f"{_MOE}.gate.e_score_correction_bias",
        **{
            f"layers.{{i}}.shared.{x}": f"{_MOE}.shared_experts.{x}_proj.weight"
            for x in ("gate", "up", "down")
        },
        "layers.{i}.experts.{e}.gate": f"{_EXPERT}.w1.weight",
        "layers.{i}.experts.{e}.up": f"{_EXPERT}.w3.weight",
        "layers.{i}.experts.{e}.down": f"{_EXPERT}.w2.weight",
    },
    demands={
        "hidden_act": "silu",
        "mla_use_nope": True,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "tie_word_embeddings": False,
    },
    prepare=_spell_out,
)

"""GPT-2: learned positions, layer norms, a plain MLP; its matrices lie turned, queries, keys and
values beside each other. GPT-BigCode (SantaCoder, StarCoder): as they are used, one key/value head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.table import BASE_KEYS, Family, Fused, Key, fixed, read, required

__all__ = ["GPT2", "GPT_BIGCODE", "GPT_KEYS", "spell_out"]


def spell_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The MLP is four times as wide as the model unless config.json says how wide. Scores may not
    be scaled; of several queries for one key it says whether."""
    width = raw.get("n_embd", raw.get("hidden_size"))
    inner = 4 * width if isinstance(width, int) else None
    return {
        **raw,
        "n_inner": raw.get("n_inner") or inner,
        "score_scalar": None if raw.get("scale_attn_weights", True) else 1.0,
        "num_kv_heads": 1 if raw.get("multi_query", True) else None,
    }


GPT_KEYS: Final = {
    **BASE_KEYS,
    "num_layers": Key(names=("n_layer", "num_hidden_layers"), required=True),
    "hidden_size": Key(names=("n_embd", "hidden_size"), required=True),
    "intermediate_size": required("n_inner"),
    "num_heads": Key(names=("n_head", "num_attention_heads"), required=True),
    "num_kv_heads": fixed(None),
    "head_dim": fixed(None),
    "max_positions": Key(names=("n_positions", "max_position_embeddings"), default=1024),
    "norm": fixed("layer"),
    "norm_eps": read("layer_norm_epsilon", 1e-5),
    "norm_bias": fixed(True),
    "gated_mlp": fixed(False),
    "activation": read("activation_function", "gelu_new"),
    "mlp_bias": fixed(True),
    "tied_embeddings": read("tie_word_embeddings", True),
}
_KEYS: Final = {
    **GPT_KEYS,
    "qkv_bias": fixed(True),
    "out_bias": fixed(True),
    "attention_scalar": read("score_scalar", None),
    "learned_positions": fixed(True),
}

_LAYER: Final = "transformer.h.{i}"
_NAMES: Final = {
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_ENDS_AND_NORMS: Final = {
    "embedding": "transformer.wte.weight",
    "embedding.positions": "transformer.wpe.weight",
    "layers.{i}.attention.norm": f"{_LAYER}.ln_1.weight",
    "layers.{i}.attention.norm_bias": f"{_LAYER}.ln_1.bias",
    "layers.{i}.mlp.norm": f"{_LAYER}.ln_2.weight",
    "layers.{i}.mlp.norm_bias": f"{_LAYER}.ln_2.bias",
    "head.norm": "transformer.ln_f.weight",
    "head.norm_bias": "transformer.ln_f.bias",
    "head.weight": "lm_head.weight",
}


def _parts(key: str, name: str) -> dict[str, Fused]:
    """Where a matrix and its bias are, or those that are one there."""
    own = ("attention.q", "attention.k", "attention.v") if key == "attention.qkv" else (key,)
    biases = tuple(f"{part}_bias" for part in own)
    weight = Fused(tensor=f"{_LAYER}.{name}.weight", of=own, turned=True)
    bias = Fused(tensor=f"{_LAYER}.{name}.bias", of=biases)
    return {
        **{f"layers.{{i}}.{part}": weight for part in own},
        **{f"layers.{{i}}.{part}": bias for part in biases},
    }


GPT2: Final = Family(
    architectures=("GPT2LMHeadModel",),
    model_types=("gpt2",),
    keys=_KEYS,
    tensors={
        **_ENDS_AND_NORMS,
        **{own: place for pair in _NAMES.items() for own, place in _parts(*pair).items()},
    },
    demands={"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    prepare=spell_out,
)

GPT_BIGCODE: Final = Family(
    architectures=("GPTBigCodeForCausalLM",),
    model_types=("gpt_bigcode",),
    keys={
        **_KEYS,
        "num_kv_heads": read("num_kv_heads", None),
        "activation": read("activation_function", "gelu_pytorch_tanh"),
        "fused_qkv": fixed(True),
    },
    tensors={
        **_ENDS_AND_NORMS,
        **{f"layers.{{i}}.{key}": f"{_LAYER}.{name}.weight" for key, name in _NAMES.items()},
        **{f"layers.{{i}}.{key}_bias": f"{_LAYER}.{name}.bias" for key, name in _NAMES.items()},
    },
    demands={"add_cross_attention": False},
    prepare=spell_out,
)

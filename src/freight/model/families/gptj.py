"""GPT-J: attention and MLP side by side over one layer norm, a part of each head rotated,
neighbours together; the output head has a bias. CodeGen: query, value and key stacked in blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.gpt2 import GPT_KEYS, spell_out
from freight.model.families.table import Family, Key, fixed, read

__all__ = ["CODEGEN", "GPTJ"]


def _spell_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """A null would rotate heads by angles of the whole model's width: it is taken for 0."""
    return {**spell_out(raw), "rotary_dim": raw.get("rotary_dim", 64) or 0}


_LAYER: Final = "transformer.h.{i}"

GPTJ: Final = Family(
    architectures=("GPTJForCausalLM",),
    model_types=("gptj",),
    keys={
        **GPT_KEYS,
        "max_positions": Key(names=("n_positions", "max_position_embeddings"), default=2048),
        "parallel": fixed(True),
        "shared_norm": fixed(True),
        "head_bias": fixed(True),
        "rope_theta": fixed(10_000.0),
        "rotary_pairs": fixed(True),
        "rotary_width": Key(names=("rotary_dim",)),
        "tied_embeddings": read("tie_word_embeddings", False),
    },
    tensors={
        "embedding": "transformer.wte.weight",
        **{
            f"layers.{{i}}.{part}.norm{suffix}": f"{_LAYER}.ln_1.{name}"
            for part in ("attention", "mlp")
            for suffix, name in (("", "weight"), ("_bias", "bias"))
        },
        **{f"layers.{{i}}.attention.{own}": f"{_LAYER}.attn.{own}_proj.weight" for own in "qkv"},
        "layers.{i}.attention.out": f"{_LAYER}.attn.out_proj.weight",
        "layers.{i}.mlp.up": f"{_LAYER}.mlp.fc_in.weight",
        "layers.{i}.mlp.up_bias": f"{_LAYER}.mlp.fc_in.bias",
        "layers.{i}.mlp.down": f"{_LAYER}.mlp.fc_out.weight",
        "layers.{i}.mlp.down_bias": f"{_LAYER}.mlp.fc_out.bias",
        "head.norm": "transformer.ln_f.weight",
        "head.norm_bias": "transformer.ln_f.bias",
        "head.weight": "lm_head.weight",
        "head.bias": "lm_head.bias",
    },
    prepare=_spell_out,
)

CODEGEN: Final = Family(
    architectures=("CodeGenForCausalLM",),
    model_types=("codegen",),
    keys={**GPTJ.keys, "qkv_blocks": fixed(4)},
    tensors={
        **GPTJ.tensors,
        "layers.{i}.attention.qkv": f"{_LAYER}.attn.qkv_proj.weight",
    },
    prepare=_spell_out,
)

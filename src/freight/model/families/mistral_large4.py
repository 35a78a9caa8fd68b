"""Mistral Large 4, the part that reads: latents of which an indexer chooses, or has for a layer
before, as in GLM-5; queries that are not made of fewer numbers, and that heads let grow with their
position; layers that do not rotate, whose latents are alone; frequencies that were learnt; experts
as in Mistral Small 4; logits with a limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.deepseek_sparse import choose_keys
from freight.model.families.mistral4 import MISTRAL4
from freight.model.families.table import MOST_LAYERS, Family, fixed, read, text_part

__all__ = ["MISTRAL_LARGE4"]

_SIZES: Final = {
    "vocab_size": 204_800,
    "hidden_size": 6144,
    "intermediate_size": 24_576,
    "moe_intermediate_size": 6144,
    "num_hidden_layers": 72,
    "num_attention_heads": 64,
    "qk_nope_head_dim": 64,
    "max_position_embeddings": 1_048_576,
    "first_k_dense_replace": 1,
}
_ROPE: Final = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 2048.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.0,
}


def _spell_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of so many layers the last rotates nothing; each has keys of its own where others are not
    named."""
    raw = {**_SIZES, **text_part(raw)}
    num_layers, every = raw["num_hidden_layers"], raw.get("no_rope_layer_interval", 4)
    rotates, of_others = raw.get("no_rope_layers"), raw.get("kv_source_layers")
    if isinstance(num_layers, int) and isinstance(every, int):
        layers = [*range(min(num_layers, MOST_LAYERS))]
        rotates = [(i + 1) % max(every, 1) != 0 for i in layers] if rotates is None else rotates
        of_others = None if of_others == layers else of_others
    if isinstance(rotates, list):
        rotates = [bool(own) for own in rotates[:MOST_LAYERS]]
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or _ROPE
    own = {"rope_parameters": rope, "rope_layers": rotates, "kv_source_layers": of_others}
    return choose_keys({**raw, **own})


_LAYER: Final = "layers.{i}"
_ATTENTION: Final = f"{_LAYER}.attention"
_INDEXER: Final = f"{_ATTENTION}.indexer"
_TENSORS: Final = {
    "embedding": "tok_embeddings.weight",
    "layers.{i}.attention.norm": f"{_LAYER}.attention_norm.weight",
    "layers.{i}.attention.q": f"{_ATTENTION}.wq.weight",
    "layers.{i}.attention.q_growth_rate": f"{_ATTENTION}.ssmax_scaling.s",
    "layers.{i}.attention.q_growth_bias": f"{_ATTENTION}.ssmax_scaling.b",
    "layers.{i}.attention.kv_down": f"{_ATTENTION}.wkv_a_with_mqa.weight",
    "layers.{i}.attention.kv_norm": f"{_ATTENTION}.kv_a_norm.weight",
    "layers.{i}.attention.kv_up": f"{_ATTENTION}.wkv_b.weight",
    "layers.{i}.attention.out": f"{_ATTENTION}.wo.weight",
    "layers.{i}.attention.index_q_norm": f"{_INDEXER}.q_input_norm.weight",
    "layers.{i}.attention.index_q_norm_bias": f"{_INDEXER}.q_input_norm.bias",
    "layers.{i}.attention.index_q": f"{_INDEXER}.wq_b.weight",
    "layers.{i}.attention.index_q_growth_rate": f"{_INDEXER}.ssmax_scaling.s",
    "layers.{i}.attention.index_q_growth_bias": f"{_INDEXER}.ssmax_scaling.b",
    "layers.{i}.attention.index_k": f"{_INDEXER}.wk.weight",
    "layers.{i}.attention.index_k_norm": f"{_INDEXER}.k_norm.weight",
    "layers.{i}.attention.index_k_norm_bias": f"{_INDEXER}.k_norm.bias",
    "layers.{i}.attention.index_weights": f"{_INDEXER}.weights_proj.weight",
    "layers.{i}.mlp.norm": f"{_LAYER}.ffn_norm.weight",
    "layers.{i}.mlp.gate": f"{_LAYER}.feed_forward.w1.weight",
    "layers.{i}.mlp.up": f"{_LAYER}.feed_forward.w3.weight",
    "layers.{i}.mlp.down": f"{_LAYER}.feed_forward.w2.weight",
    "layers.{i}.router.weight": f"{_LAYER}.gate.weight",
    "layers.{i}.shared.gate": f"{_LAYER}.shared_experts.w1.weight",
    "layers.{i}.shared.up": f"{_LAYER}.shared_experts.w3.weight",
    "layers.{i}.shared.down": f"{_LAYER}.shared_experts.w2.weight",
    "layers.{i}.experts.{e}.gate": f"{_LAYER}.experts.{{e}}.w1.weight",
    "layers.{i}.experts.{e}.up": f"{_LAYER}.experts.{{e}}.w3.weight",
    "layers.{i}.experts.{e}.down": f"{_LAYER}.experts.{{e}}.w2.weight",
    "head.norm": "norm.weight",
    "head.weight": "output.weight",
}
"""As they were published, and as transformers writes them."""

MISTRAL_LARGE4: Final = Family(
    architectures=("MistralLarge4ForConditionalGeneration",),
    model_types=("mistral_large4", "mistral_large4_text"),
    keys={
        **MISTRAL4.keys,
        "norm_eps": read("rms_norm_eps", 1e-5),
        "query_rank": fixed(None),
        "latent_eps": read("rms_norm_eps", 1e-5),
        "latent_alone_unturned": fixed(True),
        "num_experts": read("n_routed_experts", 128),
        "expert_size": read("moe_intermediate_size", 6144),
        "normalised_routes": fixed(True),
        "logits_softcap": read("final_logit_softcapping", 30.0),
        "growth_rate": fixed(None),
        "growth_span": fixed(None),
        "growth_learnt": fixed(True),
        "index_chosen": read("index_topk", None),
        "index_heads": read("index_n_heads", 32),
        "index_width": read("index_head_dim", 128),
        "index_of_stream": fixed(True),
    },
    tensors=_TENSORS,
    demands={"kv_source_layers": None},
    prepare=_spell_out,
    rope_exponents="lerope.alpha",
)

"""Granite 3: Llama's shape with a factor for embeddings, scores, updates and logits each; also with
experts, whose weights have the factor of updates, and with an MLP beside them. HyperCLOVA X: norms
also of what the parts of a layer return. Granite 4: most layers keep a state, by a scan,
and experts have an MLP beside them, or that is all there is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.llama import DECODER_TENSORS, LLAMA, PROJECTION_BIASES
from freight.model.families.scans import SCAN_KEYS, scan_tensors, spell_out_scan
from freight.model.families.table import (
    MOST_LAYERS,
    Family,
    Fused,
    Place,
    Stacked,
    fixed,
    inverse,
    read,
    required,
)

__all__ = ["GRANITE", "GRANITE_HYBRID", "GRANITE_MOE", "GRANITE_MOE_SHARED", "HYPERCLOVAX"]


def _spell_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Scores are multiplied by a number that others give as the root of one, logits divided."""
    scores, logits = raw.get("attention_multiplier", 1.0), raw.get("logits_scaling", 1.0)
    return {**raw, "score_scalar": inverse(scores, 2), "logits_scale": inverse(logits, 1)}


GRANITE: Final = Family(
    architectures=("GraniteForCausalLM",),
    model_types=("granite",),
    keys={
        **LLAMA.keys,
        "embedding_scale": read("embedding_multiplier", 1.0),
        "residual_scale": read("residual_multiplier", 1.0),
        "attention_scalar": read("score_scalar", 1.0),
        "logits_scale": read("logits_scale", 1.0),
    },
    tensors=LLAMA.tensors,
    prepare=_spell_out,
)


def _name_norms(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Logits are multiplied here, and what multiplies scores may be left to the heads' width."""
    scores, is_both = raw.get("attention_multiplier"), raw.get("use_post_norm", True)
    return {
        **raw,
        "score_scalar": None if scores is None else inverse(scores, 2),
        "logits_scale": raw.get("logits_scaling", 1.0),
        "norm_place": "both" if is_both else "before",
    }


HYPERCLOVAX: Final = Family(
    architectures=("HyperCLOVAXForCausalLM",),
    model_types=("hyperclovax",),
    keys={
        **GRANITE.keys,
        "attention_scalar": read("score_scalar", None),
        "norm_place": read("norm_place", "both"),
    },
    tensors={
        **LLAMA.tensors,
        "layers.{i}.attention.post_norm": "model.layers.{i}.post_norm1.weight",
        "layers.{i}.mlp.post_norm": "model.layers.{i}.post_norm2.weight",
    },
    prepare=_name_norms,
)

_MOE: Final = "model.layers.{i}.block_sparse_moe"
_BOTH: Final = f"{_MOE}.input_linear.weight"

GRANITE_MOE: Final = Family(
    architectures=("GraniteMoeForCausalLM",),
    model_types=("granitemoe",),
    keys={
        **GRANITE.keys,
        "mlp_bias": fixed(False),
        "num_experts": read("num_local_experts", 8),
        "experts_per_token": read("num_experts_per_tok", 2),
        "expert_size": required("intermediate_size"),
        "route_scale": read("residual_multiplier", 1.0),
    },
    tensors={
        **DECODER_TENSORS,
        **PROJECTION_BIASES,
        "layers.{i}.router.weight": f"{_MOE}.router.layer.weight",
        "layers.{i}.experts.{e}.gate": Stacked(tensor=_BOTH, parts=2, part=0),
        "layers.{i}.experts.{e}.up": Stacked(tensor=_BOTH, parts=2, part=1),
        "layers.{i}.experts.{e}.down": Stacked(tensor=f"{_MOE}.output_linear.weight"),
    },
    prepare=_spell_out,
)

_KINDS: Final = {"mamba": "linear_attention", "attention": "full_attention"}


def _spell_out_hybrid(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Layers by their older names; where no rotation is named there is none. Without experts the
    MLP beside them is the only one."""
    raw = spell_out_scan(_spell_out(raw))
    kinds = raw.get("layer_types") or raw.get("layers_block_type")
    num_layers = raw.get("num_hidden_layers")
    if kinds is None and isinstance(num_layers, int):
        kinds = ["mamba"] * min(num_layers, MOST_LAYERS)
    if isinstance(kinds, list):
        kinds = [_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    changes: dict[str, Any] = {"layer_types": kinds}
    if raw.get("position_embedding_type") != "rope" and isinstance(kinds, list):
        changes["rope_layers"] = [False] * len(kinds)
    shared = raw.get("shared_intermediate_size", 1024)
    if raw.get("num_local_experts", 8) == 0:
        changes |= {"intermediate_size": shared, "shared_size": 0}
    else:
        changes["shared_size"] = shared
    return {**raw, **changes}


_MLP: Final = "model.layers.{i}.shared_mlp"
_ALONE: Final = Fused(tensor=f"{_MLP}.input_linear.weight", of=("mlp.gate", "mlp.up"))
_BESIDE: Final = Fused(tensor=f"{_MLP}.input_linear.weight", of=("shared.gate", "shared.up"))

_SHARED: Final[Mapping[str, Place]] = {
    "layers.{i}.shared.gate": _BESIDE,
    "layers.{i}.shared.up": _BESIDE,
    "layers.{i}.shared.down": f"{_MLP}.output_linear.weight",
}

GRANITE_MOE_SHARED: Final = Family(
    architectures=("GraniteMoeSharedForCausalLM",),
    model_types=("granitemoeshared",),
    keys={**GRANITE_MOE.keys, "shared_size": read("shared_intermediate_size", 0)},
    tensors={**GRANITE_MOE.tensors, **_SHARED},
    prepare=_spell_out,
)

GRANITE_HYBRID: Final = Family(
    architectures=("GraniteMoeHybridForCausalLM",),
    model_types=("granitemoehybrid",),
    keys={
        **GRANITE_MOE.keys,
        "shared_size": read("shared_size", 0),
        **SCAN_KEYS,
    },
    tensors={
        **GRANITE_MOE.tensors,
        **scan_tensors("model.layers.{i}.mamba"),
        "layers.{i}.mlp.gate": _ALONE,
        "layers.{i}.mlp.up": _ALONE,
        "layers.{i}.mlp.down": f"{_MLP}.output_linear.weight",
        **_SHARED,
    },
    demands={"mamba_proj_bias": False, "hidden_act": "silu", "time_step_limit": None},
    prepare=_spell_out_hybrid,
)

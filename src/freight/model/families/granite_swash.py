"""Granite Swash: Granite 3, also with experts, whose heads have a sink each, and three layers of
four a window; layers may rotate by bases of their own, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.granite import GRANITE, GRANITE_HYBRID
from freight.model.families.table import MOST_LAYERS, Family, Key, Stacked, fixed, read

__all__ = ["GRANITE_MOE_SWASH", "GRANITE_SWASH"]


def _name_layers(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of every four layers the first sees all, unless it is said."""
    kinds, num_layers = raw.get("layer_types"), raw.get("num_hidden_layers")
    if kinds is None and isinstance(num_layers, int):
        kinds = [
            "sliding_attention" if i % 4 else "full_attention"
            for i in range(min(num_layers, MOST_LAYERS))
        ]
    shared = raw.get("shared_intermediate_size", 0)
    raw = GRANITE.prepare({**raw, "layer_types": kinds, "shared_size": shared})
    bases = raw.get("layer_rope_theta")
    if not isinstance(bases, list) or not isinstance(kinds, list):
        return raw
    return {**raw, **_by_kind(raw, kinds, bases)}


def _by_kind(raw: Mapping[str, Any], kinds: list[Any], bases: list[Any]) -> Mapping[str, Any]:
    """A base of 0 is of a layer that does not rotate; those of one kind have one other."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    sets = {kind: given for kind in kinds if isinstance(kind, str)}
    for kind, base in zip(kinds, bases, strict=False):
        if base and isinstance(kind, str) and isinstance(given, Mapping):
            is_other = sets[kind] is not given and sets[kind]["rope_theta"] != base
            sets[kind] = {**given, "rope_theta": "different" if is_other else base}
    return {
        "rope_layers": [bool(base) for base in bases],
        "rope_parameters": sets,
        "rope_scaling": None,
    }


_OWN: Final = {
    "attention_sinks": fixed(True),
    "uses_windows": fixed(True),
    "window": Key(names=("sliding_window",), default=128, null_is_value=True),
}
_SINKS: Final = {"layers.{i}.attention.sinks": "model.layers.{i}.self_attn.sinks"}

_MOE: Final = "model.layers.{i}.block_sparse_moe"
_GATE_UP: Final = f"{_MOE}.experts.gate_up_proj"

GRANITE_SWASH: Final = Family(
    architectures=("GraniteSWAForCausalLM",),
    model_types=("granite_swa",),
    keys={
        **GRANITE.keys,
        **_OWN,
        "norm_eps": read("rms_norm_eps", 1e-5),
        "num_kv_heads": read("num_key_value_heads", 4),
        "tied_embeddings": read("tie_word_embeddings", True),
    },
    tensors={**GRANITE.tensors, **_SINKS},
    prepare=_name_layers,
)

GRANITE_MOE_SWASH: Final = Family(
    architectures=("GraniteMoeSWAForCausalLM",),
    model_types=("granitemoe_swa",),
    keys={
        **GRANITE_HYBRID.keys,
        **_OWN,
        "recurrent_taps": fixed(None),
    },
    tensors={
        **GRANITE_HYBRID.tensors,
        **_SINKS,
        "layers.{i}.router.weight": f"{_MOE}.router.weight",
        "layers.{i}.experts.{e}.gate": Stacked(tensor=_GATE_UP, parts=2, part=0),
        "layers.{i}.experts.{e}.up": Stacked(tensor=_GATE_UP, parts=2, part=1),
        "layers.{i}.experts.{e}.down": Stacked(tensor=f"{_MOE}.experts.down_proj"),
    },
    prepare=_name_layers,
)

"""Falcon-H1: each layer attends and keeps a state by a scan, side by side, and has an MLP; what its
matrices make is multiplied by factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.bamba import BAMBA
from freight.model.families.scans import spell_out_scan
from freight.model.families.table import MOST_LAYERS, Family, fixed, is_number, read

__all__ = ["FALCON_H1"]

_SCANNED: Final = ("gate", "values", "keys", "queries", "a")


def _times(*factors: object) -> object:
    """The product; what is no number, for it to be refused."""
    made = 1.0
    for factor in (1.0 if factor is None else factor for factor in factors):
        if not is_number(factor):
            return factor
        made *= factor
    return made


def _spell_out(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Factors by the matrices whose products they multiply: those of what goes into attention and
    the scan belong to all that is made of it. A norm that there is not has no place."""
    num_layers, width = raw.get("num_hidden_layers", 32), raw.get("mamba_d_ssm", 1024)
    heads = raw.get("mamba_n_heads", 128)
    changes: dict[str, Any] = {}
    if isinstance(num_layers, int):
        changes["layer_types"] = ["linear_attention"] * min(num_layers, MOST_LAYERS)
    whole = isinstance(width, int) and isinstance(heads, int) and heads > 0
    if raw.get("mamba_d_head", "auto") == "auto" and whole:
        changes["mamba_d_head"] = width // heads
    if not raw.get("mamba_rms_norm"):
        changes["mamba_norm_before_gate"] = False
    elif "mamba_norm_before_gate" not in raw:
        changes["mamba_norm_before_gate"] = True
    attended, scanned = raw.get("attention_in_multiplier", 1.0), raw.get("ssm_in_multiplier", 1.0)
    factors = {
        "attention.q": attended,
        "attention.k": _times(attended, raw.get("key_multiplier", 1.0)),
        "attention.v": attended,
        "attention.out": raw.get("attention_out_multiplier", 1.0),
        "recurrence.out": raw.get("ssm_out_multiplier", 1.0),
    }
    lists = {
        "ssm_multipliers": [f"recurrence.{name}" for name in _SCANNED],
        "mlp_multipliers": ["mlp.gate", "mlp.down"],
    }
    for name, targets in lists.items():
        given = raw.get(name) or [1.0] * len(targets)
        if not isinstance(given, list) or len(given) != len(targets):
            given = [given] * len(targets)  # to be refused
        factors |= dict(zip(targets, given, strict=True))
    for name in lists["ssm_multipliers"]:
        factors[name] = _times(scanned, factors[name])
    return {**spell_out_scan({**raw, **changes}), "matrix_factors": factors}


FALCON_H1: Final = Family(
    architectures=("FalconH1ForCausalLM",),
    model_types=("falcon_h1",),
    keys={
        **BAMBA.keys,
        "max_positions": read("max_position_embeddings", 8192),
        "rotary_share": fixed(1.0),
        "embedding_scale": read("embedding_multiplier", 1.0),
        "logits_scale": read("lm_head_multiplier", 1.0),
        "recurrent_norm": read("mamba_rms_norm", False),
        "recurrent_beside": fixed(True),
    },
    tensors=BAMBA.tensors,
    demands={
        **BAMBA.demands,
        "attention_bias": False,
        "mlp_bias": False,
        "projectors_bias": False,
        "mamba_norm_before_gate": False,
    },
    prepare=_spell_out,
)

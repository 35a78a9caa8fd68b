"""What families with a scan (Mamba-2) have in common: names of tensors, and what config.json only
implies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from freight.model.families.table import Fused, Place, fixed, read

__all__ = ["SCAN_KEYS", "scan_tensors", "spell_out_scan"]

_INFINITE: Final = (math.inf, "inf", "Infinity", {"__float__": "Infinity"})

SCAN_KEYS: Final = {
    "recurrent_rule": fixed("scan"),
    "recurrent_bias": read("mamba_conv_bias", True),
    "recurrent_taps": read("mamba_d_conv", 4),
    "recurrent_key_heads": read("mamba_n_groups", 1),
    "recurrent_heads": read("mamba_n_heads", 128),
    "recurrent_key_width": read("mamba_d_state", 256),
    "recurrent_value_width": read("mamba_d_head", None),
}


def spell_out_scan(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The width of a head, where it follows from others; limits of time steps that are none."""
    width, heads = raw.get("hidden_size"), raw.get("mamba_n_heads", 128)
    expansion, given = raw.get("mamba_expand", 2), raw.get("mamba_d_head", "auto")
    counts = (width, heads, expansion)
    changes: dict[str, Any] = {"time_step_limit": raw.get("time_step_limit")}
    if given == "auto" and all(isinstance(own, int) and own > 0 for own in counts):
        changes["mamba_d_head"] = width * expansion // heads
    match changes["time_step_limit"]:
        case [0, most] if most in _INFINITE:
            changes["time_step_limit"] = None
    return {**raw, **changes}


def scan_tensors(prefix: str) -> Mapping[str, Place]:
    """Logical names with their places under ``prefix``. Gates, what is convolved, and rates are
    made by one matrix."""
    mixed = Fused(
        tensor=f"{prefix}.in_proj.weight",
        of=("recurrence.gate", "recurrence.mixed", "recurrence.a"),
    )
    return {
        "layers.{i}.recurrence.gate": mixed,
        "layers.{i}.recurrence.mixed": mixed,
        "layers.{i}.recurrence.a": mixed,
        "layers.{i}.recurrence.convolution": f"{prefix}.conv1d.weight",
        "layers.{i}.recurrence.convolution_bias": f"{prefix}.conv1d.bias",
        "layers.{i}.recurrence.decay": f"{prefix}.A_log",
        "layers.{i}.recurrence.decay_bias": f"{prefix}.dt_bias",
        "layers.{i}.recurrence.skip": f"{prefix}.D",
        "layers.{i}.recurrence.read_norm": f"{prefix}.norm.weight",
        "layers.{i}.recurrence.out": f"{prefix}.out_proj.weight",
    }

"""Where tables have what residual streams are mapped by, in models that have several."""

from __future__ import annotations

from collections.abc import Mapping

from freight.model.families.table import Place, first_of

__all__ = ["stream_tensors"]


def stream_tensors(names: Mapping[str, tuple[str, ...]]) -> dict[str, Place]:
    """Of the parts "attention" and "mlp" of a layer, and of the "head", by what the ``names`` of
    these tensors may begin with."""
    own: dict[str, Place] = {}
    for part, spelt in names.items():
        prefix = part if part == "head" else f"layers.{{i}}.{part}"
        for name, last in {"weight": "fn", "base": "base", "scale": "scale"}.items():
            own[f"{prefix}.streams.{name}"] = first_of(*(f"{place}{last}" for place in spelt))
    return own

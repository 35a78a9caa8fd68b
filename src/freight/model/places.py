"""Which tensor of a checkpoint holds a logical one, by the tables of the families.

Knows names and shapes, no files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from freight.model.families import Either, Fused, Place, Stacked
from freight.model.switches import ModelConfig

__all__ = ["locate"]

# "layers.3.mlp.up" and "layers.3.experts.7.up": layer, expert, what is left.
_NUMBERED: Final = re.compile(r"layers\.(\d+)\.(?:experts\.(\d+)\.)?(.+)")


def locate(
    tensors: Mapping[str, Place],
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    name: str,
) -> tuple[str, int, tuple[int, ...]]:
    """The tensor that holds ``name`` by the table ``tensors``, the first of its rows there, and its
    shape."""
    if name == "head.weight" and config.tied_embeddings:
        name = "embedding"
    matched = _NUMBERED.match(name)
    layer, expert, rest = matched.groups() if matched else ("", "", "")
    prefix = f"layers.{layer}." if matched else ""
    key = name
    if matched:
        key = f"layers.{{i}}.{rest}" if expert is None else f"layers.{{i}}.experts.{{e}}.{rest}"
    place = _choose(tensors[key], config)
    if isinstance(place, Stacked):
        assert config.experts is not None
        rows, *columns = shapes[name]
        whole = (config.experts.num_experts * rows, *columns)
        return place.tensor.format(i=layer), int(expert) * rows, whole
    if not isinstance(place, Fused):
        return place.format(i=layer, e=expert), 0, shapes[name]
    parts = [shapes[prefix + part][0] for part in place.of]
    first_row = sum(parts[: place.of.index(name.removeprefix(prefix))])
    return place.tensor.format(i=layer), first_row, (sum(parts), *shapes[name][1:])


def _choose(place: Place, config: ModelConfig) -> str | Fused | Stacked:
    while isinstance(place, Either):
        place = place.then if getattr(config, place.switch) else place.otherwise
    return place

"""Which tensor of a checkpoint holds a logical one, by the tables of the families.

Knows names and shapes, no files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from freight.model.families import Either, Fused, Halves, OneOf, Place, Stacked
from freight.model.layer_kinds import CompressedKeys, Recurrence
from freight.model.switches import ModelConfig

__all__ = ["Located", "locate", "spellings"]

_CONVOLUTIONS: Final = re.compile(r"recurrence\.([qkv]_)?convolution")
"""Of each channel, over so many tokens."""

# "layers.3.mlp.up" and "layers.3.experts.7.up": layer, expert, what is left.
_NUMBERED: Final = re.compile(r"layers\.(\d+)\.(?:experts\.(\d+)\.)?(.+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """Every ``every``-th row of ``tensor``, of this ``shape``, from ``first_row`` on; one that is
    ``turned`` is [columns, rows] in the checkpoint, of experts [experts, columns, rows of one].
    ``published`` is the shape that it has for those who made it, where that has other dims. With
    ``halves`` it has columns of heads, one under the other, whose other rows lie in a second
    tensor. Where ``tensor`` is not there it is ``otherwise``."""

    tensor: str
    first_row: int
    shape: tuple[int, ...]
    every: int = 1
    turned: bool = False
    published: tuple[int, ...] = ()
    halves: tuple[str, tuple[int, ...]] | None = None
    otherwise: Located | None = None


def spellings(tensor: str) -> tuple[str, ...]:
    """What a tensor may be called: some checkpoints hold the model without the prefix of what it is
    part of, and those of models that also see hold it as one part of several."""
    _, _, inner = tensor.partition(".")
    of_parts = f"language_model.{tensor}", f"model.language_model.{inner}"
    return tensor, inner, *of_parts, f"model.text_model.{inner}", f"thinker.{tensor}"


def locate(
    tensors: Mapping[str, Place],
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    name: str,
) -> Located:
    """Where ``name`` is by the table ``tensors``; where that lacks it, under its own name, which no
    checkpoint has."""
    if name == "head.weight" and config.tied_embeddings:
        name = "embedding"
    matched = _NUMBERED.match(name)
    layer, expert, rest = matched.groups() if matched else ("", "", "")
    prefix = f"layers.{layer}." if matched else ""
    key = name
    if matched:
        key = f"layers.{{i}}.{rest}" if expert is None else f"layers.{{i}}.experts.{{e}}.{rest}"
    found = _Name(name=name, prefix=prefix, layer=layer, expert=expert or "", rest=rest)
    return _locate(tensors.get(key, name), config, shapes, found)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Name:
    """A logical name and its parts."""

    name: str
    prefix: str
    layer: str
    expert: str
    rest: str


def _locate(
    given: Place, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], own: _Name
) -> Located:
    if isinstance(given, OneOf):
        first, otherwise = (
            _locate(place, config, shapes, own) for place in (given.first, given.otherwise)
        )
        return replace(first, otherwise=otherwise)
    place, layer, expert = _choose(given, config), own.layer, own.expert
    rows, *columns = shapes[own.name]
    if isinstance(place, Stacked):
        assert config.experts is not None
        times = place.every * place.parts
        each = (rows * times, *columns)
        published = (config.experts.num_experts, *(each[::-1] if place.turned else each))
        return Located(
            tensor=place.tensor.format(i=layer),
            first_row=int(expert) * rows * times + place.part * rows + place.first,
            shape=(config.experts.num_experts * rows * times, *columns),
            every=place.every,
            turned=place.turned,
            published=published if columns else (),
        )
    if isinstance(place, Halves):
        assert config.latent is not None
        heads, (rank,) = config.num_heads, columns
        return Located(
            tensor=place.turned.format(i=layer),
            first_row=0,
            shape=(heads * rank, config.latent.key_width),
            halves=(place.rest.format(i=layer), (heads * config.latent.value_width, rank)),
        )
    if not isinstance(place, Fused):
        return Located(
            tensor=place.format(i=layer, e=expert),
            first_row=0,
            shape=shapes[own.name],
            published=() if columns else _published(config, own, rows),
        )
    named = {part: shapes.get(own.prefix + part, (0,))[0] for part in place.of}
    parts = [*named.values()]
    shape = (sum(parts), *columns)
    return Located(
        tensor=place.tensor.format(i=layer),
        first_row=sum(parts[: place.of.index(own.name.removeprefix(own.prefix))]),
        shape=shape,
        turned=place.turned,
        published=shape[::-1] if place.turned else (),
    )


def _published(config: ModelConfig, own: _Name, count: int) -> tuple[int, ...]:
    """Of so many numbers that are kept as one row, where those who made them have more dims."""
    kept = config.recurrence
    if _CONVOLUTIONS.fullmatch(own.rest) and isinstance(kept, Recurrence):
        return count // kept.taps, 1, kept.taps
    each = 0
    if own.name.endswith("streams.weight") and config.streams is not None:
        each = config.streams.count * config.hidden_size
    if own.rest == "router.table" and config.experts is not None:
        each = config.experts.per_token
    if own.rest.endswith("source_bias") and isinstance(kept, CompressedKeys):
        each = count // kept.rates[int(own.layer)]
    return (count // each, each) if each else ()


def _choose(place: Place, config: ModelConfig) -> str | Fused | Stacked | Halves:
    while isinstance(place, Either):
        place = place.then if getattr(config, place.switch) else place.otherwise
    assert not isinstance(place, OneOf), "a table puts it outside"
    return place

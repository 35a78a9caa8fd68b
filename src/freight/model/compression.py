"""Which of a model's weights are compressed, and where they would lie.

Matrices that products use are; the embedding's table, of which rows are looked up, is not, nor a
head that shares it; nor, for integer products, a router, whose least error sends a token to another
expert. Knows names and shapes, no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from freight.model.checkpoint import TensorSource
from freight.model.decoder import build_programme
from freight.model.number_format import Compressed, Compression
from freight.model.switches import ModelConfig
from freight.quantities import align_up

__all__ = ["ALIGNMENT", "choose_formats", "compressed_places"]

ALIGNMENT: Final = 4096
"""Where tensors begin in the file of compressed weights: on a block, so that whole blocks are
theirs."""


def choose_formats(
    config: ModelConfig, sources: Mapping[str, TensorSource], compression: Compression
) -> dict[str, Compressed]:
    """The format of each tensor that is compressed, in the order of the units that use them."""
    formats: dict[str, Compressed] = {}
    for unit in build_programme(config).units[1:]:
        if compression.is_for_integers and unit.kind == "router":
            continue
        for weight in unit.weights:
            if not weight.is_matrix or (weight.name == "head.weight" and config.tied_embeddings):
                continue
            number_format = compression.fit(sources[weight.name].shape[-1])
            if number_format is not None:
                formats.setdefault(weight.name, number_format)
    return formats


def compressed_places(
    sources: Mapping[str, TensorSource], formats: Mapping[str, Compressed], path: Path
) -> dict[str, TensorSource]:
    """All tensors, the compressed ones one after the other in the file at ``path``."""
    places = dict(sources)
    offset = 0
    for name, number_format in formats.items():
        rows, columns = sources[name].shape
        size = rows * number_format.row_bytes(columns)
        places[name] = replace(
            sources[name], path=path, offset=offset, num_bytes=size, dtype=number_format.name
        )
        offset = align_up(offset + size, ALIGNMENT)
    return places

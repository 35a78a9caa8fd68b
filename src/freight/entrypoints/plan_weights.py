"""Where a model's weights would lie, and what they take on the disk: as they were published, and
beside them what is made of those that are compressed.

Knows a model's configuration, or its tensors where they are at hand; no machines and no plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Final

from freight.model.checkpoint import dummy_dtype, imagined_sources
from freight.model.compression import (
    announced_formats,
    choose_formats,
    compressed_places,
    packed_formats,
    refuse_compression,
)
from freight.model.config import DTYPE_BYTES, ModelConfig
from freight.model.decoder import count_parameters
from freight.model.number_format import Compression, EightFloats, ExactCompression
from freight.model.sources import TensorSource

__all__ = ["checkpoint_bytes", "copy_bytes", "planned_sources"]

_Sources = Mapping[str, TensorSource]
_Compression = Compression | ExactCompression | None

_COPY: Final = Path("compressed")
_FLOATS: Final = EightFloats()


def planned_sources(
    config: ModelConfig, dtype: str, stored: _Sources, compression: _Compression
) -> _Sources:
    """Where weights would lie: compressed if asked for, or as the checkpoint has quantised them, by
    its own word where it is at hand as ``stored``, else by that of config.json."""
    return _places(config, stored, compression) if stored else _imagined(config, dtype, compression)


def checkpoint_bytes(config: ModelConfig, dtype: str, stored: _Sources) -> int:
    """What the checkpoint takes as it was published."""
    if stored:
        return sum(path.stat().st_size for path in {own.path for own in stored.values()})
    if config.packing is None:
        return DTYPE_BYTES[dummy_dtype(config, dtype)] * count_parameters(config)
    blocks = config.packing.group_size if config.packing.scheme == _FLOATS.name else None
    return _sum(_as_published(own, blocks) for own in _imagined(config, dtype, None).values())


def _as_published(source: TensorSource, blocks: int | None) -> TensorSource:
    """Floats of 8 bits have a scale for each block of rows and columns, of which each row has one
    where they are kept."""
    if blocks is None or source.dtype != _FLOATS.name:
        return source
    rows, columns = source.shape
    scales = 4 * -(-rows // blocks) * -(-columns // blocks)
    return replace(source, num_bytes=rows * columns + scales)


def copy_bytes(config: ModelConfig, dtype: str, stored: _Sources, compression: _Compression) -> int:
    """What runs keep beside it: matrices in the form that they use."""
    if not stored and config.packing is None and compression is None:
        return 0
    sources = planned_sources(config, dtype, stored, compression)
    return _sum(own for own in sources.values() if own.path == _COPY)


@lru_cache(maxsize=8)
def _imagined(config: ModelConfig, dtype: str, compression: _Compression) -> _Sources:
    return _places(config, imagined_sources(config, dtype), compression)


def _places(config: ModelConfig, sources: _Sources, compression: _Compression) -> _Sources:
    formats = packed_formats(sources) or announced_formats(config, sources)
    if compression is not None:
        refuse_compression(formats, compression)
        formats = choose_formats(config, sources, compression)
    return compressed_places(sources, formats, _COPY)


def _sum(sources: Iterable[TensorSource]) -> int:
    """Of tensors, each once: some are known by two names."""
    return sum({(own.path, own.offset): own.num_bytes for own in sources}.values())

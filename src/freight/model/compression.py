"""Which of a model's weights are compressed, and where they would lie.

By wish, all matrices that products use; the embedding's tables, of which rows are looked up, stay
plain then, and a head that shares one, and, for integer products, a router, whose least error sends
a token to another expert. What makes the rates by which states change stays plain, too: it is a
thousandth of a layer, and its errors add up over tokens. Where nothing is lost, these too. Or those
that the checkpoint has quantised already, as they are. Knows names and shapes, no tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from freight.errors import InputError
from freight.model.decoder import build_programme
from freight.model.families import FAMILIES
from freight.model.layer_kinds import CompressedKeys
from freight.model.number_format import (
    Compression,
    ExactCompression,
    Grouped,
    find_compressed,
    row_bytes,
)
from freight.model.packed_tensors import becomes
from freight.model.places import locate
from freight.model.sources import ADAPTED, TensorSource
from freight.model.switches import ModelConfig
from freight.quantities import align_up

__all__ = [
    "ALIGNMENT",
    "announced_formats",
    "choose_formats",
    "compressed_places",
    "describe_fit",
    "kind_of",
    "packed_formats",
    "refuse_compression",
    "shortened_names",
]

ALIGNMENT: Final = 4096
"""Where tensors begin in the file of compressed weights: on a block, so that whole blocks are
theirs."""

_RATES: Final = (
    *(f".recurrence.{name}" for name in ("a", "b", "ba", "a_down")),
    *(f".recurrence.{name}" for name in ("sources", "source_gates")),
    *(f".recurrence.index_{name}" for name in ("sources", "source_gates", "weights", "q")),
    *(f".attention.index_{name}" for name in ("weights", "q", "k")),
)
_NUMBERS: Final = re.compile(r"^layers\.\d+\.|(?<=experts\.)\d+\.")


def choose_formats(
    config: ModelConfig,
    sources: Mapping[str, TensorSource],
    compression: Compression | ExactCompression | None,
    spared: Mapping[str, int] | None = None,
) -> dict[str, str]:
    """The format of each tensor that is compressed, in the order of the units that use them, beside
    those that are packed without being quantised; None: of those that the checkpoint has packed.
    ``spared``: of tensors of a kind, how many exponents of a row have no code at most, where it is
    known. InputError where there is something to compress that is quantised already."""
    formats = packed_formats(sources)
    if compression is None:
        return formats
    refuse_compression(formats, compression)
    if isinstance(compression, ExactCompression):
        for name in shortened_names(config, sources):
            spare = None if spared is None else spared[kind_of(name)]
            short = compression.fit(sources[name].shape[-1], spare)
            if short is not None:
                formats[name] = short.name
        return formats
    with_routers = not compression.is_for_integers
    for name in _matrices(config, with_routers=with_routers, with_rates=False):
        if compression.is_for_integers and name.endswith(".kv_up"):
            continue  # heads take their own rows of it
        number_format = compression.fit(*_fitted_shape(config, name, sources[name].shape))
        if number_format is not None:
            formats[name] = number_format.name
    return formats


def _fitted_shape(config: ModelConfig, name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns that groups are to divide: of a product in groups of heads one of these."""
    rows, columns = shape
    own = config.recurrence
    if isinstance(own, CompressedKeys) and name.endswith(".recurrence.groups"):
        rows //= own.groups
    return rows, columns


def kind_of(name: str) -> str:
    """A tensor's name without numbers of layers and experts."""
    return _NUMBERS.sub("", name)


def shortened_names(config: ModelConfig, sources: Mapping[str, TensorSource]) -> list[str]:
    """Of the tensors whose exponents can be short, in the order of the units: a head that is the
    embedding's table counts as that. What is packed says what it becomes."""
    tables = (weight.name for weight in build_programme(config).embedding.tables)
    names = [*tables, *_matrices(config, with_routers=True)]
    return [name for name in names if sources[name].dtype == "bfloat16"]


def describe_fit(
    config: ModelConfig,
    sources: Mapping[str, TensorSource],
    compression: Compression | ExactCompression | None,
) -> str:
    """What to tell where groups are smaller than was asked, or matrices plain; else nothing."""
    if isinstance(compression, ExactCompression):
        if shortened_names(config, sources):
            return ""
        return "no weights are bfloat16, whose exponents could be short: they stay as they are"
    if compression is None or compression.group_size is None:
        return ""
    found: dict[str, str] = {}
    for name in _matrices(config, with_routers=True):
        own = compression.fit(*_fitted_shape(config, name, sources[name].shape))
        kind = kind_of(name)
        if own is None:
            found[kind] = f"{kind} stays plain"
        elif isinstance(own, Grouped) and own.group_size < compression.group_size:
            found[kind] = f"{kind} has groups of {own.group_size}"
    if not found:
        return ""
    return f"{compression.group_size} does not divide all matrices: {', '.join(found.values())}"


def packed_formats(sources: Mapping[str, TensorSource]) -> dict[str, str]:
    """What each tensor becomes that the checkpoint has packed; of two that are one, the first."""
    first: dict[object, str] = {}
    for name, source in sources.items():
        if source.packed is not None:
            first.setdefault(_identity(source), name)
    return {name: sources[name].dtype for name in first.values()}


def _identity(source: TensorSource) -> object:
    """The same for two names of one tensor."""
    own = source.packed
    rows = (0, 1, None) if own is None else (own.first_row, own.every, own.dealt)
    parts = () if own is None else own.parts.values()
    added = tuple(_identity(p) for p in parts if p.packed or (own and own.scheme == ADAPTED))
    return source.path, source.offset, rows, source.shape, added


def announced_formats(config: ModelConfig, sources: Mapping[str, TensorSource]) -> dict[str, str]:
    """What config.json alone says that they become: the layers' matrices, but routers and what it
    leaves out."""
    if config.packing is None:
        return {}
    tensors = FAMILIES[config.family].tensors
    shapes = {name: source.shape for name, source in sources.items()}
    formats = {}
    for name in _matrices(config, with_routers=False):
        module = locate(tensors, config, shapes, name).tensor.removesuffix(".weight")
        if name.startswith("layers.") and not config.packing.skips(module):
            of_expert, columns = ".experts." in name, sources[name].shape[-1]
            own = becomes(config.packing, columns, config.dtype, of_expert=of_expert)
            formats[name] = own.name
    return formats


def refuse_compression(
    formats: Mapping[str, str], compression: Compression | ExactCompression
) -> None:
    """InputError where one of the formats that a checkpoint has is a compressed one."""
    if not any(map(find_compressed, formats.values())):
        return
    raise InputError(
        f"{compression.flag} was given.",
        "The model's checkpoint is quantised already, and is run exactly as it is.",
        f"Leave {compression.flag.split()[0]} out, or take the checkpoint that is not quantised.",
    )


def _matrices(
    config: ModelConfig, *, with_routers: bool, with_rates: bool = True
) -> dict[str, None]:
    """Names of the matrices that products use, in the order of the units; ``with_rates`` also of
    those that say how states change, make one key of several, and choose keys."""
    return {
        weight.name: None
        for unit in build_programme(config).units[1:]
        if with_routers or unit.kind != "router"
        for weight in unit.weights
        if weight.is_matrix and (with_rates or not weight.name.endswith(_RATES))
        if not (weight.name == "head.weight" and config.tied_embeddings)
    }


def compressed_places(
    sources: Mapping[str, TensorSource], formats: Mapping[str, str], path: Path
) -> dict[str, TensorSource]:
    """All tensors, those with a format one after the other in the file at ``path``."""
    made: dict[object, TensorSource] = {}
    offset = 0
    for name, dtype in formats.items():
        source = sources[name]
        rows, *columns = source.shape
        size = rows * row_bytes(dtype, *columns or [1])
        made[_identity(source)] = TensorSource(
            path=path, offset=offset, num_bytes=size, dtype=dtype, shape=source.shape
        )
        offset = align_up(offset + size, ALIGNMENT)
    return {name: made.get(_identity(source), source) for name, source in sources.items()}

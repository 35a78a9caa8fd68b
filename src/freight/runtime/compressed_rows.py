"""A checkpoint's rows as they are kept compressed, made some at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import torch

from freight.errors import ModelError
from freight.kernels.exponents import most_spared, shorten
from freight.kernels.grouped import quantise
from freight.kernels.integers import quantise_rows
from freight.memory.disk import Traffic
from freight.memory.tier import host_arena
from freight.model.compression import kind_of
from freight.model.number_format import (
    Compressed,
    Grouped,
    ShortExponents,
    find_compressed,
    rows_together,
)
from freight.model.sources import TensorSource
from freight.quantities import MIB, align_down, align_up
from freight.runtime.loaders import CheckpointFiles, bounce_bytes, torch_dtype
from freight.runtime.packed_rows import packed_rows

__all__ = ["look_for_spared", "made_rows", "opened", "parts_of"]

_CHUNK_BYTES: Final = 16 * MIB
_BLOCK: Final = 4096


def parts_of(source: TensorSource) -> Iterable[TensorSource]:
    """The tensors of the checkpoint that have to be read."""
    if source.packed is None:
        return [source]
    return [own for part in source.packed.parts.values() for own in parts_of(part)]


@contextmanager
def opened(
    sources: Mapping[str, TensorSource], parts: Sequence[TensorSource]
) -> Iterator[CheckpointFiles]:
    """The files that have these parts, opened for as long."""
    size = bounce_bytes({str(number): part for number, part in enumerate(parts)})
    arena = host_arena(align_up(size, _BLOCK))
    files = CheckpointFiles(sources, Traffic(), arena.take(size, "read buffer"))
    try:
        yield files
    finally:
        files.close()
        arena.close()


def made_rows(
    files: CheckpointFiles, name: str, source: TensorSource, dtype: str
) -> Iterator[torch.Tensor]:
    """A tensor's rows as they are kept, uint8 [rows, bytes], some at a time."""
    number_format = find_compressed(dtype)
    if dtype == source.dtype or number_format is None:
        yield from packed_rows(files, name, source)
        return
    if isinstance(number_format, ShortExponents):
        for rows in _rows_in_place(files, name, source):
            yield shorten(rows, number_format)
        return
    for rows in _together(_plain_rows(files, name, source), rows_together(dtype)):
        yield _compress(rows, number_format)


def _together(chunks: Iterable[torch.Tensor], count: int) -> Iterator[torch.Tensor]:
    """The same rows, a multiple of ``count`` of them at a time."""
    left: torch.Tensor | None = None
    for chunk in chunks:
        rows = chunk if left is None else torch.cat([left, chunk])
        whole = align_down(len(rows), count)
        left = rows[whole:] if whole < len(rows) else None
        if whole:
            yield rows[:whole]
    assert left is None, "groups fill the tensor"


def _compress(rows: torch.Tensor, number_format: Compressed) -> torch.Tensor:
    if isinstance(number_format, Grouped):
        return quantise(rows, number_format)
    return quantise_rows(rows)


def _plain_rows(files: CheckpointFiles, name: str, source: TensorSource) -> Iterator[torch.Tensor]:
    """A tensor in float32, some rows at a time. ModelError where a value is no number."""
    for own in _rows_in_place(files, name, source):
        rows = own.float()
        if not bool(torch.isfinite(rows).all()):
            raise ModelError(
                f"{name} of {source.path.name} was to be compressed.",
                "It has values that are infinite or not numbers.",
                "Run it uncompressed, or fetch the weights again.",
            )
        yield rows


def _rows_in_place(
    files: CheckpointFiles, name: str, source: TensorSource
) -> Iterator[torch.Tensor]:
    """A tensor as it is, some rows at a time."""
    num_rows, columns = source.shape
    dtype = torch_dtype(source.dtype)
    if source.packed is not None:
        for raw in packed_rows(files, name, source):
            yield raw.view(dtype)
        return
    step = max(1, _CHUNK_BYTES // (4 * columns))
    for first in range(0, num_rows, step):
        rows = torch.empty(min(step, num_rows - first), columns, dtype=dtype)
        files.fill(name, first, rows)
        yield rows


def look_for_spared(sources: Mapping[str, TensorSource], names: Iterable[str]) -> dict[str, int]:
    """Of tensors of each kind, how many exponents of a row have no code, at most."""
    spared: dict[str, int] = {}
    with opened(sources, [sources[name] for name in names]) as files:
        for name in names:
            most = max(map(most_spared, _rows_in_place(files, name, sources[name])), default=0)
            spared[kind_of(name)] = max(spared.get(kind_of(name), 0), most)
    return spared

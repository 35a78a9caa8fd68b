"""Where the rows of a weight come from when they are placed in memory: a checkpoint, or dice.

Rows arrive in the compute dtype, whatever the checkpoint's; only a small buffer is in between.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import torch

from freight.kernels.grouped import quantise
from freight.memory.disk import BLOCK, DirectFile, DiskRequest, Traffic
from freight.memory.transfer import host_view
from freight.model.dummy import dummy_rows
from freight.model.number_format import Grouped, find_compressed
from freight.model.sources import TensorSource
from freight.quantities import MIB, align_down, align_up

__all__ = [
    "BOUNCE_BYTES",
    "CheckpointFiles",
    "DummyWeights",
    "RowLoader",
    "bounce_bytes",
    "made_in_memory",
    "torch_dtype",
]

BOUNCE_BYTES: Final = 8 * MIB

_DTYPES: Final = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "I64": torch.int64,
    "I32": torch.int32,
}


def torch_dtype(name: str) -> torch.dtype:
    """The type of a tensor's elements; compressed rows are bytes."""
    return torch.uint8 if find_compressed(name) else _DTYPES[name]


class RowLoader(Protocol):
    """Fills tensors with rows of a weight."""

    def fill(self, name: str, first_row: int, out: torch.Tensor) -> None:
        """``out`` [n, columns], on any device, becomes rows ``first_row`` and on."""


class CheckpointFiles:
    """The checkpoint's files, opened once; weights and single rows are read in place."""

    def __init__(
        self, sources: Mapping[str, TensorSource], traffic: Traffic, bounce: torch.Tensor
    ) -> None:
        self.sources = sources
        self._traffic = traffic
        self._bounce = bounce
        self._files: dict[Path, DirectFile] = {}
        self._opening = threading.Lock()

    def file(self, path: Path) -> DirectFile:
        with self._opening:
            if path not in self._files:
                self._files[path] = DirectFile(path, self._traffic)
            return self._files[path]

    def fill(self, name: str, first_row: int, out: torch.Tensor) -> None:
        num_rows = out.shape[0]
        source = self.sources[name]
        row_bytes = source.num_bytes // (source.shape[0] if len(source.shape) > 1 else 1)
        step = max(1, self.most_bytes // row_bytes)
        for begin in range(0, num_rows, step):
            count = min(step, num_rows - begin)
            rows = self.rows(source, (first_row + begin) * row_bytes, count, row_bytes)
            out[begin : begin + count].copy_(rows)

    def rows(self, source: TensorSource, offset: int, count: int, row_bytes: int) -> torch.Tensor:
        """``count`` rows from byte ``offset`` of a tensor on, in its own dtype, until the next
        call."""
        return _as_rows(source, self.read(source, offset, count * row_bytes), count)

    def rows_at(
        self, source: TensorSource, places: Iterable[tuple[int, int]], row_bytes: int
    ) -> Iterator[torch.Tensor]:
        """Rows at each (byte of the tensor, how many), as by ``rows``, until the next are asked
        for. As many are read at a time as the buffer takes."""
        asked: list[DiskRequest] = []
        firsts: list[int] = []
        for offset, count in places:
            size = count * row_bytes
            begin = align_down(source.offset + offset, BLOCK)
            end = align_up(source.offset + offset + size, BLOCK)
            taken = asked[-1].place + asked[-1].num_bytes if asked else 0
            if taken + end - begin > self._bounce.numel():
                yield from self._rows_of(source, asked, firsts, row_bytes)
                asked, firsts, taken = [], [], 0
            asked.append(
                DiskRequest(offset=begin, place=taken, num_bytes=end - begin, logical_bytes=size)
            )
            firsts.append(taken + source.offset + offset - begin)
        yield from self._rows_of(source, asked, firsts, row_bytes)

    def _rows_of(
        self,
        source: TensorSource,
        asked: Sequence[DiskRequest],
        firsts: Sequence[int],
        row_bytes: int,
    ) -> Iterator[torch.Tensor]:
        self.file(source.path).read_all(asked, host_view(self._bounce))
        for request, first in zip(asked, firsts, strict=True):
            size = request.wanted_bytes
            yield _as_rows(source, self._bounce[first : first + size], size // row_bytes)

    def read(self, source: TensorSource, offset: int, size: int) -> torch.Tensor:
        """So many bytes of a tensor, no more than the buffer holds, until the next call."""
        begin = align_down(source.offset + offset, BLOCK)
        end = align_up(source.offset + offset + size, BLOCK)
        stretch = self._bounce[: end - begin]
        self.file(source.path).read(begin, host_view(stretch), size)
        skip = source.offset + offset - begin
        return stretch[skip : skip + size]

    @property
    def most_bytes(self) -> int:
        """That one read brings."""
        return self._bounce.numel() - 2 * BLOCK

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _as_rows(source: TensorSource, raw: torch.Tensor, count: int) -> torch.Tensor:
    dtype = torch_dtype(source.dtype)
    if raw.storage_offset() % dtype.itemsize:
        raw = raw.clone()  # a file whose data is not even aligned to its own elements
    return raw.view(dtype).view(count, -1)


def made_in_memory(sources: Mapping[str, TensorSource]) -> bool:
    """Whether dice alone make all of the weights: plain ones, and integers whose groups lie within
    a row. Others are made from a file."""
    formats = (find_compressed(source.dtype) for source in sources.values())
    return all(own is None or (isinstance(own, Grouped) and not own.across) for own in formats)


class DummyWeights:
    """Random rows, the same for a seed wherever they are placed. Those that ``sources`` have
    compressed are what plain ones are when they are compressed, by ``device``."""

    def __init__(
        self,
        seed: int,
        kept: torch.dtype,
        *,
        tied_embeddings: bool,
        sources: Mapping[str, TensorSource],
        device: torch.device,
    ) -> None:
        self._seed = seed
        self._kept = kept
        self._tied = tied_embeddings
        self._sources = sources
        self._device = device

    def fill(self, name: str, first_row: int, out: torch.Tensor) -> None:
        own = find_compressed(self._sources[name].dtype)
        columns = self._sources[name].shape[-1]
        if self._tied and name == "head.weight":
            name = "embedding"
        if own is not None:
            assert isinstance(own, Grouped)
            self._fill_compressed(name, first_row, out, own, columns)
        elif out.device.type == "cpu":
            dummy_rows(name, first_row, self._seed, out, self._kept)
        else:
            for begin, rows in _some_at_a_time(out, out.nbytes):
                host = torch.empty(rows.shape, dtype=out.dtype)
                dummy_rows(name, first_row + begin, self._seed, host, self._kept)
                rows.copy_(host)

    def _fill_compressed(
        self, name: str, first_row: int, out: torch.Tensor, own: Grouped, columns: int
    ) -> None:
        # On the way there are several times as many bytes, which on a CPU count in the budget.
        times = 8 if self._device.type == "cpu" else 1
        for begin, rows in _some_at_a_time(out, times * len(out) * columns * self._kept.itemsize):
            host = torch.empty(len(rows), columns, dtype=self._kept)
            dummy_rows(name, first_row + begin, self._seed, host)
            rows.copy_(quantise(host.to(self._device), own))


def _some_at_a_time(out: torch.Tensor, num_bytes: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(first, rows) of ``out``, which all are made from so many bytes."""
    most = max(1, BOUNCE_BYTES * len(out) // max(1, num_bytes))
    for begin in range(0, len(out), most):
        yield begin, out[begin : begin + most]


def bounce_bytes(sources: Mapping[str, TensorSource]) -> int:
    """Size of the buffer for single reads: large enough for one row of any weight."""
    rows = (
        source.num_bytes // (source.shape[0] if len(source.shape) > 1 else 1)
        for source in sources.values()
    )
    row_bytes = max(rows, default=0)
    return max(BOUNCE_BYTES, align_up(row_bytes, BLOCK) + 2 * BLOCK)

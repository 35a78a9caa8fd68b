"""Reads the rows and columns of a checkpoint's matrix that a rank needs, and no other bytes; or
makes them up.

Numbers of rows and columns come in as they are wanted, -1 for padding; neighbours are read at once.
A matrix that is kept in fewer bits is read as numbers, or, in whole groups of integers, as it is.
``bytes_read`` counts what was asked of the files. Knows no layouts and no model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from freight.errors import ModelError
from freight.kernels.grouped import CompressedRows, dequantise, quantise
from freight.model.checkpoint import dummy_dtype
from freight.model.dummy import dummy_rows
from freight.model.number_format import Grouped, RowFormat, find_compressed
from freight.model.sources import Packed, TensorSource
from freight.model.switches import ModelConfig

__all__ = ["CheckpointReader", "DummyReader", "Numbers", "Reader"]

Numbers = npt.NDArray[np.int64]

_DTYPES: Final = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


_MADE_ROWS: Final = 1024

_Field = tuple[int, int, Numbers]
"""Of a row: where a kind of elements begins, the bytes of one, and the numbers of those wanted."""


class Reader(Protocol):
    """Gives parts of tensors by their logical names, which ``sources`` has; ``close`` ends it."""

    sources: Mapping[str, TensorSource]
    bytes_read: int

    def matrix(self, name: str, rows: Numbers, columns: Numbers) -> torch.Tensor:
        """[rows, columns] of a matrix in its own type, 0 where a number is -1."""

    def packed(self, name: str, rows: Numbers, columns: Numbers) -> torch.Tensor:
        """[rows, row bytes] of a matrix of integers in groups, for columns that are whole groups;
        where a number is -1 they stand for 0."""

    def vector(self, name: str) -> torch.Tensor:
        """A whole one, [columns]."""

    def close(self) -> None: ...


class CheckpointReader:
    """Of files, each of which is opened once; ``close`` gives them back."""

    def __init__(self, sources: Mapping[str, TensorSource]) -> None:
        self.sources = sources
        self.bytes_read = 0
        self._files: dict[Path, int] = {}

    def matrix(self, name: str, rows: Numbers, columns: Numbers) -> torch.Tensor:
        """[rows, columns] of a matrix in the checkpoint's type, 0 where a number is -1. ModelError
        where a file ends too early."""
        source = self.sources[name]
        if isinstance(own := find_compressed(source.dtype), RowFormat):
            return self._made_plain(name, own, rows, columns)
        dtype, packed = _DTYPES[source.dtype], source.packed
        if packed is None:
            found = self._parts(source, rows, [(0, dtype.itemsize, columns)])
            return torch.from_numpy(found).view(dtype)
        _demand_rows(name, packed)
        part, of_rows = packed.parts["rows"], len(source.shape) > 1
        numbers = rows if of_rows else columns
        numbers = np.where(numbers < 0, -1, packed.first_row + packed.every * numbers)
        if packed.turned:  # its rows are the columns of what is in the file
            found = self._parts(part, columns, [(0, dtype.itemsize, numbers)])
            return torch.from_numpy(found).view(dtype).t()
        if of_rows:
            found = self._parts(part, numbers, [(0, dtype.itemsize, columns)])
        else:
            found = self._parts(_flat(part), rows, [(0, dtype.itemsize, numbers)])
        return torch.from_numpy(found).view(dtype)

    def packed(self, name: str, rows: Numbers, columns: Numbers) -> torch.Tensor:
        """[rows, row bytes] of a matrix of integers in groups. ModelError where a file ends too
        early."""
        source = self.sources[name]
        return torch.from_numpy(self._parts(source, rows, _fields(source, columns)))

    def _made_plain(
        self, name: str, own: RowFormat, rows: Numbers, columns: Numbers
    ) -> torch.Tensor:
        """[rows, columns] in float32, of whole rows, some at a time."""
        source, width = self.sources[name], self.sources[name].shape[-1]
        fields = [(0, 1, np.arange(own.row_bytes(width)))]
        if isinstance(own, Grouped):
            fields = _fields(source, np.arange(width))
        chosen = torch.from_numpy(columns)
        out = torch.zeros(len(rows), len(columns))
        plain = torch.empty(_MADE_ROWS, width)
        for begin in range(0, len(rows), _MADE_ROWS):
            some = rows[begin : begin + _MADE_ROWS]
            raw = torch.from_numpy(self._parts(source, some, fields))
            values = plain[: len(some)]
            dequantise(CompressedRows(raw=raw, columns=width, number_format=own), values)
            part = values[:, chosen.clamp(min=0)].masked_fill_(chosen < 0, 0)
            out[begin : begin + len(some)] = part
        return out

    def _parts(
        self, source: TensorSource, rows: Numbers, fields: Sequence[_Field]
    ) -> npt.NDArray[np.uint8]:
        """[rows, bytes]: of each row the wanted elements of its fields, one after the other."""
        row_bytes = source.num_bytes // (source.shape[0] if len(source.shape) > 1 else 1)
        out = np.zeros((len(rows), sum(len(own) * size for _, size, own in fields)), np.uint8)
        stretches, width = [], 0
        for start, size, numbers in fields:
            for within, begin, count in _runs(numbers):
                stretches.append((width + within * size, start + begin * size, count * size))
            width += len(numbers) * size
        stretches = [*_joined(stretches)]
        whole = stretches == [(0, 0, row_bytes)]
        for place, first, count in _runs(rows):
            if whole:
                self._read(source, first * row_bytes, out[place : place + count])
                continue
            for row in range(count):
                for within, begin, size in stretches:
                    target = out[place + row, within : within + size]
                    self._read(source, (first + row) * row_bytes + begin, target)
        return out

    def vector(self, name: str) -> torch.Tensor:
        """A whole one, [columns]."""
        numbers = np.arange(self.sources[name].shape[-1])
        return self.matrix(name, np.zeros(1, dtype=np.int64), numbers)[0]

    def _read(self, source: TensorSource, offset: int, out: npt.NDArray[np.uint8]) -> None:
        if source.path not in self._files:
            self._files[source.path] = os.open(source.path, os.O_RDONLY)
        target = out.reshape(-1).data
        begin, done = source.offset + offset, 0
        while done < len(target):
            count = os.preadv(self._files[source.path], [target[done:]], begin + done)
            if not count:
                raise ModelError(
                    f"Bytes {begin} to {begin + len(target)} of {source.path} were to be read.",
                    "The file ends before.",
                    "Fetch the model again.",
                )
            done += count
        self.bytes_read += done

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()


class DummyReader:
    """Of random weights, those that a run on one machine in this ``dtype`` makes of the seed.
    ``sources`` say what is compressed of them."""

    def __init__(
        self, config: ModelConfig, sources: Mapping[str, TensorSource], seed: int, dtype: str
    ) -> None:
        self.sources = sources
        self.bytes_read = 0
        self._seed = seed
        self._dtype, self._kept = _DTYPES[dtype], _DTYPES[dummy_dtype(config, dtype)]

    def matrix(self, name: str, rows: Numbers, columns: Numbers) -> torch.Tensor:
        """[rows, columns], 0 where a number is -1."""
        own = find_compressed(self.sources[name].dtype)
        chosen = torch.from_numpy(columns)
        dtype = _DTYPES.get(self.sources[name].dtype, self._dtype)
        out = torch.zeros(len(rows), len(columns), dtype=dtype)
        for place, whole in self._whole_rows(name, rows):
            if isinstance(own, Grouped):
                raw = quantise(whole, own)
                packed = CompressedRows(raw=raw, columns=whole.shape[1], number_format=own)
                dequantise(packed, whole)
            part = whole[:, chosen.clamp(min=0)].masked_fill_(chosen < 0, 0)
            out[place : place + len(whole)] = part
        return out

    def packed(self, name: str, rows: Numbers, columns: Numbers) -> torch.Tensor:
        """[rows, row bytes] of a matrix of integers in groups."""
        source = self.sources[name]
        own = find_compressed(source.dtype)
        assert isinstance(own, Grouped)
        fields = _fields(source, columns)
        out = torch.zeros(
            len(rows), sum(len(some) * size for _, size, some in fields), dtype=torch.uint8
        )
        for place, whole in self._whole_rows(name, rows):
            raw, width = quantise(whole, own), 0
            for start, size, numbers in fields:
                for within, begin, count in _runs(numbers):
                    target = width + within * size
                    part = raw[:, start + begin * size : start + (begin + count) * size]
                    out[place : place + len(raw), target : target + count * size] = part
                width += len(numbers) * size
        return out

    def _whole_rows(self, name: str, rows: Numbers) -> Iterator[tuple[int, torch.Tensor]]:
        """(place among the wanted, rows), some at a time."""
        for place, first, count in _runs(rows):
            for begin in range(0, count, _MADE_ROWS):
                size = min(_MADE_ROWS, count - begin)
                whole = torch.empty(size, self.sources[name].shape[-1], dtype=self._dtype)
                dummy_rows(name, first + begin, self._seed, whole, self._kept)
                yield place + begin, whole

    def vector(self, name: str) -> torch.Tensor:
        """A whole one, [columns]."""
        out = torch.empty(self.sources[name].shape[-1], dtype=self._dtype)
        dummy_rows(name, 0, self._seed, out, self._kept)
        return out

    def close(self) -> None:
        """There is nothing to give back."""


def _demand_rows(name: str, packed: Packed) -> None:
    """Of what is done to a tensor only the choice of rows is made here."""
    chosen = Packed(
        scheme=packed.scheme,
        parts=packed.parts,
        first_row=packed.first_row,
        every=packed.every,
        turned=packed.turned,
    )
    assert packed == chosen and packed.scheme in _DTYPES, f"{name} is to be made plain first"


def _flat(source: TensorSource) -> TensorSource:
    """All its numbers as a vector."""
    return replace(source, shape=(prod(source.shape),))


def _fields(source: TensorSource, columns: Numbers) -> list[_Field]:
    """Codes, scales and minima of the groups that columns are whole ones of."""
    own = find_compressed(source.dtype)
    assert isinstance(own, Grouped)
    firsts = columns[:: own.group_size]
    groups = np.where(firsts < 0, -1, firsts // own.group_size)
    width = source.shape[-1]
    scales = own.code_bytes(width)
    minima = scales + own.factor_bytes * width // own.group_size
    return [
        (0, own.code_bytes(own.group_size), groups),
        (scales, own.factor_bytes, groups),
        (minima, own.factor_bytes, groups),
    ]


def _joined(stretches: list[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """(place, begin, size) of stretches, those that follow each other in both as one."""
    last: tuple[int, int, int] | None = None
    for place, begin, size in stretches:
        if last is not None and (last[0] + last[2], last[1] + last[2]) == (place, begin):
            last = (last[0], last[1], last[2] + size)
            continue
        if last is not None:
            yield last
        last = place, begin, size
    if last is not None:
        yield last


def _runs(numbers: Numbers) -> Iterator[tuple[int, int, int]]:
    """(place, first number, count) of neighbours that follow each other; without padding."""
    breaks = np.flatnonzero((np.diff(numbers) != 1) | (numbers[:-1] < 0)) + 1
    for begin, end in zip([0, *breaks], [*breaks, len(numbers)], strict=True):
        if end > begin and numbers[begin] >= 0:
            yield int(begin), int(numbers[begin]), int(end - begin)

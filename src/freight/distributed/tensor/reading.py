"""Reads the rows and columns of a checkpoint's matrix that a rank needs, and no other bytes; or
makes them up.

Numbers of rows and columns come in as they are wanted, -1 for padding; neighbours are read at once.
``bytes_read`` counts what was asked of the files. Knows no layouts and no model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from freight.errors import ModelError
from freight.model.checkpoint import dummy_dtype, imagined_sources
from freight.model.dummy import dummy_rows
from freight.model.sources import TensorSource
from freight.model.switches import ModelConfig

__all__ = ["CheckpointReader", "DummyReader", "Numbers", "Reader"]

Numbers = npt.NDArray[np.int64]

_DTYPES: Final = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


_MADE_ROWS: Final = 1024


class Reader(Protocol):
    """Gives parts of tensors by their logical names, which ``sources`` has; ``close`` ends it."""

    sources: Mapping[str, TensorSource]
    bytes_read: int

    def matrix(self, name: str, rows: Numbers, columns: Numbers) -> torch.Tensor:
        """[rows, columns] of a matrix in its own type, 0 where a number is -1."""

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
        """[rows, columns] of a matrix in the checkpoint's type, 0 where a number is -1.

        ModelError where the checkpoint has it quantised, or ends too early.
        """
        source = self.sources[name]
        if source.packed is not None or source.dtype not in _DTYPES:
            raise ModelError(
                f"A part of a weight of type {source.dtype} was to be read from {source.path}.",
                "Quantised weights cannot be cut over ranks yet.",
                "Use a checkpoint in bfloat16, float16 or float32.",
            )
        dtype = _DTYPES[source.dtype]
        out = np.zeros((len(rows), len(columns) * dtype.itemsize), dtype=np.uint8)
        width = source.shape[-1]
        whole = len(columns) == width and bool((columns == np.arange(width)).all())
        for place, first, count in _runs(rows):
            if whole:
                self._read(source, first * width * dtype.itemsize, out[place : place + count])
                continue
            for within, begin, size in _runs(columns):
                part = slice(within * dtype.itemsize, (within + size) * dtype.itemsize)
                for row in range(count):
                    offset = ((first + row) * width + begin) * dtype.itemsize
                    self._read(source, offset, out[place + row, part])
        return torch.from_numpy(out).view(dtype)

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
    """Of random weights, those that a run on one machine in this ``dtype`` makes of the seed."""

    def __init__(self, config: ModelConfig, seed: int, dtype: str) -> None:
        self.sources: Mapping[str, TensorSource] = imagined_sources(config, dtype)
        self.bytes_read = 0
        self._seed = seed
        self._dtype, self._kept = _DTYPES[dtype], _DTYPES[dummy_dtype(config, dtype)]

    def matrix(self, name: str, rows: Numbers, columns: Numbers) -> torch.Tensor:
        """[rows, columns], 0 where a number is -1."""
        width = self.sources[name].shape[-1]
        chosen = torch.from_numpy(columns)
        out = torch.zeros(len(rows), len(columns), dtype=self._dtype)
        for place, first, count in _runs(rows):
            for begin in range(0, count, _MADE_ROWS):
                size = min(_MADE_ROWS, count - begin)
                whole = torch.empty(size, width, dtype=self._dtype)
                dummy_rows(name, first + begin, self._seed, whole, self._kept)
                part = whole[:, chosen.clamp(min=0)].masked_fill_(chosen < 0, 0)
                out[place + begin : place + begin + size] = part
        return out

    def vector(self, name: str) -> torch.Tensor:
        """A whole one, [columns]."""
        out = torch.empty(self.sources[name].shape[-1], dtype=self._dtype)
        dummy_rows(name, 0, self._seed, out, self._kept)
        return out

    def close(self) -> None:
        """There is nothing to give back."""


def _runs(numbers: Numbers) -> Iterator[tuple[int, int, int]]:
    """(place, first number, count) of neighbours that follow each other; without padding."""
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    for begin, end in zip([0, *breaks], [*breaks, len(numbers)], strict=True):
        if end > begin and numbers[begin] >= 0:
            yield int(begin), int(numbers[begin]), int(end - begin)

"""Reads the rows and columns of a checkpoint's matrix that a rank needs, and no other bytes.

Numbers of rows and columns come in as they are wanted, -1 for padding; neighbours are read at once.
``bytes_read`` counts what was asked of the files. Knows no layouts and no model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from freight.errors import ModelError
from freight.model.sources import TensorSource

__all__ = ["CheckpointReader", "Numbers"]

Numbers = npt.NDArray[np.int64]

_DTYPES: Final = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


class CheckpointReader:
    """Opens each file once; ``close`` gives them back."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self._files: dict[Path, int] = {}

    def matrix(self, source: TensorSource, rows: Numbers, columns: Numbers) -> torch.Tensor:
        """[rows, columns] of a matrix in the checkpoint's type, 0 where a number is -1.

        ModelError where the checkpoint has it quantised, or ends too early.
        """
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

    def vector(self, source: TensorSource) -> torch.Tensor:
        """A whole one, [columns]."""
        numbers = np.arange(source.shape[-1])
        return self.matrix(source, np.zeros(1, dtype=np.int64), numbers)[0]

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


def _runs(numbers: Numbers) -> Iterator[tuple[int, int, int]]:
    """(place, first number, count) of neighbours that follow each other; without padding."""
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    for begin, end in zip([0, *breaks], [*breaks, len(numbers)], strict=True):
        if end > begin and numbers[begin] >= 0:
            yield int(begin), int(numbers[begin]), int(end - begin)

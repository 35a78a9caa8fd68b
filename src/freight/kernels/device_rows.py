"""Matrices of several sets on a CUDA device, of which one launch takes all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from freight.kernels.cuda.choice import kernels_of
from freight.kernels.grouped import CompressedRows
from freight.kernels.sums import ADDS, PUTS

__all__ = ["DeviceRows", "brought"]

_ALIGNMENT: Final = 16
"""In bytes, of rows: what a device loads at once."""

_Matrix = tuple[torch.Tensor | CompressedRows, torch.Tensor | None]


class DeviceRows:
    """Of each set its tokens are multiplied by all of its matrices, each of which one launch takes
    of all sets. A matrix is rows, and a bias if there is any."""

    def __init__(self, sets: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor | None]]]) -> None:
        self._sets = sets  # to be kept while there are addresses
        first = sets[0]
        self._device, self._dtype = first[0][0].device, first[0][0].dtype
        self._columns = first[0][0].shape[1]
        self._has_bias = [bias is not None for _, bias in first]
        self._addresses = np.array(
            [
                [(rows.data_ptr(), 0 if bias is None else bias.data_ptr()) for rows, bias in own]
                for own in sets
            ],
            np.int64,
        )

    @classmethod
    def of(cls, sets: Sequence[Sequence[_Matrix]]) -> DeviceRows | None:
        """None where the kernel does not take them, or there is none."""
        found: list[list[tuple[torch.Tensor, torch.Tensor | None]]] = []
        (first, _), *_ = sets[0]
        if not isinstance(first, torch.Tensor) or kernels_of(first.device).multiply_sets is None:
            return None
        for own in sets:
            found.append([])
            for (rows, bias), (like, other) in zip(own, sets[0], strict=True):
                if not isinstance(rows, torch.Tensor) or not _is_met(rows, bias, first):
                    return None
                if rows.shape != like.shape or (bias is None) != (other is None):
                    return None
                found[-1].append((rows, bias))
        return cls(found)

    def takes(self, x: torch.Tensor, outs: Sequence[torch.Tensor]) -> bool:
        """Whether tokens lie as the kernel wants, and results are to."""
        are_alike = all(own.dtype is self._dtype and own.stride(1) == 1 for own in (x, *outs))
        return are_alike and x.shape[1] == self._columns

    def multiply(
        self,
        x: torch.Tensor,
        numbers: npt.NDArray[np.int64],
        firsts: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        outs: Sequence[torch.Tensor],
        outcomes: Sequence[int],
    ) -> None:
        """Of the sets ``numbers`` each by as many tokens of x [T, columns], from the ``firsts`` on,
        as ``counts`` say; to the same rows of each matrix's ``outs`` [T, rows] goes what is made,
        or onto them, as its outcome says."""
        kernel = kernels_of(self._device).multiply_sets
        assert kernel is not None and set(outcomes) <= {PUTS, ADDS}
        lines = np.empty((len(outs), len(numbers), 4), np.int64)
        lines[..., :2] = self._addresses[numbers].swapaxes(0, 1)
        lines[..., 2], lines[..., 3] = firsts, counts
        table = brought(lines, self._device)
        most = int(counts.max())
        for own, out, outcome, has_bias in zip(table, outs, outcomes, self._has_bias, strict=True):
            kernel(x, own, out, most_tokens=most, has_bias=has_bias, adds=outcome == ADDS)


def brought(numbers: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Numbers on a device that is not waited for: of memory that is not page-locked the copy would
    be."""
    found = torch.from_numpy(numbers)
    if device.type == "cuda":
        found = found.pin_memory()
    return found.to(device, non_blocking=True)


def _is_met(rows: torch.Tensor, bias: torch.Tensor | None, like: torch.Tensor) -> bool:
    """Whether the kernel takes a matrix."""
    return (
        rows.dtype is like.dtype
        and rows.shape[1] == like.shape[1]
        and rows.is_contiguous()
        and rows.data_ptr() % _ALIGNMENT == 0
        and rows.shape[1] * rows.itemsize % _ALIGNMENT == 0
        and (bias is None or (bias.dtype is like.dtype and bias.is_contiguous()))
    )

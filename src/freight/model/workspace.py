"""Scratch memory for the arithmetic: one buffer, cut from the bottom, given back in frames.

Fresh large tensors cost page faults that can exceed the arithmetic on them, so the layers write
into this instead. Knows nothing of the model; its size is fixed when it is made.
"""

from __future__ import annotations

from math import prod

import torch

__all__ = ["Workspace"]

_ALIGNMENT = 64


class _Frame:
    """What is taken inside is given back at the end. A layer opens dozens: no generator is made."""

    __slots__ = ("_mark", "_workspace")

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._mark = 0

    def __enter__(self) -> None:
        self._mark = self._workspace._used

    def __exit__(self, *exception: object) -> None:
        self._workspace._used = self._mark


class Workspace:
    """A stack of tensors over one uint8 buffer; ``peak_bytes`` is the most that was in use."""

    def __init__(self, buffer: torch.Tensor) -> None:
        assert buffer.dtype == torch.uint8 and buffer.dim() == 1
        self._buffer = buffer
        self._num_bytes = buffer.numel()
        self._flat: dict[torch.dtype, torch.Tensor] = {}
        self._used = 0
        self.peak_bytes = 0

    @property
    def device(self) -> torch.device:
        return self._buffer.device

    def take(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor that is valid until the frame around the call ends."""
        count, size, first = prod(shape), dtype.itemsize, self._used
        end = first + count * size
        assert end <= self._num_bytes, (
            f"workspace of {self._num_bytes} bytes is too small for {shape} {dtype} "
            f"on top of {first}"
        )
        if dtype not in self._flat:
            self._flat[dtype] = self._buffer[: self._num_bytes // size * size].view(dtype)
        first //= size
        view = self._flat[dtype][first : first + count].view(shape)
        self._used = -(-end // _ALIGNMENT) * _ALIGNMENT
        self.peak_bytes = max(self.peak_bytes, self._used)
        return view

    def frame(self) -> _Frame:
        """A context: what is taken inside is given back at the end."""
        return _Frame(self)

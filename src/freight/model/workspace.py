"""Scratch memory for the arithmetic: one buffer, cut from the bottom, given back in frames.

Fresh large tensors cost page faults that can exceed the arithmetic on them, so the layers write
into this instead. Knows nothing of the model; its size is fixed when it is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch

__all__ = ["Workspace"]

_ALIGNMENT = 64


class Workspace:
    """A stack of tensors over one uint8 buffer; ``peak_bytes`` is the most that was in use."""

    def __init__(self, buffer: torch.Tensor) -> None:
        assert buffer.dtype == torch.uint8 and buffer.dim() == 1
        self._buffer = buffer
        self._used = 0
        self.peak_bytes = 0

    @property
    def device(self) -> torch.device:
        return self._buffer.device

    def take(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor that is valid until the frame around the call ends."""
        num_bytes = prod(shape) * dtype.itemsize
        end = self._used + num_bytes
        assert end <= self._buffer.numel(), (
            f"workspace of {self._buffer.numel()} bytes is too small for {shape} {dtype} "
            f"on top of {self._used}"
        )
        view = self._buffer[self._used : end].view(dtype).view(shape)
        self._used = -(-end // _ALIGNMENT) * _ALIGNMENT
        self.peak_bytes = max(self.peak_bytes, self._used)
        return view

    @contextmanager
    def frame(self) -> Iterator[None]:
        """What is taken inside is given back at the end."""
        mark = self._used
        try:
            yield
        finally:
            self._used = mark

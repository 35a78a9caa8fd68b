"""What kernels are tried with: the same numbers whenever they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

__all__ = ["Trial", "trial_numbers"]

Trial = Callable[[], Iterator[torch.Tensor]]
"""Does what is tried, and hands out what it finds."""


def trial_numbers(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The same each time, whatever was drawn before."""
    dice = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=dice).to(device, dtype)

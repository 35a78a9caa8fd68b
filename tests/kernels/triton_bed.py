"""Where Triton's kernels are tested: on the CUDA device if there is one, else in Triton's
interpreter, on the CPU's tensors. Tests that import this are skipped where triton is not installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import pytest
import torch

from freight.kernels.cuda.choice import Kernels, kernels_of, load_kernels, use_kernels

pytest.importorskip("triton", reason="triton is not installed")

attention = import_module("freight.kernels.cuda.attention")

ON_DEVICE = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_DEVICE else torch.device("cpu")
EXAMPLES = 100 if ON_DEVICE else 20
"""Of a test: the interpreter takes a second for some."""


def loaded() -> Kernels:
    kernels = load_kernels()
    assert kernels is not None
    return kernels


@contextmanager
def in_use(kernels: Kernels) -> Iterator[None]:
    """These, for tensors of the device, until the end."""
    before = kernels_of(DEVICE)
    use_kernels(DEVICE, kernels)
    try:
        yield
    finally:
        use_kernels(DEVICE, before)

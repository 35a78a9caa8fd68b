"""Where Triton's kernels are tested: on the CUDA device if there is one, else in Triton's
interpreter, on the CPU's tensors. Tests that import this are skipped where triton is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from inspect import ismodule
from typing import Any

import pytest
import torch

from freight.kernels.cuda.choice import Kernels, kernels_of, load_kernels, use_kernels

pytest.importorskip("triton", reason="triton is not installed")

attention = import_module("freight.kernels.cuda.attention")

ON_DEVICE = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_DEVICE else torch.device("cpu")
EXAMPLES = 100 if ON_DEVICE else 20
"""Of a test: the interpreter takes a second for some."""


def _patch_once() -> None:
    """The interpreter puts its own functions in place of the language's for each function that a
    kernel calls, a third of what it does; here once for each launch."""
    interpreter, language = map(import_module, ("triton.runtime.interpreter", "triton.language"))
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[tuple[bool, bool]] = set()

    @cache
    def seen(function: Callable[..., Any]) -> tuple[bool, bool]:
        modules = [*filter(ismodule, function.__globals__.values())]
        return language in modules, language.core in modules

    def patch_unless_done(function: Callable[..., Any]) -> Any:
        if seen(function) in patched:
            return None
        patched.add(seen(function))
        return patch(function)

    def launch_unpatched(*inputs: Any, **more: Any) -> Any:
        patched.clear()
        return launch(*inputs, **more)

    interpreter._patch_lang = patch_unless_done
    interpreter.GridExecutor.__call__ = launch_unpatched


if not ON_DEVICE:
    _patch_once()


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

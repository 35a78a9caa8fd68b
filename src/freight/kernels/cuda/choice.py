"""Which Triton kernels are in use on a device: those that were tried there, else none.

Nothing here imports triton but ``load_kernels``, which is called where a CUDA device computes. Who
tries the kernels, against their references, is ``runtime.kernel_choice``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["NO_KERNELS", "Kernels", "kernels_of", "load_kernels", "use_kernels"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """What is called instead of a reference, each None where the reference stays."""

    make_plain: Callable[..., None] | None = None
    make_exponents_plain: Callable[..., None] | None = None
    make_micro_plain: Callable[..., None] | None = None
    make_eights_plain: Callable[..., None] | None = None
    make_levels_plain: Callable[..., None] | None = None
    multiply: Callable[..., torch.Tensor | None] | None = None
    multiply_sets: Callable[..., None] | None = None
    append: Callable[..., None] | None = None
    append_plain: Callable[..., bool] | None = None
    normalise: Callable[..., bool] | None = None
    rotate: Callable[..., bool] | None = None
    convolve: Callable[..., bool] | None = None
    recur: Callable[..., bool] | None = None
    attend: Callable[..., None] | None = None


NO_KERNELS = Kernels()
_IN_USE: dict[str, Kernels] = {}


def kernels_of(device: torch.device) -> Kernels:
    """Those in use on tensors of this device."""
    return _IN_USE.get(device.type, NO_KERNELS)


def use_kernels(device: torch.device, kernels: Kernels) -> None:
    """Use these on tensors of this device from now on."""
    _IN_USE[device.type] = kernels


def load_kernels() -> Kernels | None:
    """All kernels, none of them tried; None where triton is not installed."""
    try:
        from freight.kernels.cuda import (
            append,
            attention,
            eights,
            exponents,
            groups,
            levels,
            micro,
            recurrence,
            sets,
            tokens,
        )
    except ImportError:
        return None
    return Kernels(
        make_plain=groups.make_plain,
        make_exponents_plain=exponents.make_exponents_plain,
        make_micro_plain=micro.make_micro_plain,
        make_eights_plain=eights.make_eights_plain,
        make_levels_plain=levels.make_levels_plain,
        multiply=groups.multiply,
        multiply_sets=sets.multiply_sets,
        append=append.append,
        append_plain=append.append_plain,
        normalise=tokens.normalise,
        rotate=tokens.rotate,
        convolve=recurrence.convolve,
        recur=recurrence.recur,
        attend=attention.attend,
    )

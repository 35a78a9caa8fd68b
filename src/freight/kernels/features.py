"""What the processor's registers can do, as far as this process may use them. Loops are compiled
for just that."""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from typing import Final

from llvmlite.binding import get_host_cpu_features, llvm_version_info

__all__ = ["HAS_PAIR_PRODUCTS", "HAS_WIDE_REGISTERS", "compiled_for", "may_use_tiles"]

HAS_WIDE_REGISTERS: Final = bool(get_host_cpu_features().get("avx512f"))
"""Whether sixteen floats are one register, of which there are 32; else they are two of 16, or
more."""


HAS_PAIR_PRODUCTS: Final = HAS_WIDE_REGISTERS and bool(
    get_host_cpu_features().get("avx512bf16") and llvm_version_info >= (16,)
)
"""Whether one instruction multiplies sixteen pairs of bfloat16 and adds both products to sixteen
floats. (Before its sixteenth version LLVM knew it by other types.)"""

_ARCH_PRCTL: Final = 158
_ARCH_REQ_XCOMP_PERM: Final = 0x1023
_XFEATURE_XTILEDATA: Final = 18


@cache
def may_use_tiles() -> bool:
    """Whether there are registers of sixteen by sixteen, and this process may use them: its threads
    all may, once it has asked."""
    features = get_host_cpu_features()
    if not (HAS_PAIR_PRODUCTS and features.get("amx-tile") and features.get("amx-bf16")):
        return False
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    system_call = ctypes.CDLL(None).syscall
    return bool(system_call(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)


def compiled_for() -> str:
    """The processor's features as LLVM is to take them where registers are wide. It splits vectors
    in two where it takes a processor for one that slows down with wide ones, which those that are
    sold now do not. Registers that may not be used are none: what is kept of loops that use them
    is of another processor, then."""
    features = get_host_cpu_features()
    found = f"{features.flatten()},-prefer-256-bit"
    if may_use_tiles():
        return found
    without = (name for name in features if name.startswith("amx-") and features[name])
    return ",".join([found, *(f"-{name}" for name in without)])

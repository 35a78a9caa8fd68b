"""Which device computes, in which number format, and how much memory is there to take.

Probes rather than trusts flags of the CPU. Knows no model.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import torch

from freight.errors import BudgetError, DeviceError, InputError
from freight.kernels.trial import best_times
from freight.memory.process import (
    LIBRARY_BYTES,
    give_back,
    process_bytes,
    system_memory_bytes,
)
from freight.plan.policy import Tier
from freight.quantities import GIB, KIB, MIB, format_bytes

__all__ = [
    "ComputeDevice",
    "choose_compute",
    "choose_dtype",
    "computes_int8",
    "find_device",
    "product_flops",
    "quiet_allocator",
    "room_on_cpu",
    "tight_allocator",
]

_PROBE_SIZE: Final = 1024
_PROBE_ROWS: Final = 128
_PROBE_TRIES: Final = 30
_WIDE_SIZE: Final = 2048
_WIDE_ROWS: Final = 256
_WIDE_TRIES: Final = 5
_BFLOAT16_FLAGS: Final = {"avx512_bf16", "amx_bf16", "bf16"}
_DEFAULT_SHARE: Final = 0.8
_GROWTH_BYTES: Final = 36 * MIB
_GROWTH_BYTES_PER_CORE: Final = 2 * MIB
"""What the process still takes beside its arenas: threads, the libraries' own scratch. Runs in a
budget were seen to take 4 to 16 MiB."""
_CUDA_CONTEXT_BYTES: Final = 960 * MIB
"""What a process takes of a device beside the tensors: a context with the libraries' code was
685 MiB on an H200, and the scratch of their products 86; with attention of prompts it is more."""
_BYTES_PER_COLUMN: Final = 16 * KIB
"""Of the residual stream: results of torch's own that lie beside the arena, each of a chunk's
tokens."""
_SIM_DEFAULT_BYTES: Final = 1 * GIB

_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3
_M_MMAP_MAX: Final = -4
_M_ARENA_MAX: Final = -8


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeDevice:
    """``kind`` is "cuda", "sim" or "cpu"; ``torch_device`` is where its tensors live."""

    kind: str
    torch_device: torch.device

    @property
    def tier(self) -> Tier:
        return "cpu" if self.kind == "cpu" else "gpu"

    def room_bytes(self, budget_bytes: int | None, columns: int = 0) -> int:
        """What may be taken of its own memory, everything it needs for itself left out, and for
        what a model whose residual stream has so many ``columns`` computes."""
        if self.kind == "sim":
            return _SIM_DEFAULT_BYTES if budget_bytes is None else budget_bytes
        # torch keeps what an earlier engine has let go of, and the driver counts it as in use.
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        if budget_bytes is None:
            return int(free * 0.9) - _CUDA_CONTEXT_BYTES // 4
        if budget_bytes > free + _CUDA_CONTEXT_BYTES:
            raise BudgetError(
                f"--gpu-memory {format_bytes(budget_bytes)} was given.",
                f"The device has {format_bytes(free)} free.",
                "Lower it, or leave it out.",
            )
        return budget_bytes - _CUDA_CONTEXT_BYTES - columns * _BYTES_PER_COLUMN


def find_device(name: str) -> ComputeDevice:
    """The device called "auto", "cuda", "sim" or "cpu"; DeviceError if it is absent."""
    if name == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            "--device cuda was given.",
            "No CUDA device is usable here: torch finds none.",
            "Leave --device out to compute on the CPU, or install a torch build with CUDA.",
        )
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        return ComputeDevice(kind="cuda", torch_device=torch.device("cuda", 0))
    kind = "sim" if name == "sim" else "cpu"
    return ComputeDevice(kind=kind, torch_device=torch.device("cpu"))


def choose_dtype(name: str, device: ComputeDevice) -> str:
    """ "auto" is bfloat16 where the device is faster at it than at float32, float16 on a GPU that
    is older than that, else float32.

    A CPU must both name the instructions and be faster in a probe: flags alone mislead, and so does
    a probe alone on a machine that is busy with other work.
    """
    if name == "float16" and device.kind == "cpu":
        raise InputError(
            "--dtype float16 was given.",
            "The CPU computes, and is slow at it.",
            "Give --dtype auto: files in float16 are read all the same.",
        )
    if name != "auto":
        return name
    if device.kind == "cuda":
        # Older devices emulate it, slower than float32: torch counts that as support.
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return "bfloat16" if native else "float16"
    if not _BFLOAT16_FLAGS & set(_cpu_flags()):
        return "float32"
    return "bfloat16" if _is_faster(torch.bfloat16, torch.float32, 1.2) else "float32"


def _cpu_flags() -> list[str]:
    """As the kernel lists them; none where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return next((line.split() for line in lines if line.startswith(("flags", "Features"))), [])


def choose_compute(name: str, device: ComputeDevice, dtype: str, say: Callable[[str], None]) -> str:
    """ "int8" only where it was asked for and the CPU is fast at it; ``say`` is told where not."""
    if name == "plain":
        return name
    if device.kind == "cuda":
        raise InputError(
            f"--compute {name} was given.",
            "A CUDA device computes, and integer products are made on CPUs.",
            "Leave it out, or give --device cpu.",
        )
    if computes_int8(dtype):
        return name
    say(f"--compute {name}: this CPU is not faster with 8-bit integers, computing in {dtype}")
    return "plain"


@cache
def computes_int8(dtype: str) -> bool:
    """Whether products of 8-bit integers are exact here, and faster than those of ``dtype``: where
    there are no instructions for them, pairs may be cut off at 16 bits."""
    codes = torch.full((_PROBE_ROWS, _PROBE_SIZE), 127, dtype=torch.int8)
    weight = torch.full((_PROBE_SIZE, _PROBE_SIZE), 127, dtype=torch.int8)
    weight[::2] = -127
    wanted = torch.full((_PROBE_ROWS, _PROBE_SIZE), 127 * 127 * _PROBE_SIZE, dtype=torch.int32)
    wanted[:, ::2] *= -1
    if not torch.equal(torch._int_mm(codes, weight.t()), wanted):
        return False
    return _is_faster(torch.int8, getattr(torch, dtype), 1.0)


def product_flops(dtype: str, device: ComputeDevice) -> float:
    """Floating-point operations per second of a product: the best of some, for other processes may
    be busy."""
    where = device.torch_device
    weight = torch.ones(_WIDE_SIZE, _WIDE_SIZE, dtype=getattr(torch, dtype), device=where)
    x = torch.ones(_WIDE_ROWS, _WIDE_SIZE, dtype=weight.dtype, device=where)
    best_s = float("inf")
    for _ in range(_WIDE_TRIES):
        started_s = time.perf_counter()
        torch.mm(x, weight.t())
        if device.kind == "cuda":
            torch.cuda.synchronize(where)
        best_s = min(best_s, time.perf_counter() - started_s)
    return 2.0 * _WIDE_ROWS * _WIDE_SIZE**2 / best_s


def _is_faster(dtype: torch.dtype, other: torch.dtype, times: float) -> bool:
    """Whether a small product takes so many times less than of the other type. The best of many of
    each counts, tried in turn and on one thread: on a busy machine threads wait for each other much
    longer than they multiply."""
    own, others = _product(dtype), _product(other)
    best = best_times((lambda turn: own(), lambda turn: others()), _PROBE_TRIES)
    return best[0] * times < best[1]


def _product(dtype: torch.dtype) -> Callable[[], object]:
    weight = torch.ones(_PROBE_SIZE, _PROBE_SIZE, dtype=dtype)
    x = torch.ones(_PROBE_ROWS, _PROBE_SIZE, dtype=dtype)
    is_integer = dtype is torch.int8
    out = torch.empty(_PROBE_ROWS, _PROBE_SIZE, dtype=torch.int32 if is_integer else dtype)
    multiply = torch._int_mm if is_integer else torch.mm
    return lambda: multiply(x, weight.t(), out=out)


def room_on_cpu(budget_bytes: int | None, held_bytes: int = 0) -> tuple[int, int]:
    """(what may be taken for tensors, what the process has and needs already), in bytes;
    ``held_bytes`` of what it has is held for tensors. Where a budget is given, what the process
    can do without goes back first; beside a CUDA device, whose libraries are many times as large
    and were not measured, the compiler alone."""
    own = _GROWTH_BYTES + _GROWTH_BYTES_PER_CORE * torch.get_num_threads() - held_bytes
    has_device = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    if budget_bytes is not None and has_device:
        give_back("libllvmlite")
    elif budget_bytes is not None:
        give_back()
        own += LIBRARY_BYTES
    own += process_bytes()
    available = system_memory_bytes()
    if budget_bytes is None:
        budget_bytes = max(own, int(available * _DEFAULT_SHARE))
    elif budget_bytes > available:
        raise BudgetError(
            f"--cpu-memory {format_bytes(budget_bytes)} was given.",
            f"The machine has {format_bytes(available)} for this process.",
            "Lower it, or leave it out.",
        )
    return budget_bytes - own, own


def quiet_allocator() -> None:
    """Let glibc keep what it has taken: memory given back and faulted in again costs more than the
    arithmetic on it."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_M_TOP_PAD, 16 * MIB)
    except (OSError, AttributeError):
        return  # another C library: slower, not wrong


def tight_allocator() -> None:
    """Let glibc give large blocks back as soon as they are free, whatever thread has used them:
    where tensors come and go, what it keeps for later would exceed a budget."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, 4 * MIB)
        libc.mallopt(_M_TRIM_THRESHOLD, 16 * MIB)
        libc.mallopt(_M_ARENA_MAX, 1)
    except (OSError, AttributeError):
        return  # another C library: what it keeps is not known

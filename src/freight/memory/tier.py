"""Memory with a hard budget: one buffer per tier, taken whole at the start and cut up once.

Host memory is private, in huge pages, and touched before use: direct I/O into it runs at full rate
and no page is faulted in during a sweep. For CUDA it is registered, which pins exactly what is
there. The simulated device's memory is host memory behind the same interface. Knows no tensors by
name and no architecture.
"""

from __future__ import annotations

import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

from freight.errors import BudgetError, DeviceError
from freight.quantities import MIB, align_up, format_bytes

__all__ = ["Arena", "device_arena", "host_arena"]

_HUGE_PAGE: Final = 2 * MIB
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23
_ALIGNMENT: Final = 4096


class Arena:
    """A tier's memory: ``take`` cuts stretches of it, ``usage`` says for what they were taken."""

    def __init__(self, buffer: torch.Tensor, *, registered: bool = False) -> None:
        self._buffer = buffer
        self._registered = registered
        self._used = 0
        self.usage: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        return self._buffer.numel()

    @property
    def device(self) -> torch.device:
        return self._buffer.device

    def take(self, num_bytes: int, purpose: str) -> torch.Tensor:
        """A uint8 tensor of this size, aligned for direct I/O. The plan has made sure it fits."""
        size = align_up(num_bytes, _ALIGNMENT)
        assert self._used + size <= self.num_bytes, (
            f"{purpose} needs {format_bytes(size)}, "
            f"{format_bytes(self.num_bytes - self._used)} of {format_bytes(self.num_bytes)} is left"
        )
        view = self._buffer[self._used : self._used + num_bytes]
        self._used += size
        self.usage[purpose] = self.usage.get(purpose, 0) + size
        return view

    def rewind(self) -> None:
        """Let all of it be taken once more, in the same order: what is there stays."""
        self._used = 0
        self.usage = {}

    def close(self) -> None:
        """Unpin what was pinned and let go of the memory: its last tensor frees it."""
        if self._registered:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(runtime.cudaHostUnregister(self._buffer.data_ptr()))
            self._registered = False
        # A slice of it would keep all of it.
        self._buffer = torch.empty(0, dtype=torch.uint8)


def host_arena(num_bytes: int, *, pinned: bool = False) -> Arena:
    """Host memory of exactly this size, rounded up to a huge page."""
    size = max(_HUGE_PAGE, align_up(num_bytes, _HUGE_PAGE))
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise BudgetError(
            f"{format_bytes(size)} of memory were to be taken.",
            f"The system refused: {error.strerror}.",
            "Lower --cpu-memory, or raise the limit on this process (ulimit -v).",
        ) from error
    _advise(memory, _MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    _touch(buffer)
    if pinned:
        _pin(buffer)
    return Arena(buffer, registered=pinned)


def _touch(buffer: torch.Tensor) -> None:
    """Have all of it there: the kernel clears pages, by as many threads as the arithmetic has."""
    libc = ctypes.CDLL(None, use_errno=True)
    num_pages = -(-buffer.numel() // _HUGE_PAGE)
    step = _HUGE_PAGE * -(-num_pages // torch.get_num_threads())

    def touch(start: int) -> None:
        part = buffer[start : start + step]
        address, size = ctypes.c_void_p(part.data_ptr()), ctypes.c_size_t(part.numel())
        if libc.madvise(address, size, _MADV_POPULATE_WRITE):
            part[::_ALIGNMENT] = 0  # a kernel that does not know how

    with ThreadPoolExecutor() as pool:
        list(pool.map(touch, range(0, buffer.numel(), step)))


def _pin(buffer: torch.Tensor) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    try:
        torch.cuda.check_error(runtime.cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0))
    except RuntimeError as error:
        raise DeviceError(
            f"{format_bytes(buffer.numel())} of memory were to be pinned for the CUDA device.",
            f"The driver refused: {error}.",
            "Lower --cpu-memory: some systems pin only a part of what they have.",
        ) from error


def device_arena(num_bytes: int, device: torch.device) -> Arena:
    """Memory of a CUDA device, in one allocation."""
    size = max(num_bytes, _ALIGNMENT)
    try:
        return Arena(torch.zeros(size, dtype=torch.uint8, device=device))
    except torch.OutOfMemoryError as error:
        raise BudgetError(
            f"{format_bytes(size)} of the device's memory were to be taken.",
            "The device has less by now.",
            "End what else uses it, or lower --gpu-memory.",
        ) from error


def _advise(memory: mmap.mmap, advice: int) -> bool:
    """Whether the kernel took the advice: older ones do not know all of them."""
    try:
        memory.madvise(advice)
    except OSError:
        return False
    return True

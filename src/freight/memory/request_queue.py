"""Many requests to a disk begun by one call, and waited for together.

Linux's asynchronous I/O (io_submit, man page io_submit(2)), by its calls: no library is needed. A
read of some KiB costs a processor as much as one of a MiB, some 25 us of calls, switches of threads
and words with a hypervisor, and a disk that is asked for one at a time mostly waits. Knows
descriptors, offsets and addresses, no files and no tensors.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import threading
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["DiskRequest", "RequestQueue"]

_MOST_UNDER_WAY: Final = 64
_READ: Final = 0
_WRITE: Final = 1


class _Calls(NamedTuple):
    """Numbers of system calls."""

    setup: int
    destroy: int
    submit: int
    getevents: int


_CALLS: Final[Mapping[str, _Calls]] = {
    "x86_64": _Calls(setup=206, destroy=207, submit=209, getevents=208),
    "aarch64": _Calls(setup=0, destroy=1, submit=2, getevents=4),
}
_CONTROL: Final = np.dtype(
    [
        ("data", "<u8"),
        ("key", "<u4"),
        ("flags", "<u4"),
        ("operation", "<u2"),
        ("priority", "<i2"),
        ("descriptor", "<u4"),
        ("address", "<u8"),
        ("num_bytes", "<u8"),
        ("offset", "<i8"),
        ("reserved", "<u8"),
        ("more_flags", "<u4"),
        ("event_descriptor", "<u4"),
    ]
)
"""struct iocb of linux/aio_abi.h, little-endian."""
_EVENT: Final = np.dtype([("data", "<u8"), ("control", "<u8"), ("result", "<i8"), ("more", "<i8")])
"""struct io_event."""


class DiskRequest(NamedTuple):
    """``num_bytes`` at ``offset`` of a file, and at ``place`` of a buffer; ``logical_bytes`` of
    them are wanted, all if it is left out."""

    offset: int
    place: int
    num_bytes: int
    logical_bytes: int | None = None

    @property
    def wanted_bytes(self) -> int:
        return self.num_bytes if self.logical_bytes is None else self.logical_bytes


class RequestQueue:
    """Requests under way, up to 64; one caller at a time."""

    def __init__(self, calls: _Calls, context: ctypes.c_ulong) -> None:
        self._calls = calls
        self._context = context
        self._turn = threading.Lock()
        self._controls = np.zeros(_MOST_UNDER_WAY, dtype=_CONTROL)
        first = self._controls.ctypes.data
        self._addresses = first + _CONTROL.itemsize * np.arange(_MOST_UNDER_WAY, dtype=np.uint64)
        self._events = np.zeros(_MOST_UNDER_WAY, dtype=_EVENT)

    @classmethod
    def open(cls) -> RequestQueue | None:
        """None where the system has no such calls, or lets nobody use them."""
        calls = _CALLS.get(platform.machine())
        if calls is None or platform.system() != "Linux":
            return None
        context = ctypes.c_ulong(0)
        if _call(calls.setup, ctypes.c_uint(_MOST_UNDER_WAY), ctypes.byref(context)) < 0:
            return None
        return cls(calls, context)

    def close(self) -> None:
        _call(self._calls.destroy, self._context)

    def read(
        self, descriptor: int, requests: Sequence[DiskRequest], into: memoryview
    ) -> npt.NDArray[np.int64]:
        """How many bytes came, for each request; below 0 the error's number. All have ended when
        this returns. ``into`` is written to."""
        return self._run(_READ, descriptor, requests, into)

    def write(
        self, descriptor: int, requests: Sequence[DiskRequest], data: memoryview
    ) -> npt.NDArray[np.int64]:
        """How many bytes went, likewise."""
        return self._run(_WRITE, descriptor, requests, data)

    def _run(
        self, operation: int, descriptor: int, requests: Sequence[DiskRequest], buffer: memoryview
    ) -> npt.NDArray[np.int64]:
        wanted = np.array([own[:3] for own in requests], dtype=np.int64).reshape(-1, 3)
        base = np.frombuffer(buffer, dtype=np.uint8).ctypes.data
        results = np.full(len(wanted), -errno.ECANCELED, dtype=np.int64)
        with self._turn:
            controls = self._controls
            controls["operation"], controls["descriptor"] = operation, descriptor
            free, under_way, begun, refused = np.arange(len(controls)), 0, 0, False
            while (begun < len(wanted) and not refused) or under_way:
                some = free[: 0 if refused else len(wanted) - begun]
                if len(some):
                    own = wanted[begun : begun + len(some)]
                    controls["data"][some] = np.arange(begun, begun + len(some))
                    controls["offset"][some] = own[:, 0]
                    controls["address"][some] = base + own[:, 1]
                    controls["num_bytes"][some] = own[:, 2]
                    count = self._submit(some)
                    refused = count < len(some)
                    begun, under_way, free = begun + count, under_way + count, free[count:]
                if under_way:
                    # Half of them at least: each wait is a switch of threads.
                    events = self._wait(max(1, under_way // 2))
                    results[events["data"]] = events["result"]
                    done = (events["control"] - self._addresses[0]) // _CONTROL.itemsize
                    free = np.concatenate([free, done.astype(free.dtype)])
                    under_way -= len(events)
        return results

    def _submit(self, which: npt.NDArray[np.int64]) -> int:
        """Begin these; how many the system took."""
        addresses = self._addresses[which]
        begun = 0
        while begun < len(addresses):
            count = _call(
                self._calls.submit,
                self._context,
                ctypes.c_long(len(addresses) - begun),
                ctypes.c_void_p(addresses.ctypes.data + addresses.itemsize * begun),
            )
            if count <= 0:
                break
            begun += count
        return begun

    def _wait(self, least: int) -> np.ndarray:
        """At least so many of what has ended."""
        while True:
            count = _call(
                self._calls.getevents,
                self._context,
                ctypes.c_long(least),
                ctypes.c_long(len(self._events)),
                ctypes.c_void_p(self._events.ctypes.data),
                None,
            )
            if count > 0:
                return self._events[:count]
            if count < 0 and (number := ctypes.get_errno()) != errno.EINTR:
                raise OSError(number, os.strerror(number))


_LIBRARY: Final = ctypes.CDLL(None, use_errno=True)
_LIBRARY.syscall.restype = ctypes.c_long


def _call(number: int, *arguments: object) -> int:
    """A system call, without the interpreter's lock."""
    return int(_LIBRARY.syscall(ctypes.c_long(number), *arguments))

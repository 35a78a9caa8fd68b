"""Measures the links of a CUDA device: each direction by the size of a copy, and both together.

Copies go from and to pinned memory, as a run's do. Knows no units and no disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from freight.hardware.curve import Curve
from freight.hardware.machine import Link
from freight.memory.tier import device_arena, host_arena
from freight.memory.transfer import copy_bytes
from freight.quantities import KIB, MIB
from freight.runtime.beside_probe import BothWays
from freight.runtime.device import ComputeDevice
from freight.runtime.disk_probe import Moved
from freight.runtime.processor_probe import typical_s

__all__ = ["measure_link_both_ways", "measure_links"]

_COPY_BYTES: Final = 64 * MIB
_SIZES: Final = (64 * KIB, 1 * MIB, 8 * MIB, _COPY_BYTES)
_TOGETHER: Final = 16
"""Copies each way."""
_NAMES: Final = ("host to device", "device to host")


def measure_links(device: ComputeDevice) -> dict[str, Link]:
    """Each direction alone, by the size of a copy."""
    near = device_arena(_COPY_BYTES, device.torch_device).take(_COPY_BYTES, "profile")
    arena = host_arena(_COPY_BYTES, pinned=True)
    far = arena.take(_COPY_BYTES, "profile")
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in _NAMES}
    for size in _SIZES:
        for name, (source, target) in zip(_NAMES, ((far, near), (near, far)), strict=True):
            seconds = typical_s(
                lambda _, s=source, t=target, n=size: copy_bytes(s[:n], t[:n]),  # type: ignore[misc]
                device.torch_device,
            )
            rates[name].append((float(size), size / seconds))
    arena.close()
    return {name: Link(bytes_per_s=Curve(points=tuple(own))) for name, own in rates.items()}


def measure_link_both_ways(device: ComputeDevice) -> BothWays:
    """Large copies each way, alone and at the same time, on two streams."""
    size = 2 * _COPY_BYTES
    near = device_arena(size, device.torch_device)
    far = host_arena(size, pinned=True)
    places = [(far, near), (near, far)]
    copies = [
        (source.take(_COPY_BYTES, "profile"), target.take(_COPY_BYTES, "profile"))
        for source, target in places
    ]
    streams = [torch.cuda.Stream(device.torch_device) for _ in copies]  # type: ignore[no-untyped-call]
    _copy(copies, streams, (0, 1))  # the first ones take longer
    alone = [_copy(copies, streams, (own,))[0] for own in (0, 1)]
    beside = _copy(copies, streams, (0, 1))
    far.close()
    return BothWays(names=_NAMES, alone=(alone[0], alone[1]), beside=(beside[0], beside[1]))


def _copy(
    copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
    streams: Sequence[torch.cuda.Stream],
    ways: Sequence[int],
) -> list[Moved]:
    """The same number of copies each of these ways, issued in turn, by the device's own clock."""
    torch.cuda.synchronize(streams[0].device)
    marks = [[_event(), _event()] for _ in ways]
    for turn in range(_TOGETHER):
        for way, (begin, _) in zip(ways, marks, strict=True):
            with torch.cuda.stream(streams[way]):
                if not turn:
                    begin.record()
                copy_bytes(*copies[way])
    for way, (_, end) in zip(ways, marks, strict=True):
        end.record(streams[way])
    torch.cuda.synchronize(streams[0].device)
    moved = _TOGETHER * copies[0][0].numel()
    return [Moved(moved, begin.elapsed_time(end) / 1000) for begin, end in marks]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

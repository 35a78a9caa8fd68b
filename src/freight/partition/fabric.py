"""How long moves take: a mesh whose axes have bandwidths and latencies of their own.

A collective over several axes goes axis by axis, so that slow ones carry the least: they come first
where a tensor grows, and last where it shrinks. With one bandwidth that comes to the bytes that the
algebra counts, over the bandwidth. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from freight.hardware.chip import Chip
from freight.partition.layout import Mesh
from freight.partition.moves import MoveKind

__all__ = ["Fabric"]


@dataclass(frozen=True)
class Fabric:
    """``bytes_per_s`` and ``latency_s`` of each axis: what a chip sends along it, and the fixed
    time of a collective."""

    mesh: Mesh
    bytes_per_s: Mapping[str, float]
    latency_s: Mapping[str, float]

    @classmethod
    def of(cls, chip: Chip, mesh: Mesh) -> Fabric:
        """Axes that fill hosts best have the chip's own links, others those between hosts."""
        inside = _inside(mesh, chip.host_chips) if chip.host_chips else mesh.names
        own, outer = chip.link_bytes_per_s, chip.outer_bytes_per_s
        return cls(
            mesh,
            {axis: own if axis in inside else outer for axis in mesh.names},
            {
                axis: chip.link_latency_s if axis in inside else chip.outer_latency_s
                for axis in mesh.names
            },
        )

    def scaled(self, share: float) -> Fabric:
        """With this share of its speed."""
        return Fabric(
            self.mesh,
            {axis: rate * share for axis, rate in self.bytes_per_s.items()},
            {axis: seconds / share for axis, seconds in self.latency_s.items()},
        )

    @cached_property
    def _shares(self) -> dict[tuple[bool, str], float]:
        """Seconds per byte by kind of collective and axes, once found."""
        return {}

    def seconds(self, kind: MoveKind, num_bytes: float, axes: str) -> float:
        """Of a move; ``num_bytes`` are those that a chip has where it has more of the tensor:
        before it is scattered, reduced or exchanged, after it is gathered."""
        if kind == "slice":
            return 0.0
        times = 2.0 if kind == "all-reduce" else 1.0
        return self.sending_s(kind, num_bytes, axes) + times * self.latency(axes)

    def sending_s(self, kind: MoveKind, num_bytes: float, axes: str) -> float:
        """The same without the fixed time."""
        if kind == "slice":
            return 0.0
        times = 2.0 if kind == "all-reduce" else 1.0
        return times * num_bytes * self._per_byte(kind, axes)

    def latency(self, axes: str) -> float:
        """Of a collective over these axes, however little is moved."""
        return sum(self.latency_s[axis] for axis in axes if self.mesh.size(axis) > 1)

    def _per_byte(self, kind: MoveKind, axes: str) -> float:
        key = kind == "all-to-all", axes
        if key not in self._shares:
            self._shares[key] = self._reckoned(*key)
        return self._shares[key]

    def _reckoned(self, is_exchange: bool, axes: str) -> float:
        """What crosses an axis of K chips is (K - 1) / K of what there is: all, for the slowest of
        an exchange; one part for each combination of faster axes where a tensor is gathered."""
        slowest_first = sorted(axes, key=lambda axis: self.bytes_per_s[axis])
        seconds = 0.0
        for place, axis in enumerate(slowest_first):
            around = slowest_first[:place] if is_exchange else slowest_first[place + 1 :]
            size = self.mesh.size(axis)
            seconds += (1 - 1 / size) / self.mesh.size(around) / self.bytes_per_s[axis]
        return seconds


def _inside(mesh: Mesh, host_chips: int) -> str:
    """The axes that fill a host best; of several the first."""
    counts = range(len(mesh.names) + 1)
    groups = ["".join(axes) for count in counts for axes in combinations(mesh.names, count)]
    fitting = [axes for axes in groups if host_chips % mesh.size(axes) == 0]
    return max(fitting, key=mesh.size)

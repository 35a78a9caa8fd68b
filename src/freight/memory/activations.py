"""The residual stream of each micro-batch between units, its rows split over tiers.

Tokens are the rows: the first share stays on the compute tier, the next lies on the cpu tier, the
rest on disk. Offloaded rows pass through a slot. Knows no layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from freight.memory.disk import BLOCK, DirectFile
from freight.memory.transfer import host_view
from freight.quantities import align_up

__all__ = ["Activations", "TokenCut", "gather", "scatter", "slot_bytes"]

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCut:
    """How many tokens of a micro-batch lie on each tier, in this order."""

    resident: int
    cpu: int
    disk: int

    @property
    def total(self) -> int:
        return self.resident + self.cpu + self.disk


def slot_bytes(cut: TokenCut, row_bytes: int) -> int:
    """A slot holds the cpu tier's rows, then those of the disk, each from a block border."""
    return align_up(cut.cpu * row_bytes, BLOCK) + align_up(cut.disk * row_bytes, BLOCK)


class Activations:
    """Homes of the offloaded rows and the resident rows, per micro-batch.

    ``resident`` and ``cpu`` are uint8 tensors [micro-batches, bytes]; the disk's rows of
    micro-batch k begin at k · ``disk_stride`` in ``file``.
    """

    def __init__(
        self,
        *,
        resident: torch.Tensor,
        cpu: torch.Tensor,
        file: DirectFile | None,
        disk_stride: int,
        num_columns: int,
        dtype: torch.dtype,
    ) -> None:
        self.resident = resident
        self._cpu = cpu
        self._file = file
        self._disk_stride = disk_stride
        self.num_columns = num_columns
        self.dtype = dtype
        self.row_bytes = num_columns * dtype.itemsize

    def parts(
        self, k: int, cut: TokenCut, slot: torch.Tensor | None
    ) -> list[tuple[int, torch.Tensor]]:
        """(first token, rows [n, D]) of micro-batch k on the compute tier, in order."""
        places = [(0, self.resident[k], 0, cut.resident)]
        if slot is not None:
            offset = align_up(cut.cpu * self.row_bytes, BLOCK)
            places.append((cut.resident, slot, 0, cut.cpu))
            places.append((cut.resident + cut.cpu, slot, offset, cut.disk))
        return [
            (first, self._rows(buffer, offset, count))
            for first, buffer, offset, count in places
            if count
        ]

    def _rows(self, buffer: torch.Tensor, offset: int, count: int) -> torch.Tensor:
        end = offset + count * self.row_bytes
        return buffer[offset:end].view(self.dtype).view(count, self.num_columns)

    def read_disk(self, k: int, cut: TokenCut, slot: torch.Tensor) -> None:
        assert self._file is not None
        stretch = self._disk_stretch(cut, slot)
        wanted = cut.disk * self.row_bytes
        self._file.read(k * self._disk_stride, host_view(stretch), wanted)

    def write_disk(self, k: int, cut: TokenCut, slot: torch.Tensor) -> None:
        assert self._file is not None
        stretch = self._disk_stretch(cut, slot)
        wanted = cut.disk * self.row_bytes
        self._file.write(k * self._disk_stride, host_view(stretch), wanted)

    def pair_in(self, k: int, cut: TokenCut, slot: torch.Tensor) -> Pair:
        """What to copy of the cpu tier's rows: (home, place in the slot)."""
        size = cut.cpu * self.row_bytes
        return self._cpu[k, :size], slot[:size]

    def pair_out(self, k: int, cut: TokenCut, slot: torch.Tensor) -> Pair:
        size = cut.cpu * self.row_bytes
        return slot[:size], self._cpu[k, :size]

    def staged_pair(self, cut: TokenCut, source: torch.Tensor, target: torch.Tensor) -> Pair:
        """The disk's rows in one slot and in another."""
        return self._disk_stretch(cut, source), self._disk_stretch(cut, target)

    def _disk_stretch(self, cut: TokenCut, slot: torch.Tensor) -> torch.Tensor:
        offset = align_up(cut.cpu * self.row_bytes, BLOCK)
        return slot[offset : offset + align_up(cut.disk * self.row_bytes, BLOCK)]


def gather(parts: Sequence[tuple[int, torch.Tensor]], start: int, out: torch.Tensor) -> None:
    """Copy tokens from ``start`` on into ``out`` [n, D]."""
    for first, last, rows in _overlaps(parts, start, out.shape[0]):
        out[first - start : last - start].copy_(rows)


def scatter(parts: list[tuple[int, torch.Tensor]], start: int, values: torch.Tensor) -> None:
    """Copy ``values`` [n, D] over the tokens from ``start`` on."""
    for first, last, rows in _overlaps(parts, start, values.shape[0]):
        rows.copy_(values[first - start : last - start])


def _overlaps(
    parts: Sequence[tuple[int, torch.Tensor]], start: int, count: int
) -> list[tuple[int, int, torch.Tensor]]:
    overlaps = []
    for begin, rows in parts:
        first, last = max(begin, start), min(begin + rows.shape[0], start + count)
        if first < last:
            overlaps.append((first, last, rows[first - begin : last - begin]))
    return overlaps

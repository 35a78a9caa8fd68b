"""The model's weights in the tiers' memory: what stays, what passes through slots, and lookups.

Binds the plan's layout to tensors. Knows names and rows, not what they mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from freight.kernels.grouped import CompressedRows, dequantise
from freight.kernels.integers import IntegerRows
from freight.memory.request_queue import DiskRequest
from freight.memory.tier import Arena
from freight.memory.transfer import host_view
from freight.model.frame import Rows, WeightParts
from freight.model.number_format import Compressed, PerRow, find_compressed
from freight.plan.forms import BLOCK
from freight.plan.layout import Table, UnitLayout, WeightLayout
from freight.plan.parts import Part, Piece, SlotPart
from freight.plan.ring import RingSize
from freight.quantities import align_up
from freight.runtime.loaders import BOUNCE_BYTES, CheckpointFiles, RowLoader, torch_dtype

__all__ = ["EmbeddingTable", "WeightStore"]

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
TableRows = torch.Tensor | CompressedRows
"""Rows that are looked up."""

_ALIGNMENT = 64
_JOIN_BYTES = 32 * 1024
_MOST_VIEWS = 1 << 14
"""That are kept: files whose tensors begin anywhere have units of thousands of forms."""


@dataclass(kw_only=True, slots=True)
class _UnitWeights:
    """One unit's tensors that stay where they are; ``host`` is its stretch of the cpu tier.
    ``staying`` are the former as (name, first row, rows), once they have been asked for."""

    resident: list[tuple[Part, torch.Tensor]]
    host: torch.Tensor
    staying: list[tuple[str, int, Rows]] | None = None


class WeightStore:
    """All weights. ``near`` is the compute tier's memory, ``home`` what of it is for those that
    stay, ``host`` the cpu tier's memory.

    Streamed ones pass through a ``ring`` of blocks in the first. A unit that reaches its
    end goes on at its beginning; rows that lie across are made whole in the seam behind the end.
    """

    def __init__(
        self,
        layout: WeightLayout,
        *,
        home: Arena,
        near: Arena,
        host: Arena,
        ring: RingSize,
        loader: RowLoader,
        files: CheckpointFiles | None,
    ) -> None:
        self._files = files
        self._layouts = layout.all_units
        self._units = [_place_unit(unit, home, host, loader) for unit in self._layouts]
        self.ring = ring
        self._block_bytes, self._ring_size = ring.block_bytes, ring.num_bytes
        self._ring = near.take(self._ring_size + layout.seam_bytes, "weight slots")
        self._ring_bytes = None if self._ring.is_cuda else host_view(self._ring)
        self._pieces = [unit.pieces for unit in self._layouts]
        self._decoded = near.take(layout.decoded_bytes, "decoded weights")
        self._resident: dict[int, Mapping[str, WeightParts]] = {}
        """Units of which nothing passes through the ring, as ``parts`` tells them."""
        self._form_of = layout.form_of
        self._views: dict[tuple[int, int, int], list[tuple[int, Rows]]] = {}
        """By a unit's form, the number of a part that is streamed, and the unit's block."""

    def places(self, piece: Piece, slot: int) -> list[tuple[int, int]]:
        """(begin, end) of the bytes of the ring that a piece is brought to, the unit beginning at
        block ``slot``: two where it reaches over the ring's end."""
        size, begin = self._ring_size, slot * self._block_bytes + piece.slot_offset
        end = begin + piece.num_bytes
        if begin >= size:
            return [(begin - size, end - size)]
        return [(begin, end)] if end <= size else [(begin, size), (0, end - size)]

    def bring_into_slot(self, source: torch.Tensor, piece: Piece, slot: int) -> Pairs:
        """(from, to) of what a copy of a piece moves."""
        found, left = [], source
        for begin, end in self.places(piece, slot):
            found.append((left[: end - begin], self._ring[begin:end]))
            left = left[end - begin :]
        return found

    def piece(self, unit: int, number: int) -> Piece:
        """Piece of unit ``unit`` of the programme (0, the embedding, has none)."""
        return self._pieces[unit][number]

    def read_into_slots(self, pieces: Sequence[tuple[Piece, int]]) -> None:
        """Read pieces from disk to their places in the ring, each one's unit beginning at a block;
        several are asked for at once."""
        assert self._ring_bytes is not None and self._files is not None
        if len(pieces) == 1:
            ((piece, slot),) = pieces
            places = self.places(piece, slot)
            self.read(piece, [self._ring_bytes[begin:end] for begin, end in places])
            return
        asked: dict[Path, list[DiskRequest]] = {}
        for piece, slot in pieces:
            assert piece.path is not None
            offset, left = piece.offset, piece.logical_bytes
            for begin, end in self.places(piece, slot):
                wanted = min(left, end - begin)
                request = DiskRequest(offset, begin, end - begin, wanted)
                asked.setdefault(piece.path, []).append(request)
                offset, left = offset + end - begin, left - wanted
        for path, requests in asked.items():
            self._files.file(path).read_all(requests, self._ring_bytes)

    def read(self, piece: Piece, into: Sequence[memoryview]) -> None:
        """Read a piece from disk into so many bytes, one part after the other. No tensor is
        touched: who calls one hands over the interpreter, and between two reads the disk would wait
        to get it back."""
        assert self._files is not None and piece.path is not None
        offset, left = piece.offset, piece.logical_bytes
        for part in into:
            wanted = min(left, len(part))
            self._files.file(piece.path).read(offset, part, wanted)
            offset, left = offset + len(part), left - wanted

    def host_stretch(self, unit: int, piece: Piece) -> torch.Tensor:
        """The bytes of a piece that lies on the cpu tier."""
        host = self._units[unit].host
        return host[piece.offset : piece.offset + piece.num_bytes]

    def stays(self, unit: int) -> bool:
        """Whether all of a unit lies on the compute tier."""
        return not self._layouts[unit].streamed

    def decode(self, unit: int, slot: int) -> None:
        """Cast what arrived in another dtype than it is kept in."""
        offset = 0
        for streamed in self._layouts[unit].streamed:
            if streamed.is_foreign:
                target = _view(self._decoded, offset, streamed.part)
                for first, own in self._raw_rows(streamed, slot):
                    target[first : first + len(own)].copy_(own)
                offset = _after(offset, streamed.part)

    def parts(self, unit: int, slot: int) -> Mapping[str, WeightParts]:
        """The unit's weights on the compute tier, by name; streamed ones from block ``slot``."""
        if (kept := self._resident.get(unit)) is not None:
            return kept
        own = self._units[unit]
        if own.staying is None:
            own.staying = [(p.weight.name, p.first_row, _as_rows(p, t)) for p, t in own.resident]
        found: dict[str, list[tuple[int, Rows]]] = {}
        for name, first, rows in own.staying:
            found.setdefault(name, []).append((first, rows))
        offset = 0
        own_streamed = self._layouts[unit].streamed
        for number, streamed in enumerate(own_streamed):
            part = streamed.part
            if streamed.is_foreign:
                given = [(part.first_row, _as_rows(part, _view(self._decoded, offset, part)))]
                offset = _after(offset, part)
            else:
                given = self._ring_rows(unit, number, slot)
            found.setdefault(part.weight.name, []).extend(given)
        if not own_streamed:
            self._resident[unit] = found
        return found

    def _ring_rows(self, unit: int, number: int, slot: int) -> list[tuple[int, Rows]]:
        """(first row, rows) of a streamed part in the ring. They are the same for all units of a
        form, of which a model has thousands; not where rows are made whole, which are there for
        one."""
        key = self._form_of[unit - 1], number, slot
        if (known := self._views.get(key)) is not None:
            return known
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        streamed = self._layouts[unit].streamed[number]
        part, raw = streamed.part, self._raw_rows(streamed, slot)
        found = [(part.first_row + first, _as_rows(part, rows)) for first, rows in raw]
        begin = slot * self._block_bytes + streamed.slot_offset
        if not begin < self._ring_size < begin + part.num_rows * streamed.row_bytes:
            self._views[key] = found
        return found

    def _raw_rows(self, streamed: SlotPart, slot: int) -> list[tuple[int, torch.Tensor]]:
        """(first row of the part, rows as they lie in the ring): two of these where the part
        reaches over the ring's end, the rows that do so being made whole."""
        size, start = self._ring_size, slot * self._block_bytes
        count, row_bytes = streamed.part.num_rows, streamed.row_bytes
        begin = start + streamed.slot_offset
        end = begin + count * row_bytes
        if begin >= size:
            return [(0, _rows_at(self._ring, begin - size, streamed, count))]
        if end <= size:
            return [(0, _rows_at(self._ring, begin, streamed, count))]
        first = streamed.rows_to(size - start)
        across = begin + first * row_bytes - size
        self._ring[size : size + across].copy_(self._ring[:across])
        found = [(0, _rows_at(self._ring, begin, streamed, first))]
        if first < count:
            found.append((first, _rows_at(self._ring, across, streamed, count - first)))
        return found

    def resident_rows(self, name: str) -> list[tuple[int, TableRows]]:
        """(first row in the tensor, rows) of what stays here of a tensor."""
        return [
            (part.weight.first_row + part.first_row, _as_table(part, tensor))
            for own in self._units
            for part, tensor in own.resident
            if part.weight.name == name
        ]

    def host_rows(self, name: str) -> list[tuple[int, TableRows]]:
        """Likewise of those that lie on the cpu tier while another one computes."""
        rows: list[tuple[int, TableRows]] = []
        for unit, own in zip(self._layouts, self._units, strict=True):
            offset = 0
            for streamed in unit.streamed:
                part = streamed.part
                if part.tier == "cpu":
                    if part.weight.name == name:
                        tensor = _view(own.host, offset, part)
                        first_row = part.weight.first_row + part.first_row
                        rows.append((first_row, _as_table(part, tensor)))
                    offset = _after(offset, part)
        return rows


def _as_rows(part: Part, tensor: torch.Tensor) -> Rows:
    """What a product takes: the rows, or the compressed rows with what they mean."""
    if isinstance(part.compressed, PerRow):
        return IntegerRows(raw=tensor, columns=part.weight.num_columns)
    return _read_as(part.compressed, tensor, part.weight.num_columns)


def _as_table(part: Part, tensor: torch.Tensor) -> TableRows:
    return _read_as(part.compressed, tensor, part.weight.num_columns)


def _read_as(number_format: Compressed | None, tensor: torch.Tensor, columns: int) -> TableRows:
    if number_format is None:
        return tensor
    assert not isinstance(number_format, PerRow)  # no table is made for integer products
    return CompressedRows(raw=tensor, columns=columns, number_format=number_format)


def _select(rows: TableRows, ids: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Rows by their numbers in the type of ``like``, compressed ones made plain."""
    if isinstance(rows, torch.Tensor):
        return rows.index_select(0, ids).to(like.dtype)
    found = torch.empty(len(ids), rows.columns, dtype=like.dtype)
    dequantise(replace(rows, raw=rows.raw.index_select(0, ids)), found)
    return found


def _after(offset: int, part: Part) -> int:
    return offset + align_up(part.num_bytes, _ALIGNMENT)


def _view(buffer: torch.Tensor, offset: int, part: Part) -> torch.Tensor:
    """A part in a buffer [rows, columns]; compressed, uint8 [rows, row bytes]."""
    end = offset + part.num_bytes
    return buffer[offset:end].view(torch_dtype(part.dtype)).view(part.num_rows, -1)


def _rows_at(buffer: torch.Tensor, offset: int, streamed: SlotPart, count: int) -> torch.Tensor:
    """So many rows of a part as they lie in a buffer, in their own dtype."""
    own = torch_dtype(streamed.dtype)
    raw = buffer[offset : offset + count * streamed.row_bytes]
    if offset % own.itemsize:
        raw = raw.clone()
    return raw.view(own).view(count, -1)


def _place(
    parts: Sequence[Part], arena: Arena, loader: RowLoader
) -> tuple[list[tuple[Part, torch.Tensor]], torch.Tensor]:
    """Take one stretch for the parts and fill it."""
    stretch = arena.take(sum(align_up(p.num_bytes, _ALIGNMENT) for p in parts), "weights")
    placed = []
    offset = 0
    for part in parts:
        tensor = _view(stretch, offset, part)
        loader.fill(part.weight.name, part.weight.first_row + part.first_row, tensor)
        placed.append((part, tensor))
        offset = _after(offset, part)
    return placed, stretch


def _place_unit(unit: UnitLayout, near: Arena, host: Arena, loader: RowLoader) -> _UnitWeights:
    resident, _ = _place(unit.resident, near, loader)
    waiting = [s.part for s in unit.streamed if s.part.tier == "cpu"]
    _, stretch = _place(waiting, host, loader)
    return _UnitWeights(resident=resident, host=stretch)


class EmbeddingTable:
    """Rows on all tiers that are looked up by token; ``near`` ones are where the arithmetic is, the
    others are fetched row by row."""

    def __init__(
        self,
        table: Table,
        layout: WeightLayout,
        store: WeightStore,
        *,
        near: Arena,
        host: Arena,
        loader: RowLoader,
        files: CheckpointFiles | None,
    ) -> None:
        self._files = files
        self._name = table.weight.name
        self.columns = table.weight.num_columns
        if table.is_head:
            self.near = store.resident_rows("head.weight")
            self._host = store.host_rows("head.weight")
        else:
            by_tier = {
                tier: [part for part in table.parts if part.tier == tier]
                for tier in ("gpu", "cpu", "disk")
            }
            placed, _ = _place(by_tier[layout.compute_tier], near, loader)
            self.near = [(part.first_row, _as_table(part, tensor)) for part, tensor in placed]
            self._host = []
            if layout.compute_tier == "gpu":
                placed, _ = _place(by_tier["cpu"], host, loader)
                self._host = [(part.first_row, _as_table(part, tensor)) for part, tensor in placed]

    def far_places(self, token_ids: np.ndarray) -> np.ndarray:
        """Places of the tokens whose rows are not near."""
        far = np.ones(len(token_ids), dtype=bool)
        for first, rows in self.near:
            far &= (token_ids < first) | (token_ids >= first + rows.shape[0])
        return np.flatnonzero(far)

    def fetch(self, token_ids: np.ndarray, out: torch.Tensor) -> None:
        """Fill ``out`` [n, D] on the host with the rows of far tokens."""
        left = np.ones(len(token_ids), dtype=bool)
        for first, rows in self._host:
            here = (token_ids >= first) & (token_ids < first + rows.shape[0])
            found = _select(rows, torch.from_numpy(token_ids[here] - first), out)
            out.index_copy_(0, torch.from_numpy(np.flatnonzero(here)), found)
            left &= ~here
        places = np.flatnonzero(left)
        if len(places):
            self._fetch_from_disk(token_ids[places], places, out)

    def _fetch_from_disk(
        self, token_ids: np.ndarray, places: np.ndarray, out: torch.Tensor
    ) -> None:
        """Each distinct row once, near neighbours in one request."""
        assert self._files is not None
        source = self._files.sources[self._name]
        row_bytes = source.num_bytes // source.shape[0]
        order = np.argsort(token_ids, kind="stable")
        ids, places = token_ids[order], places[order]
        stretches = [*_stretches(ids.tolist(), row_bytes)]
        spans = [(int(ids[begin]), int(ids[end - 1])) for begin, end in stretches]
        found = self._files.rows_at(
            source, ((first * row_bytes, last - first + 1) for first, last in spans), row_bytes
        )
        for (begin, end), (first, _), raw in zip(stretches, spans, found, strict=True):
            rows = _read_as(find_compressed(source.dtype), raw, source.shape[1])
            chosen = _select(rows, torch.from_numpy(ids[begin:end] - first), out)
            out.index_copy_(0, torch.from_numpy(places[begin:end]), chosen)


def _stretches(ids: Sequence[int], row_bytes: int) -> Iterator[tuple[int, int]]:
    """(first, behind) of ascending rows that are near enough to come in one request."""
    most = max(1, (BOUNCE_BYTES - 2 * BLOCK) // row_bytes)
    begin = 0
    for end in range(1, len(ids) + 1):
        if (
            end == len(ids)
            or (ids[end] - ids[end - 1]) * row_bytes > _JOIN_BYTES
            or ids[end] - ids[begin] >= most
        ):
            yield begin, end
            begin = end


assert _ALIGNMENT <= BLOCK

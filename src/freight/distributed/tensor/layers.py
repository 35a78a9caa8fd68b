"""A stage's layers: those that a rank keeps, and those whose parts lie in a file of its own.

What lies there comes in the order of the layers, again and again: one sweep after the other uses
each layer once. Another thread reads ahead, into slots that are free again when a layer has been
computed. Knows parts and bytes, no programmes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from freight.distributed.tensor.ranks import Parts
from freight.distributed.tensor.tracing import Timeline
from freight.distributed.tensor.weights import Stored
from freight.memory.disk import BLOCK, DirectFile, Traffic, create_scratch
from freight.memory.tier import Arena, host_arena
from freight.memory.transfer import host_view
from freight.quantities import MIB, align_up

__all__ = ["OnDisk", "StoredLayers", "is_kept", "layer_bytes", "slots_bytes"]

_PAGE: Final = 2 * MIB
"""Slots are taken in huge pages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OnDisk:
    """All layers but ``kept`` lie in a file in ``directory``, ``slots`` of them in memory."""

    directory: Path
    kept: int
    slots: int


def layer_bytes(sizes: Sequence[int]) -> int:
    """Of a layer in the file, of whose parts these are the sizes."""
    return sum(align_up(size, BLOCK) for size in sizes)


def slots_bytes(layers: Sequence[int], slots: int) -> int:
    """Memory for so many of these layers at a time."""
    return align_up(slots * max(layers), _PAGE)


def is_kept(place: int, kept: int, count: int) -> bool:
    """Whether a layer is in memory where ``kept`` of ``count`` are: evenly among the others, so
    that reading has time between them."""
    return (place + 1) * kept // count > place * kept // count


@dataclass(frozen=True, slots=True)
class _Piece:
    """Where a tensor lies in a layer's bytes, and what it looks like."""

    begin: int
    like: torch.Tensor

    def of(self, slot: torch.Tensor) -> torch.Tensor:
        like = self.like
        raw = slot[self.begin : self.begin + like.numel() * like.element_size()]
        return raw.view(like.dtype).as_strided(like.size(), like.stride())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Away:
    """A layer in the file: its vectors and layouts, and its pieces by weight."""

    stored: Stored
    pieces: Mapping[str, Sequence[_Piece]]
    offset: int
    num_bytes: int

    def on(self, slot: torch.Tensor, device: torch.device) -> Stored:
        parts = {
            name: [piece.of(slot).to(device) for piece in pieces]
            for name, pieces in self.pieces.items()
        }
        return replace(self.stored, parts=parts)


class StoredLayers:
    """Of a stage with as many layers as ``sizes``: what each takes at most, in bytes of the own
    ranks' parts. They come in by ``append``, in order; ``take`` gives one and ``release`` says that
    it has been used. Traces number them from ``first`` on. BudgetError where the disk has no room
    for them.
    """

    def __init__(
        self,
        sizes: Sequence[Sequence[int]],
        on_disk: OnDisk | None,
        device: torch.device,
        timeline: Timeline | None = None,
        *,
        first: int = 0,
    ) -> None:
        count = len(sizes)
        kept = count if on_disk is None else on_disk.kept
        self.traffic = Traffic()
        self._device = device
        self._timeline = timeline
        self._first = first
        self._layers: list[Stored | _Away] = []
        self._is_kept = [is_kept(place, kept, count) for place in range(count)]
        self._order = [place for place, is_here in enumerate(self._is_kept) if not is_here]
        self._coming: dict[int, Future[None]] = {}
        self._asked = self._taken = 0
        self._slots: list[torch.Tensor] = []
        self._arena: Arena | None = None
        self._file: DirectFile | None = None
        self._reader: ThreadPoolExecutor | None = None
        self._filled = 0
        if on_disk is not None and self._order:
            most = [layer_bytes(sizes[place]) for place in self._order]
            self._file = create_scratch(on_disk.directory, sum(most), self.traffic)
            num_slots = min(on_disk.slots, len(self._order) + 1)
            self._arena = host_arena(num_slots * max(most))
            self._slots = [self._arena.take(max(most), "layers") for _ in range(num_slots)]
            self._reader = ThreadPoolExecutor(1, "freight layers")

    @property
    def here(self) -> list[Stored]:
        """Those that are kept."""
        return [own for own in self._layers if isinstance(own, Stored)]

    @property
    def num_away(self) -> int:
        """Layers that lie in the file."""
        return len(self._order)

    @property
    def slot_bytes(self) -> int:
        """What those that come pass through."""
        return 0 if self._arena is None else self._arena.num_bytes

    def append(self, stored: Stored) -> None:
        """The next layer. With the last one reading begins."""
        place = len(self._layers)
        self._layers.append(stored if self._is_kept[place] else self._write(stored))
        if len(self._layers) == len(self._is_kept):
            for _ in self._slots:
                self._ask()

    def take(self, place: int) -> Stored:
        """A layer, in its turn, once it is here."""
        own = self._layers[place]
        if isinstance(own, Stored):
            return own
        number = self._taken
        assert self._order[number % len(self._order)] == place, "layers are used in their order"
        self._taken += 1
        self._coming.pop(number).result()
        return own.on(self._slots[number % len(self._slots)], self._device)

    def release(self, place: int) -> None:
        """A layer is not used any more; what it passed through is read into again."""
        if isinstance(self._layers[place], _Away):
            self._ask()

    def read(self, place: int) -> Stored:
        """A layer out of its turn, in memory of its own."""
        own = self._layers[place]
        if isinstance(own, Stored):
            return own
        room = host_arena(own.num_bytes).take(own.num_bytes, "layer")
        self._bring(own, room, place)
        return own.on(room, self._device)

    def close(self) -> None:
        """End reading, and give the file and the slots back."""
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)
        if self._file is not None:
            self._file.close()
        self._slots.clear()
        if self._arena is not None:
            self._arena.close()

    # -- the file ------------------------------------------------------------------------------

    def _write(self, stored: Stored) -> _Away:
        assert self._file is not None
        slot, begin = self._slots[0], 0
        pieces: dict[str, list[_Piece]] = {}
        for name, parts in stored.parts.items():
            pieces[name] = []
            for part in parts:
                dense, size = _dense(part), part.nbytes
                slot[begin : begin + size].view(dense.dtype).copy_(_turned(dense).reshape(-1))
                like = torch.empty_strided(
                    dense.size(), dense.stride(), dtype=dense.dtype, device="meta"
                )
                pieces[name].append(_Piece(begin, like))
                begin += align_up(size, BLOCK)
        assert begin <= slot.numel() and self._filled + begin <= self._file.num_bytes
        self._file.write(self._filled, host_view(slot[:begin]))
        nothing: dict[str, Parts] = {}
        own = _Away(
            stored=replace(stored, parts=nothing),
            pieces=pieces,
            offset=self._filled,
            num_bytes=begin,
        )
        self._filled += begin
        return own

    def _ask(self) -> None:
        """Begin to read the next one."""
        assert self._reader is not None
        place = self._order[self._asked % len(self._order)]
        own, slot = self._layers[place], self._slots[self._asked % len(self._slots)]
        assert isinstance(own, _Away)
        self._coming[self._asked] = self._reader.submit(self._bring, own, slot, place)
        self._asked += 1

    def _bring(self, own: _Away, slot: torch.Tensor, place: int) -> None:
        assert self._file is not None
        started_s = time.perf_counter()
        self._file.read(own.offset, host_view(slot[: own.num_bytes]))
        if self._timeline is not None:
            name = f"layer {self._first + place}, {own.num_bytes} bytes"
            self._timeline.note_read(name, started_s)


def _turned(part: torch.Tensor) -> torch.Tensor:
    """Its dims in the order in which it lies."""
    return part.permute(sorted(range(part.dim()), key=part.stride, reverse=True))


def _dense(part: torch.Tensor) -> torch.Tensor:
    """The same numbers with nothing between them."""
    return part if _turned(part).is_contiguous() else part.contiguous()

"""The ring that weights stream through: how large it is, and the layout as the schedule sees it.

Knows pieces and their sizes, no tensors and no operations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from freight.model.programme import Programme, Route
from freight.plan.forms import BLOCK
from freight.plan.layout import UnitLayout, WeightLayout
from freight.plan.parts import mixed
from freight.plan.policy import LEAST_STAGED, Policy, Tier
from freight.plan.sweep import StreamModel, StreamPiece, StreamUnit
from freight.quantities import MIB, align_down, align_up

__all__ = [
    "RingSize",
    "choose_piece_bytes",
    "forecast_pieces",
    "size_ring",
    "staging_pieces",
    "stream_model",
]

_MOST_STAGED: Final = 64
_MOST_PIECE_BYTES: Final = 8 * MIB
_LEAST_LINK_BYTES: Final = 4 * MIB
_MOST_LINK_BYTES: Final = 16 * MIB
_LINK_PIECES: Final = 16
"""Of a unit that is large enough: as many as let keys, and what is computed, come between."""
_PIECES: Final = (8, 16)
_FEW_PIECES: Final = (4, 16)
"""Of a unit's weights in a forecast: as many as micro-batches, among which they are spread, but so
many at least and at most. Two came out up to 15 % off, four 1.5 %."""
_FEWEST_SLOTS: Final = 2
_GROUP_BYTES: Final[Mapping[Tier, int]] = {"gpu": 64 * MIB, "cpu": 16 * MIB}
"""Of experts that come and are computed together: a device's link brings them in a millisecond or
two, which is what asking for them takes; a disk is slower."""
_MOST_OF_A_GROUP: Final = 16
"""Experts of which anything passes through the ring."""
_MOST_BLOCKS_OF_A_UNIT: Final = 64
_UNLIKELY: Final = 0.001
"""That an expert is not chosen by a sweep's tokens, where they choose by chance."""
_STAGED_SHARE: Final = 1 / 64
"""Of the memory. Links wait for each other where little can be read ahead: of blocks whose keys
cross them too, plans took up to a third longer with three pieces than with 48."""


def choose_piece_bytes(compute_tier: Tier, unit_bytes: int) -> int:
    """The largest piece of weights, the largest unit having so many bytes.

    A piece takes up to 0.2 ms of the CPU's time, whatever its size, and a fast link brings 4 MiB in
    half of that: to a device come larger ones of large units.
    """
    most = _MOST_PIECE_BYTES
    if compute_tier == "gpu":
        most = min(_MOST_LINK_BYTES, max(_LEAST_LINK_BYTES, unit_bytes // _LINK_PIECES))
    return min(align_down(most, BLOCK), align_up(unit_bytes, BLOCK))


@dataclass(frozen=True, kw_only=True, slots=True)
class RingSize:
    """So many blocks of ``block_bytes``; up to ``most_together`` experts, which take up to
    ``group_blocks``, come together."""

    block_bytes: int
    num_blocks: int
    group_blocks: int
    most_together: int

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


def size_ring(layout: WeightLayout, piece_bytes: int) -> RingSize:
    """The ring of a layout whose pieces have up to so many bytes. A block has as many, or fewer
    where experts, which are small and many, would fill theirs in part.

    The largest three neighbours: while one unit is computed, the next two come, so that units that
    are long to load hide behind those that are long to compute; of experts three groups that come
    together. Never more than all of them.
    """
    largest = max((form.slot_bytes for form in layout.forms), default=0)
    expert = _expert_bytes(layout)
    block = piece_bytes
    if expert:
        even = -(-expert // -(-expert // piece_bytes))
        block = min(block, align_up(max(even, largest // _MOST_BLOCKS_OF_A_UNIT), BLOCK))
    most = _GROUP_BYTES[layout.compute_tier] // max(1, expert)
    return _size_ring(layout, block, max(1, min(most, _MOST_OF_A_GROUP)))


def _size_ring(layout: WeightLayout, block: int, together: int) -> RingSize:
    blocks = [-(-form.slot_bytes // block) for form in layout.forms]
    streamed = tuple(bool(form.stretches) for form in layout.forms)
    counts, threes = _neighbours(layout.form_of, streamed)
    total = sum(count * blocks[form] for form, count in counts)
    expert = -(-_expert_bytes(layout) // block)
    group = expert * together
    largest = max((sum(blocks[form] for form in three) for three in threes), default=0)
    return RingSize(
        block_bytes=block,
        num_blocks=min(total, max(largest, 3 * group)),
        group_blocks=group,
        most_together=together,
    )


def _expert_bytes(layout: WeightLayout) -> int:
    """What passes through the ring of the largest expert."""
    experts = (form.slot_bytes for form in layout.forms if form.unit.expert is not None)
    return max(experts, default=0)


@cache
def _neighbours(
    form_of: tuple[int, ...], streamed: tuple[bool, ...]
) -> tuple[tuple[tuple[int, int], ...], frozenset[tuple[int, int, int]]]:
    """Forms that are streamed, with the number of their units; and those of any three units that
    come one after the other, over the end of a sweep too. There are few, of any number of units."""
    forms = [form for form in form_of if streamed[form]]
    around = forms[2:] + forms[:2]
    threes = frozenset(zip(forms, forms[1:] + forms[:1], around, strict=True))
    return tuple(Counter(forms).items()), threes


def staging_pieces(room: int, piece_bytes: int, unit_bytes: int) -> int:
    """How many pieces of a unit from the disk may wait in RAM, of which there is so much."""
    most = min(_MOST_STAGED, -(-unit_bytes // piece_bytes))
    return max(LEAST_STAGED, min(most, int(_STAGED_SHARE * room) // piece_bytes))


def forecast_pieces(policy: Policy, *, is_rough: bool = False) -> int:
    """How many of a unit's weights a forecast runs from each tier."""
    fewest, most = _FEW_PIECES if is_rough else _PIECES
    return max(fewest, min(most, policy.num_micro_batches))


def embeds_in_place(layout: WeightLayout, policy: Policy) -> bool:
    """Whether rows of the only table that must be fetched are read to where the residual stream of
    their micro-batch will be, for there is room: all of it is in RAM, and no narrower."""
    programme, home = layout.programme, policy.compute_tier
    is_near = home == "cpu" and policy.activations.share(home) == 1
    if programme.receives or not is_near or len(layout.tables) != 1:
        return False
    (table,) = layout.tables
    return table.is_far(home) and table.weight.num_columns <= layout.stream_columns


def stream_model(
    layout: WeightLayout,
    policy: Policy,
    *,
    layers: Collection[int] | None = None,
    most_pieces: int | None = None,
    rolls: bool = False,
) -> StreamModel:
    """All units in order; only those of some ``layers``, in a ring of blocks so large that a unit
    has about ``most_pieces`` of them and comes in as many pieces from each tier, where a forecast
    needs no more. ``rolls``: layers with a window keep the pages alone that it reaches."""
    ring = size_ring(layout, policy.piece_bytes)
    if most_pieces is not None:
        largest = max(form.slot_bytes for form in layout.forms)
        block = max(ring.block_bytes, -(-largest // most_pieces))
        ring = _size_ring(layout, block, ring.most_together)
    pieces = [_stream_pieces(form, most_pieces) for form in layout.forms]
    staged = policy.staging_pieces * policy.piece_bytes
    from_disk = [piece.num_bytes for own in pieces for piece in own if piece.tier == "disk"]
    slots = max(_FEWEST_SLOTS, staged // max(from_disk, default=policy.piece_bytes))
    units = [StreamUnit(kind="embedding", layer=None)]
    num_layers = 1 + max(unit.layer or 0 for unit in layout.programme.units)
    recomputes = policy.recomputes(num_layers)
    for unit, form in zip(layout.programme.units[1:], layout.form_of, strict=True):
        if layers is None or unit.layer is None or unit.layer in layers:
            units.append(
                StreamUnit(
                    kind=unit.kind,
                    layer=unit.layer,
                    pieces=pieces[form],
                    needs_decode=layout.forms[form].decoded_bytes > 0,
                    expert=unit.expert,
                    recomputes=unit.kind == "attention" and recomputes[unit.layer or 0],
                    rolls=rolls and unit.has_window,
                )
            )
    return StreamModel(
        units=tuple(units),
        compute_tier=policy.compute_tier,
        ring_blocks=ring.num_blocks,
        block_bytes=ring.block_bytes,
        group_blocks=ring.group_blocks,
        tokens_of_all=_tokens_of_all(layout.programme),
        staging_slots=min(policy.staging_pieces, slots),
        receives=layout.programme.receives,
        sends=layout.programme.sends,
        needs_all=layout.programme.needs_all,
        embeds_in_place=embeds_in_place(layout, policy),
    )


def _tokens_of_all(programme: Programme) -> float:
    """How many tokens are likely to choose nearly all experts of a layer."""
    steps = (step for unit in programme.kinds for step in unit.steps)
    route = next((step for step in steps if isinstance(step, Route)), None)
    if route is None:
        return math.inf
    count = max(unit.expert for unit in programme.units if unit.expert is not None) + 1
    left = 1.0 - route.num_chosen / count
    return math.log(_UNLIKELY) / math.log(left) if left > 0.0 else 1.0


def _stream_pieces(own: UnitLayout, most_pieces: int | None) -> tuple[StreamPiece, ...]:
    pieces = [
        StreamPiece(tier=stretch.tier, num_bytes=size, offset=stretch.slot_offset + start)
        for stretch in own.stretches
        for start, size in stretch.cut(own.piece_bytes)
    ]
    return tuple(mixed(pieces if most_pieces is None else _joined(pieces, most_pieces)))


def _joined(pieces: Sequence[StreamPiece], most_pieces: int) -> Iterator[StreamPiece]:
    """Neighbours from one tier as one, so that at most so many from each tier are left."""
    for tier in ("disk", "cpu"):
        own = [piece for piece in pieces if piece.tier == tier]
        step = -(-len(own) // most_pieces)
        for first in range(0, len(own), step or 1):
            some = own[first : first + step]
            end = some[-1].offset + some[-1].num_bytes
            yield StreamPiece(tier=tier, num_bytes=end - some[0].offset, offset=some[0].offset)

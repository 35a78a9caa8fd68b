"""The ring that weights stream through: how large it is, and the layout as the schedule sees it.

Knows pieces and their sizes, no tensors and no operations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from freight.plan.layout import UnitLayout, WeightLayout
from freight.plan.policy import Policy
from freight.plan.sweep import StreamModel, StreamPiece, StreamUnit

__all__ = ["ring_blocks", "stream_model"]


def ring_blocks(layout: WeightLayout, policy: Policy) -> int:
    """Blocks (of ``policy.piece_bytes``) in the ring.

    The largest three neighbours: while one unit is computed, the next two come, so that units that
    are long to load hide behind those that are long to compute. Never more than all of them.
    """
    sizes = [-(-unit.slot_bytes // policy.piece_bytes) for unit in layout.units if unit.pieces]
    around = sizes[2:] + sizes[:2]
    threes = [sum(three) for three in zip(sizes, sizes[1:] + sizes[:1], around, strict=True)]
    return min(max(threes), sum(sizes)) if sizes else 0


def stream_model(
    layout: WeightLayout,
    policy: Policy,
    *,
    layers: Collection[int] | None = None,
    most_pieces: int | None = None,
) -> StreamModel:
    """All units in order; only those of some ``layers``, and what is brought for each in at most
    ``most_pieces`` from each tier, where a forecast needs no more."""
    units = [StreamUnit(kind="embedding", layer=None)]
    for own in layout.units:
        if layers is None or own.unit.layer is None or own.unit.layer in layers:
            units.append(_stream_unit(own, most_pieces))
    return StreamModel(
        units=tuple(units),
        compute_tier=policy.compute_tier,
        ring_blocks=ring_blocks(layout, policy),
        block_bytes=policy.piece_bytes,
    )


def _stream_unit(own: UnitLayout, most_pieces: int | None) -> StreamUnit:
    pieces = [
        StreamPiece(tier=piece.tier, num_bytes=piece.num_bytes, offset=piece.slot_offset)
        for piece in own.pieces
    ]
    return StreamUnit(
        kind=own.unit.kind,
        layer=own.unit.layer,
        pieces=tuple(pieces if most_pieces is None else _joined(pieces, most_pieces)),
        needs_decode=own.decoded_bytes > 0,
        expert=own.unit.expert,
    )


def _joined(pieces: Sequence[StreamPiece], most_pieces: int) -> Iterator[StreamPiece]:
    """Neighbours from one tier as one, so that at most so many from each tier are left."""
    for tier in ("disk", "cpu"):
        own = [piece for piece in pieces if piece.tier == tier]
        step = -(-len(own) // most_pieces)
        for first in range(0, len(own), step or 1):
            some = own[first : first + step]
            end = some[-1].offset + some[-1].num_bytes
            yield StreamPiece(tier=tier, num_bytes=end - some[0].offset, offset=some[0].offset)

"""What blocks and the head do with a residual stream that is several."""

from __future__ import annotations

from dataclasses import replace

from freight.model.decoder_parts import Parts
from freight.model.layer_kinds import Streams
from freight.model.programme import Clear, Step
from freight.model.stream_steps import Average, Collapse, Expand, Spread
from freight.model.weight import Weight

__all__ = ["collapse_last", "enter_block", "leave_block", "set_aside", "spread"]


def spread(own: Streams) -> list[Step]:
    """All begin as the embedding."""
    return [Spread(x="x", out="streams", num_streams=own.count)]


def enter_block(parts: Parts, own: Streams, prefix: str) -> list[Step]:
    """What the block works on, as ``x``, before its norm; and by what it goes into the streams."""
    matrix, base, scale = _weights(parts, f"{prefix}.streams", "m", "c")
    return [
        Collapse(
            x="streams",
            out="x",
            shares="shares",
            weight=matrix,
            base=base,
            scale=scale,
            num_streams=own.count,
            eps=parts.config.norm_eps,
            floor=own.floor,
            magnitude=own.magnitude,
            least_share=own.least_share,
            rounds=own.rounds,
        )
    ]


def set_aside(parts: Parts, own: Streams, prefix: str) -> list[Step]:
    """What experts work on, ``aside``; what they make is to be added up in ``x``."""
    norm = parts.norm(f"{prefix}.norm", "x", "aside")
    return [*enter_block(parts, own, prefix), norm, Clear(x="x")]


def leave_block(own: Streams, update: str) -> list[Step]:
    """What the block has made goes into the streams."""
    return [
        Expand(x="streams", y=update, shares="shares", num_streams=own.count, mixed=own.rounds > 0)
    ]


def collapse_last(parts: Parts, own: Streams) -> Step:
    """What the head works on, as ``x``."""
    if not own.weighs_last:
        return Average(x="streams", out="x", num_streams=own.count)
    matrix, base, scale = _weights(parts, "head.streams", "s", "1")
    return Collapse(
        x="streams",
        out="x",
        shares=None,
        weight=matrix,
        base=base,
        scale=scale,
        num_streams=own.count,
        eps=parts.config.norm_eps,
        floor=own.floor,
    )


def _weights(parts: Parts, prefix: str, mapped: str, scales: str) -> list[Weight]:
    """The matrix, row after row, what is added and the factors: small, and in float32."""
    dims = {"weight": f"{mapped}sD", "base": mapped, "scale": scales}
    return [
        replace(parts.vector(f"{prefix}.{name}", own), is_wide=True) for name, own in dims.items()
    ]

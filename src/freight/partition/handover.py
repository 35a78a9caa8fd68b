"""What it takes to hand the cache that prefill has left to decoding on the same chips."""

from __future__ import annotations

from dataclasses import dataclass

from freight.partition.cost import Cost
from freight.partition.moves import Move, move
from freight.partition.reshard import reshard

__all__ = ["Handover", "hand_over"]


@dataclass(frozen=True, slots=True)
class Handover:
    """Of a batch of decoding: ``moves`` of each layer's keys and values, the bytes that a chip
    sends for all layers, and the seconds that takes."""

    moves: tuple[Move, ...]
    num_bytes: float
    seconds: float


def hand_over(prefill: Cost, decode: Cost) -> Handover:
    """For the tokens that a prefill leaves, in as many rows as decode. InputError where these rows
    do not divide as prefill has cut its own."""
    before, after = (own.layers[0][0].outputs["keys"] for own in (prefill, decode))
    step = prefill.step
    sizes = {
        **decode.layers[0][0].sizes,
        "L": step.past + step.new_tokens,
    }
    moves, elements = reshard(before, after, sizes, decode.mesh)
    layers = decode.config.num_layers
    size = decode.setting.kv_bytes * layers
    seconds, layout = 0.0, before
    for own in moves:
        reached = move(layout, own)
        larger = reached if own.kind == "all-gather" else layout
        held = larger.elements(sizes, decode.mesh) * size
        seconds += decode.fabric.seconds(own.kind, held, own.axes)
        layout = reached
    return Handover(moves, elements * size, seconds / decode.efficiency.link)

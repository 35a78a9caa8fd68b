"""What a rank holds of a model that is cut: weights, keys, and the most that a call takes besides.

A call is walked through as the executor runs it, with what each step makes and forgets, what comes
in messages and what a function copies. Experts are taken to be chosen at most twice as often as on
average. Knows programmes, no machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final

from freight.distributed.tensor.attention import MOST_SCORES, is_fused_attention
from freight.distributed.tensor.executor import last_uses
from freight.distributed.tensor.packed import PackedWeights
from freight.distributed.tensor.ways import Way, Ways
from freight.partition.layout import Layout
from freight.partition.sharded import Compute, Sharded, Transfer
from freight.quantities import align_up, format_bytes

__all__ = ["Footprint", "footprint"]

_WIDE: Final = 4
_UNEVEN: Final = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Bytes of one rank. ``call``: of the largest call, and of reading the model before it."""

    weights: float
    keys: float
    call: float

    @property
    def total(self) -> float:
        return self.weights + self.keys + self.call

    def __str__(self) -> str:
        parts = {"weights": self.weights, "keys and values": self.keys, "a call": self.call}
        return ", ".join(f"{name} {format_bytes(int(size))}" for name, size in parts.items())


def footprint(
    ways: Ways,
    packed: PackedWeights,
    *,
    rows: int,
    longest: int,
    call_tokens: int,
    prompt: int,
    dtype_bytes: int,
) -> Footprint:
    """Of ``rows`` that have ``longest`` tokens at most, ``prompt`` of them before the first is
    made, in calls of up to ``call_tokens``. InputError where they cannot be cut so."""
    config = ways.config
    rows = align_up(rows, ways.row_parts)
    width = max(1, min(prompt, call_tokens // ways.row_parts))
    together = min(rows, max(1, call_tokens // width // ways.row_parts) * ways.row_parts)
    layers = range(config.num_layers)
    parts = [packed.stored_bytes(layer, dtype_bytes) for layer in layers]
    read = [packed.stored_bytes(layer, _WIDE) for layer in layers]
    for own, plain in ((parts, dtype_bytes), (read, _WIDE)):
        ends = packed.stored_bytes(None, plain)
        own.append({"embedding": ends["embedding"]} if config.tied_embeddings else ends)
    small = config.hidden_size + config.num_heads * config.head_dim + config.intermediate_size
    weights = sum(sum(own.values()) for own in parts) + 4 * _WIDE * small * config.num_layers
    calls = [
        _call(ways, packed, way, count, tokens, longest, dtype_bytes)
        for way in ways.ways
        for count, tokens in ((rows, 1), (together, width))
    ]
    reading = 3 * max(max(own.values()) for own in read)
    keys = max(
        _keys(own, rows, longest, mesh_size=dtype_bytes)
        for way in ways.ways
        for own in ways.programmes(way, rows, ways.token_parts(way)).layers.values()
    )
    # Where they are laid out anew a layer of them is there twice.
    held = keys * (config.num_layers + (len(ways.ways) > 1))
    return Footprint(weights=weights, keys=held, call=max(*calls, reading))


def _keys(own: Sharded, rows: int, longest: int, mesh_size: int) -> float:
    """Of a layer."""
    layout = next(step.layouts[1] for step in own.computes if step.kind == "attend")
    return layout.elements({**own.sizes, "B": rows, "L": longest}, own.mesh) * mesh_size


def _call(
    ways: Ways,
    packed: PackedWeights,
    way: Way,
    rows: int,
    tokens: int,
    longest: int,
    dtype_bytes: int,
) -> float:
    tokens = align_up(tokens, ways.token_parts(way))
    programmes = ways.programmes(way, rows, tokens)
    layers = list(programmes.layers.values())
    stream = layers[0].inputs["x"].elements(layers[0].sizes, ways.mesh) * dtype_bytes
    gathered = widened = 0.0
    for kind, own in programmes.layers.items():
        layer, mine = packed.first_layer(with_experts=kind), 0.0
        for name, layout in own.weights.items():
            used = own.used[name].elements(own.sizes, own.mesh)
            if used > layout.elements(own.sizes, own.mesh):
                each = packed.element_bytes(name, layer, dtype_bytes)
                mine += used * each
                if each < dtype_bytes and packed.find(name, layer) is None:
                    widened = max(widened, used * dtype_bytes)
        gathered = max(gathered, mine)
    # A layer's weights are used, the next one's come; what comes is put together then.
    fused = is_fused_attention(ways.config, tokens)
    peak = max(_values(own, longest, dtype_bytes, fused) for own in layers)
    # One that is kept in fewer bits lies as it was sent, and is widened before it is used.
    peak += 3 * gathered + widened + packed.scratch_bytes(dtype_bytes)
    vocabulary = rows * ways.config.vocab_size
    last = _values(programmes.logits, longest, dtype_bytes, fused) + 4 * _WIDE * vocabulary
    first = _values(programmes.embedding, longest, dtype_bytes, fused)
    return stream + max(peak, first, last)


def _values(own: Sharded, longest: int, dtype_bytes: int, fused: bool) -> float:
    """The most that values of a programme take at once."""
    sizes = {**own.sizes, "T": own.sizes["T"] * (1 if own.sizes["N"] == 1 else _UNEVEN)}

    def size(layout: Layout) -> float:
        return layout.elements(sizes, own.mesh) * dtype_bytes

    alive = {name: size(layout) for name, layout in own.inputs.items()}
    forgotten = last_uses(own.steps, own.outputs)
    peak = 0.0
    for number, step in enumerate(own.steps):
        if isinstance(step, Transfer):
            if step.is_weight:
                continue
            before, after = size(step.before), size(step.after)
            passing = 2 * after if step.move.kind == "all-gather" else 2 * before + after
            peak = max(peak, sum(alive.values()) + passing)
            alive[step.value] = after
        else:
            made = size(step.out_layout)
            scratch = _scratch(step, own, longest, dtype_bytes, fused)
            peak = max(peak, sum(alive.values()) + made + scratch)
            alive[step.out] = made
        for name in forgotten.get(number, ()):
            alive.pop(name, None)
    return peak


def _scratch(step: Compute, own: Sharded, longest: int, dtype_bytes: int, fused: bool) -> float:
    """What a function takes beside its result. ``fused``: attention keeps no scores."""
    result = step.out_layout.elements(own.sizes, own.mesh)
    match step.kind:
        case "norm" | "square sum":
            return 3 * _WIDE * step.layouts[0].elements(own.sizes, own.mesh)
        case "attend":
            queries, keys = (layout.shape(own.sizes, own.mesh) for layout in step.layouts)
            B, L, heads, _ = queries
            each = longest if fused else heads * longest
            scores = min(B * L * each, max(MOST_SCORES, each))  # fused: marks, as numbers
            copied = prod(keys) / L * longest  # keys of some rows
            hidden = min(B * L, MOST_SCORES / longest) * longest
            values = 3 * prod(queries) + 2 * prod(keys) + copied + 2 * scores
            return values * dtype_bytes + 2 * hidden
        case "dispatch" | "combine":
            return 2 * result * dtype_bytes
    return result * dtype_bytes

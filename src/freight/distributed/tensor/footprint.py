"""What a rank holds of a model that is cut: weights, keys, and the most that a call takes besides.
Where layers lie on the disk, also those that come from there, and what waits in a sweep.

A call is walked through as the executor runs it, with what each step makes and forgets, what comes
in messages and what a function copies. Experts are taken to be chosen at most twice as often as on
average. Knows programmes, no machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Final

from freight.distributed.tensor.attention import MOST_SCORES, is_fused_attention
from freight.distributed.tensor.executor import last_uses
from freight.distributed.tensor.layers import layer_bytes, slots_bytes
from freight.distributed.tensor.packed import PackedWeights
from freight.distributed.tensor.scoring import MOST_SCORED
from freight.distributed.tensor.ways import Way, Ways
from freight.partition.layout import Layout
from freight.partition.sharded import Compute, Sharded, Transfer
from freight.quantities import align_up, format_bytes

__all__ = ["Footprint", "WeightSizes", "footprint", "weight_sizes"]

_WIDE: Final = 4
_UNEVEN: Final = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSizes:
    """Bytes of one rank: of each of the ``layers`` as they lie in a file, of the ``ends`` and all
    vectors, and what ``reading`` the model takes besides."""

    layers: tuple[int, ...]
    ends: float
    reading: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Bytes of one rank. ``call``: of the largest call, and of reading the model before it.
    ``waiting``: of the calls of a sweep that are not being computed; ``token`` of a token of
    these."""

    weights: float
    keys: float
    call: float
    waiting: float = 0.0
    token: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.keys + self.call + self.waiting

    def offloaded(self, sizes: WeightSizes, *, kept: int, slots: int, tokens: int) -> Footprint:
        """With ``kept`` layers in memory and ``slots`` for the others, in sweeps of so many
        tokens. Rows that bring fewer tokens than others of a call are padded, to twice as many at
        most."""
        weights = sizes.ends + kept * max(sizes.layers) + slots_bytes(sizes.layers, slots)
        return replace(self, weights=weights, waiting=_UNEVEN * tokens * self.token)

    def __str__(self) -> str:
        parts = {"weights": self.weights, "keys and values": self.keys, "a call": self.call}
        if self.waiting:
            parts["other calls of a sweep"] = self.waiting
        return ", ".join(f"{name} {format_bytes(int(size))}" for name, size in parts.items())


def weight_sizes(ways: Ways, packed: PackedWeights, dtype_bytes: int) -> WeightSizes:
    """Of a model that is computed with in numbers of so many bytes."""
    config = ways.config
    layers = range(config.num_layers)
    parts = [packed.stored_bytes(layer, dtype_bytes) for layer in layers]
    read = [packed.stored_bytes(layer, _WIDE) for layer in layers]
    ends = []
    for plain in (dtype_bytes, _WIDE):
        own = packed.stored_bytes(None, plain)
        ends.append({"embedding": own["embedding"]} if config.tied_embeddings else own)
    small = config.hidden_size + config.num_heads * config.head_dim + config.intermediate_size
    return WeightSizes(
        layers=tuple(layer_bytes([*map(ceil, own.values())]) for own in parts),
        ends=sum(ends[0].values()) + 4 * _WIDE * small * config.num_layers,
        reading=3 * max(max(own.values()) for own in (*read, ends[1])),
    )


def footprint(
    ways: Ways,
    packed: PackedWeights,
    sizes: WeightSizes,
    *,
    rows: int,
    longest: int,
    call_tokens: int,
    prompt: int,
    dtype_bytes: int,
    has_scores: bool = False,
) -> Footprint:
    """Of ``rows`` that have ``longest`` tokens at most, ``prompt`` of them before the first is
    made, in calls of up to ``call_tokens``. Some may have tokens that are scored. InputError where
    they cannot be cut so."""
    config = ways.config
    rows = align_up(rows, ways.row_parts)
    width = max(1, min(prompt, call_tokens // ways.row_parts))
    together = min(rows, max(1, call_tokens // width // ways.row_parts) * ways.row_parts)
    calls = [
        _call(ways, packed, way, count, tokens, longest, dtype_bytes, MOST_SCORED * has_scores)
        for way in ways.ways
        for count, tokens in ((rows, 1), (together, width))
    ]
    keys = max(
        _keys(own, rows, longest, mesh_size=dtype_bytes)
        for way in ways.ways
        for own in ways.programmes(way, rows, ways.token_parts(way)).layers.values()
    )
    # Where they are laid out anew a layer of them is there twice.
    held = keys * (config.num_layers + (len(ways.ways) > 1))
    return Footprint(
        weights=sum(sizes.layers) + sizes.ends,
        keys=held,
        call=max(*calls, sizes.reading),
        token=_token(ways, rows, dtype_bytes),
    )


def _token(ways: Ways, rows: int, dtype_bytes: int) -> float:
    """Of a token that waits for others of its sweep: the stream, as most of it as any way has on a
    rank, and the rotation of its place. Logits of all rows count in a call."""
    config = ways.config
    stream = 0.0
    for way in ways.ways:
        tokens = ways.token_parts(way)
        own = next(iter(ways.programmes(way, rows, tokens).layers.values()))
        lain = (*own.inputs.values(), *own.outputs.values())
        most = max(layout.elements(own.sizes, own.mesh) for layout in lain)
        stream = max(stream, most / (rows * tokens))
    return (stream + config.head_dim) * dtype_bytes


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
    scored: int,
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
    vocabulary = max(rows, scored) * ways.config.vocab_size
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

"""Builds a decoder's programme from its switches: the one place that says what a switch means.

Knows no family, no torch and no tier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any, Final

from freight.model.activations import activation_step
from freight.model.expert_latents import narrow, widen
from freight.model.expert_layers import join_experts, route
from freight.model.factors import with_factors
from freight.model.head_unit import head_unit
from freight.model.kept_layers import chosen_latents, kept_steps
from freight.model.latent_steps import ExpandValues
from freight.model.layer_inputs import add_inputs, make_inputs
from freight.model.layer_kinds import CompressedKeys, Experts, KeptLatents
from freight.model.number_format import GROUP_SIZES
from freight.model.passing import carried
from freight.model.programme import (
    Add,
    AddPositions,
    Attend,
    Clear,
    Clip,
    Combine,
    Dispatch,
    Embed,
    Gate,
    Multiply,
    Programme,
    Project,
    Scale,
    ScaleBy,
    Step,
    Unit,
    UnitKind,
    Weigh,
)
from freight.model.projections import Projections
from freight.model.recurrent_layers import recurrent_steps
from freight.model.slope_steps import WIDE, Narrow, Widen, widened
from freight.model.stream_layers import (
    collapse_last,
    enter_block,
    leave_block,
    set_aside,
    spread,
)
from freight.model.switches import ModelConfig
from freight.quantities import align_down, align_up

__all__ = ["build_programme", "count_parameters", "tensor_shapes"]

_HEAD_CHUNK_MIN_ROWS: Final = 256
_HEAD_GRANULE_ROWS: Final = max(GROUP_SIZES)
"""Groups of compressed rows begin where chunks do."""


@lru_cache(maxsize=4)
def build_programme(config: ModelConfig) -> Programme:
    """The decoder's units. The head is cut so that no chunk is larger than the mean of the two
    largest neighbours, for the ring that weights stream through is as large as the largest three:
    with chunks beside a unit of a layer these are no more than without."""
    builder = _Builder(config)
    units = [builder.embedding()]
    for layer in range(config.num_layers):
        if config.attends(layer):
            units.append(builder.attention(layer))
        if config.keeps_state(layer):
            units.append(builder.recurrence(layer))
        if config.has_mlp(layer):
            units += builder.mlp_units(layer)
    if config.factors:
        units[1:] = [with_factors(unit, config) for unit in units[1:]]
    sizes = [unit.num_elements for unit in units[1:]]
    largest = max(map(sum, pairwise([*sizes, sizes[0]]))) // 2
    most = max(_HEAD_CHUNK_MIN_ROWS, largest // config.embedding_size)
    count = config.head_size
    num_chunks = -(-count // align_down(most, _HEAD_GRANULE_ROWS))
    chunk = align_up(-(-count // num_chunks), _HEAD_GRANULE_ROWS)
    if config.readout is not None and not config.readout.labels:
        chunk = count
    for first in range(0, count, chunk):
        units.append(builder.head(first, min(chunk, count - first)))
    return Programme(units=tuple(units), carried=carried(config))


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors by logical name, in the order in which a sweep uses them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for unit in build_programme(config).units:
        for weight in unit.weights:
            rows = weight.first_row + weight.num_rows
            columns = (weight.num_columns,)
            shapes[weight.name] = (rows, *columns) if weight.is_matrix else columns
    return shapes


def count_parameters(config: ModelConfig) -> int:
    """Weights of the whole model; tied embeddings count once, and so do shared norms."""
    counted = {
        name: prod(shape)
        for name, shape in tensor_shapes(config).items()
        if not (config.tied_embeddings and name == "head.weight")
        and not (config.shared_norm and config.parallel and ".mlp.norm" in name)
    }
    return sum(counted.values())


class _Builder(Projections):
    """Makes the units of one model."""

    def entered(self, layer: int, part: str) -> tuple[list[Step], str]:
        """The norm before a block, where there is one, and what the block works on."""
        if self.config.norm_place_in(layer) in ("after", "update"):
            return [], "x"
        own, prefix = self.config.streams, f"layers.{layer}.{part}"
        before = [] if own is None else enter_block(self, own, prefix)
        return [*before, self.norm(f"layers.{layer}.{part}.norm", "x", "normed")], "normed"

    def left(self, layer: int, part: str, last: Project) -> list[Step]:
        """A block's last product goes into the residual stream, with norms where they are."""
        c, place, prefix = self.config, self.config.norm_place_in(layer), f"layers.{layer}.{part}"
        if c.streams is not None:
            return [replace(last, out="update"), *leave_block(c.streams, "update")]
        if place in ("both", "update") or c.residual_scale is not None:
            steps: list[Step] = [replace(last, out="update")]
            if place in ("both", "update"):
                name = "norm" if c.norm_place == "update" else "post_norm"
                steps.append(self.norm(f"{prefix}.{name}", "update", "update"))
            if c.residual_scale is not None:
                steps.append(Scale(x="update", factor=c.residual_scale))
            return [*steps, Add(x="x", y="update")]
        steps = [replace(last, out="x", adds=True)]
        if place == "after":
            steps.append(self.norm(f"{prefix}.norm", "x", "x"))
        return steps

    # -- units ---------------------------------------------------------------------------------

    def embedding(self) -> Unit:
        c, out = self.config, "x"
        steps: list[Step] = []
        if c.embedding_size != c.hidden_size:
            out = "embedded"
            steps.append(self.project("embedding.project", out, "x", ("D", "E")))
        if c.embedding_scale is not None:
            steps.append(Scale(x="x", factor=c.embedding_scale))
        if c.learned_positions:
            table = self.matrix("embedding.positions", "P", "D")
            steps.append(AddPositions(x="x", weight=table, offset=c.position_offset))
        steps += [self.norm("embedding.norm", "x", "x")] if c.embedding_norm else []
        steps.insert(0, Embed(out=out, weight=self.matrix("embedding", "V", "E")))
        if c.layer_inputs is not None:
            look_up, *inner = make_inputs(self)
            steps = [steps[0], look_up, *steps[1:], *inner]
        steps += [] if c.streams is None else spread(c.streams)
        return Unit(name="embedding", kind="embedding", layer=None, steps=tuple(steps))

    def attention(self, layer: int) -> Unit:
        c, prefix = self.config, f"layers.{layer}.attention"
        steps, x = self.entered(layer, "attention")
        if c.latent is None:
            steps += self.queries_keys_values(prefix, x, layer)
        else:
            steps += self.latent_queries_keys(prefix, x, c.latent, layer)
        num_heads, (num_kv_heads, width) = c.query_heads(layer), c.heads(layer)
        names: Mapping[str, Any] = {own: own for own in "qkv"}
        if not c.keeping[layer]:
            names = {"q": "q", "k": None, "v": None}
        if c.keys_alone:
            names = {"q": "q", "k": "k", "v": "k"}
        if c.slope_span is not None:
            names = WIDE
            steps += widened(c.num_heads, c.num_kv_heads, c.slope_span, c.attention_scale)
        lacking = 0 if c.value_width is None else width - c.value_width
        if lacking:
            names = {**names, "v": WIDE["v"]}
            wide = Widen(x="v", out=WIDE["v"], num_heads=num_kv_heads, role="v", columns=lacking)
            steps.append(wide)
        steps.append(
            Attend(
                **names,
                out="attended",
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=width,
                scale=c.attention_scale,
                softcap=c.attention_softcap,
                window=c.sliding_windows[layer],
                kv_format=c.kv_format,
                share=c.attended_share,
                sinks=self.vector(f"{prefix}.sinks", self.head_dims(layer)[0])
                if c.has_sinks(layer)
                else None,
            )
        )
        of_heads, _, of_width = self.head_dims(layer)
        attended, dims = "attended", of_heads + of_width
        if c.latent is not None:
            attended, dims = "values", "NU"
            steps += [
                ExpandValues(x="attended", out="values", **self.of_heads(prefix, c.latent, layer))
            ]
        if c.slope_span is not None:
            attended = "values"
            steps.append(Narrow(x="attended", out=attended, num_heads=c.num_heads))
        if lacking:
            attended, dims = "values", f"{of_heads}U"
            narrow_values = Narrow(x="attended", out=attended, num_heads=num_heads, columns=lacking)
            steps.append(narrow_values)
        if c.gates_attention:
            steps.append(Weigh(x=attended, y="gates", function=c.gate_function))
        last = self.project(f"{prefix}.out", attended, c.beside, ("D", dims), c.out_bias)
        steps += [last] if c.attends_aside else self.left(layer, "attention", last)
        kind: UnitKind = "attention" if c.keeping[layer] else "queries"
        return Unit(name=prefix, kind=kind, layer=layer, steps=tuple(steps))

    def recurrence(self, layer: int) -> Unit:
        prefix, own = f"layers.{layer}.recurrence", self.config.recurrence
        assert own is not None
        # Its norm is called as that of layers that attend.
        steps, x = self.entered(layer, "attention")
        if isinstance(own, KeptLatents):
            return self.kept_latents(layer, own)
        if isinstance(own, CompressedKeys):
            inner, last = kept_steps(self, own, layer, prefix, x)
        else:
            inner, last = recurrent_steps(
                prefix, x, own, self.config.norm_eps, matrix=self.matrix, vector=self.vector
            )
        steps += [*inner, *self.left(layer, "attention", last)]
        steps += [Add(x="x", y=self.config.beside)] if own.is_beside else []
        return Unit(name=prefix, kind="recurrence", layer=layer, steps=tuple(steps))

    def kept_latents(self, layer: int, own: KeptLatents) -> Unit:
        """Attention over latents, by a row's state: of its keys some are chosen."""
        c, prefix = self.config, f"layers.{layer}.attention"
        assert c.latent is not None
        steps, x = self.entered(layer, "attention")
        sinks = self.vector(f"{prefix}.sinks", "N") if c.has_sinks(layer) else None
        steps += self.latent_queries_keys(prefix, x, c.latent, layer)
        steps += chosen_latents(self, own, layer, prefix, x, sinks)
        steps.append(
            ExpandValues(x="attended", out="values", **self.of_heads(prefix, c.latent, layer))
        )
        if c.gates_attention:
            steps.append(Weigh(x="values", y="gates", function=c.gate_function))
        last = self.project(f"{prefix}.out", "values", "update", ("D", "NU"), c.out_bias)
        steps += self.left(layer, "attention", last)
        return Unit(name=prefix, kind="recurrence", layer=layer, steps=tuple(steps))

    def mlp_units(self, layer: int) -> list[Unit]:
        experts = self.config.experts
        if experts is None or not experts.layers[layer]:
            return [self.mlp(layer)]
        if experts.beside_mlp:
            own = (self.expert(layer, experts, number) for number in range(experts.num_experts))
            return [self.router(layer, experts), *own, self.mlp(layer)]
        return [
            *([self.shared_expert(layer, experts)] if experts.shared_size else []),
            *([narrow(layer, self.matrix)] if experts.latent_size else []),
            self.router(layer, experts),
            *(self.expert(layer, experts, number) for number in range(experts.num_experts)),
            *([self.closing(layer)] if self.config.closes_experts else []),
            *([widen(layer, self.matrix)] if experts.latent_size else []),
        ]

    def mlp(self, layer: int) -> Unit:
        prefix = f"layers.{layer}.mlp"
        steps, x = self.entered(layer, "mlp")
        is_sharing = self.config.sharing is not None and layer >= self.config.sharing.first
        limit = self.config.mlp_limit(layer)
        *inner, last = self.feed_forward(prefix, x, "w" if is_sharing else "F", limit=limit)
        assert isinstance(last, Project)
        if (experts := self.config.experts) is not None and experts.beside_mlp:
            # What the experts have made is aside.
            steps += [*inner, last, self.norm(f"{prefix}.own_norm", "update", "update")]
            steps.append(self.norm(f"layers.{layer}.experts.post_norm", "aside", "aside"))
            steps.append(Add(x="update", y="aside"))
            steps.append(self.norm(f"{prefix}.post_norm", "update", "update"))
            steps.append(Add(x="x", y="update"))
        else:
            steps += [*inner, *self.left(layer, "mlp", last)]
            steps += [Add(x="x", y=self.config.beside)] if self.config.parallel else []
        steps += [] if self.config.layer_inputs is None else add_inputs(self, layer)
        if self.config.layer_scales:
            steps.append(ScaleBy(x="x", weight=self.vector(f"layers.{layer}.scale", "1")))
        return Unit(name=prefix, kind="mlp", layer=layer, steps=tuple(steps))

    def feed_forward(
        self, prefix: str, x: str, width: str, dim: str = "D", limit: float | None = None
    ) -> list[Step]:
        c = self.config
        inner = "gate" if c.gated_mlp else "up"
        steps: list[Step] = [self.project(f"{prefix}.{inner}", x, inner, (width, dim), c.mlp_bias)]
        if c.gated_mlp:
            steps.append(self.project(f"{prefix}.up", x, "up", (width, dim), c.mlp_bias))
        if c.gated_mlp and c.gate_limit is not None:
            steps.append(Gate(x="gate", y="up", limit=c.gate_limit, slope=c.gate_slope))
        else:
            own, limits = activation_step(c.activation, prefix, inner, self.vector), list[Step]()
            if limit is not None:
                # What a function makes of no number is below the negative of a limit after it.
                limits = [Clip(x="gate", limit=limit, is_top=c.limits_first)]
                limits.append(Clip(x="up", limit=limit))
            steps += [*limits, own] if c.limits_first else [own, *limits]
            steps += [Multiply(x="gate", y="up")] if c.gated_mlp else []
        steps.append(self.project(f"{prefix}.down", inner, "update", (dim, width), c.mlp_bias))
        return steps

    def router(self, layer: int, experts: Experts) -> Unit:
        prefix = f"layers.{layer}"
        name = f"{prefix}.router"
        corrections = None
        table, is_by_token = None, experts.is_by_token(layer)
        if is_by_token:
            table = replace(self.vector(f"{name}.table", "Ve"), is_wide=True)
        if experts.has_corrections and not is_by_token:
            corrections = replace(self.vector(f"{name}.corrections", "X"), is_wide=True)
        # What the experts work on is kept aside: the first of them changes x.
        x, norms = "aside", list[Step]()
        if experts.beside_mlp:  # there what they make is
            x, norms = "normed", [self.norm(f"{name}.norm", "x", "normed"), Clear(x="aside")]
        elif self.config.experts_see_stream:
            x, norms = "x", [Clear(x="aside")]
        elif not experts.shared_size:
            norms = self.put_aside(layer)
        scores = self.project(f"{name}.weight", x, "scores", ("X", "D"))
        if experts.has_bias:
            scores = replace(scores, bias=self.vector(f"{name}.bias", "X"))
        gains = self.vector(f"{name}.gains", "X") if experts.has_gains else None
        sharpness = self.config.hidden_size**-0.5 if experts.beside_mlp else 1.0
        steps = (*norms, scores, route(experts, corrections, gains, sharpness, table))
        return Unit(name=name, kind="router", layer=layer, steps=steps)

    def put_aside(self, layer: int) -> list[Step]:
        """What experts work on; in a parallel block attention's update is added then."""
        if self.config.streams is not None:
            return set_aside(self, self.config.streams, f"layers.{layer}.mlp")
        steps: list[Step] = [self.norm(f"layers.{layer}.mlp.norm", "x", "aside")]
        return [*steps, Add(x="x", y=self.config.beside)] if self.config.parallel else steps

    def shared_expert(self, layer: int, experts: Experts) -> Unit:
        """The MLP beside the experts, before them: it has the norm of all."""
        prefix = f"layers.{layer}.shared"
        limit = self.config.mlp_limit(layer)
        *inner, last = self.feed_forward(prefix, "aside", "Z", limit=limit)
        assert isinstance(last, Project)
        gate = self.project(f"{prefix}.share", "aside", "share", ("1", "D"))
        found = join_experts(last, gate, experts, sums=self.config.norms_sum)
        if not found:
            is_sum = self.config.streams is not None
            found = (
                [replace(last, out="x", adds=True)] if is_sum else self.left(layer, "shared", last)
            )
        steps = [*self.put_aside(layer), *inner, *found]
        return Unit(name=prefix, kind="mlp", layer=layer, steps=tuple(steps))

    def expert(self, layer: int, experts: Experts, number: int) -> Unit:
        prefix, comes_first = f"layers.{layer}.experts.{number}", experts.weighs_input
        source, target, dim = "aside", "x", "D"
        norms: list[Step] = []
        if experts.beside_mlp:  # each norms its own tokens, or a third value would be carried
            source, target = target, source
            norms = [self.norm(f"layers.{layer}.experts.norm", "chosen", "chosen")]
        elif self.config.experts_see_stream:
            source, target = target, source
        elif experts.latent_size:
            source, target, dim = "narrow", "made", "L"
        elif self.config.norms_sum:
            target = "sum"
        steps = (
            Dispatch(x=source, out="chosen", weighs=comes_first),
            *norms,
            *self.feed_forward(prefix, "chosen", "Y", dim, experts.limit(layer)),
            Combine(x=target, y="update", weighs=not comes_first),
        )
        return Unit(name=prefix, kind="expert", layer=layer, steps=steps, expert=number)

    def closing(self, layer: int) -> Unit:
        """What the experts and the MLP beside them have made goes into the stream at once."""
        if (own := self.config.streams) is not None:
            name, added = f"layers.{layer}.mlp.closing", leave_block(own, "x")
            return Unit(name=name, kind="mlp", layer=layer, steps=tuple(added))
        prefix, made, name = f"layers.{layer}.mlp", "sum", "post_norm"
        if self.config.experts_see_stream:
            made, name = "aside", "norm"
        steps = (self.norm(f"{prefix}.{name}", made, made), Add(x="x", y=made))
        return Unit(name=f"{prefix}.closing", kind="mlp", layer=layer, steps=steps)

    def head(self, first_row: int, num_rows: int) -> Unit:
        c, x, norm, narrow = self.config, "x", None, None
        if c.final_norm:
            norm, x = self.norm("head.norm", "x", "normed"), "normed"
        if c.embedding_size != c.hidden_size and c.readout is None:
            narrow = self.project("head.project", x, "narrowed", ("E", "D"))
        bias = self.vector("head.bias", "V") if c.head_bias and c.readout is None else None
        unit = head_unit(c, first_row, num_rows, norm=norm, narrow=narrow, bias=bias)
        if c.streams is None:
            return unit
        return replace(unit, steps=(collapse_last(self, c.streams), *unit.steps))

"""Builds a decoder's programme from its switches: the one place that says what a switch means.

Knows no family, no torch and no tier.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any, Final

from freight.model.expert_latents import narrow, widen
from freight.model.factors import with_factors
from freight.model.latent_steps import AbsorbKeys, ExpandValues, JoinLatent, SplitLatent
from freight.model.number_format import GROUP_SIZES
from freight.model.programme import (
    Activate,
    Add,
    AddPositions,
    Attend,
    Cap,
    Combine,
    Dispatch,
    Embed,
    Gate,
    Level,
    Multiply,
    Norm,
    Programme,
    Project,
    Rotate,
    Route,
    Scale,
    Split,
    Step,
    Unit,
    Weigh,
    Weight,
)
from freight.model.recurrent_layers import recurrent_sizes, recurrent_steps
from freight.model.recurrent_steps import Deal, Dealt
from freight.model.rope_config import RopeConfig
from freight.model.switches import Experts, Latent, ModelConfig
from freight.quantities import align_down, align_up

__all__ = ["build_programme", "count_parameters", "tensor_shapes"]

_HEAD_CHUNK_MIN_ROWS: Final = 256
_LATENT_EPS: Final = 1e-6
_HEAD_GRANULE_ROWS: Final = max(GROUP_SIZES)
"""Groups of compressed rows begin where chunks do."""


@lru_cache(maxsize=4)
def build_programme(config: ModelConfig) -> Programme:
    """The decoder's units. The head is cut so that no chunk is larger than the largest layer unit,
    for the slots that weights stream through are as large as the largest unit."""
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
    largest = max(unit.num_elements for unit in units[1:])
    most = max(_HEAD_CHUNK_MIN_ROWS, largest // config.embedding_size)
    num_chunks = -(-config.vocab_size // align_down(most, _HEAD_GRANULE_ROWS))
    chunk = align_up(-(-config.vocab_size // num_chunks), _HEAD_GRANULE_ROWS)
    for first in range(0, config.vocab_size, chunk):
        units.append(builder.head(first, min(chunk, config.vocab_size - first)))
    names = ("x", "aside") if config.attends_aside or config.experts else ("x",)
    columns = dict.fromkeys(names, config.hidden_size)
    if config.experts and config.experts.latent_size:
        columns |= dict.fromkeys(("narrow", "made"), config.experts.latent_size)
    return Programme(units=tuple(units), carried=tuple(columns.items()))


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


class _Builder:
    """Makes the units of one model, weights by their dims."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.sizes: dict[str, int] = {
            "D": config.hidden_size,
            "E": config.embedding_size,
            "F": config.intermediate_size,
            "N": config.num_heads,
            "K": config.num_kv_heads,
            "H": config.head_dim,
            "V": config.vocab_size,
            "P": config.max_positions + config.position_offset,
            "S": config.num_heads + 2 * config.num_kv_heads,
            "X": config.experts.num_experts if config.experts else 0,
            "Y": config.experts.intermediate_size if config.experts else 0,
            "Z": config.experts.shared_size if config.experts else 0,
            "L": config.experts.latent_size if config.experts else 0,
            "1": 1,
            "2": 2,
        }
        names = ("num_heads", "num_kv_heads", "head_dim")
        self.heads: dict[str, Any] = {name: getattr(config, name) for name in names}
        if (latent := config.latent) is not None:
            turned = config.head_dim - latent.rank
            self.sizes |= {
                "C": latent.rank,
                "A": latent.rank + turned,
                "W": latent.key_width + turned,
                "B": latent.key_width + latent.value_width,
                "U": latent.value_width,
                "Q": latent.query_rank or 0,
            }
        if config.recurrence is not None:
            self.sizes |= recurrent_sizes(config.recurrence)

    # -- weights and common steps --------------------------------------------------------------

    def matrix(self, name: str, out_dims: str, in_dims: str) -> Weight:
        return Weight(
            name=name,
            out_dims=tuple(out_dims),
            in_dims=tuple(in_dims),
            num_rows=prod(self.sizes[dim] for dim in out_dims),
            num_columns=prod(self.sizes[dim] for dim in in_dims),
        )

    def vector(self, name: str, dims: str) -> Weight:
        columns = prod(self.sizes[dim] for dim in dims)
        return Weight(name=name, out_dims=(), in_dims=tuple(dims), num_rows=1, num_columns=columns)

    def project(
        self, name: str, x: str, out: str, dims: tuple[str, str], biased: bool = False
    ) -> Project:
        """``dims`` are those of the output and of the input."""
        bias = self.vector(f"{name}_bias", dims[0]) if biased else None
        return Project(x=x, out=out, weight=self.matrix(name, *dims), bias=bias)

    def norm(self, name: str, x: str, out: str) -> Norm:
        return Norm(
            x=x,
            out=out,
            kind=self.config.norm,  # type: ignore[arg-type]
            weight=self.vector(name, "D"),
            bias=self.vector(f"{name}_bias", "D") if self.config.norm_bias else None,
            eps=self.config.norm_eps,
        )

    def entered(self, prefix: str) -> tuple[list[Step], str]:
        """The norm before a block, where there is one, and what the block works on."""
        if self.config.norm_place in ("after", "update"):
            return [], "x"
        return [self.norm(f"{prefix}.norm", "x", "normed")], "normed"

    def left(self, prefix: str, last: Project) -> list[Step]:
        """A block's last product goes into the residual stream, with norms where they are."""
        c = self.config
        if c.norm_place in ("both", "update") or c.residual_scale is not None:
            steps: list[Step] = [replace(last, out="update")]
            if c.norm_place in ("both", "update"):
                name = "post_norm" if c.norm_place == "both" else "norm"
                steps.append(self.norm(f"{prefix}.{name}", "update", "update"))
            if c.residual_scale is not None:
                steps.append(Scale(x="update", factor=c.residual_scale))
            return [*steps, Add(x="x", y="update")]
        steps = [replace(last, out="x", adds=True)]
        if self.config.norm_place == "after":
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
        steps.insert(0, Embed(out=out, weight=self.matrix("embedding", "V", "E")))
        return Unit(name="embedding", kind="embedding", layer=None, steps=tuple(steps))

    def attention(self, layer: int) -> Unit:
        c, prefix = self.config, f"layers.{layer}.attention"
        steps, x = self.entered(prefix)
        if c.latent is None:
            steps += self.queries_keys_values(prefix, x, c.ropes[layer])
        else:
            steps += self.latent_queries_keys(prefix, x, c.latent, c.ropes[layer])
        steps.append(
            Attend(
                q="q",
                k="k",
                v="v",
                out="attended",
                **self.heads,
                scale=c.attention_scale,
                softcap=c.attention_softcap,
                window=c.sliding_windows[layer],
                kv_format=c.kv_format,
                share=c.attended_share,
                sinks=self.vector(f"{prefix}.sinks", "N") if c.attention_sinks else None,
            )
        )
        attended, dims = "attended", "NH"
        if c.latent is not None:
            attended, dims = "values", "NU"
            steps.append(
                ExpandValues(x="attended", out="values", **self.of_heads(prefix, c.latent))
            )
        if c.gated_attention:
            steps.append(Weigh(x="attended", y="gates"))
        last = self.project(f"{prefix}.out", attended, "aside", ("D", dims), c.out_bias)
        steps += [last] if c.attends_aside else self.left(prefix, last)
        return Unit(name=prefix, kind="attention", layer=layer, steps=tuple(steps))

    def recurrence(self, layer: int) -> Unit:
        prefix, own = f"layers.{layer}.recurrence", self.config.recurrence
        assert own is not None
        # Its norm is called as that of layers that attend.
        steps, x = self.entered(f"layers.{layer}.attention")
        inner, last = recurrent_steps(
            prefix, x, own, self.config.norm_eps, matrix=self.matrix, vector=self.vector
        )
        steps += [*inner, *self.left(f"layers.{layer}.attention", last)]
        steps += [Add(x="x", y="aside")] if own.is_beside else []
        return Unit(name=prefix, kind="recurrence", layer=layer, steps=tuple(steps))

    def gated_queries(self, prefix: str, x: str) -> list[Step]:
        """Queries and gates, which take turns head by head."""
        c = self.config
        width, columns = c.head_dim, c.num_heads * c.head_dim
        parts = tuple(
            Dealt(out=out, begin=begin, width=width, first=0, num_columns=columns)
            for out, begin in (("q", 0), ("gates", width))
        )
        return [
            self.project(f"{prefix}.q", x, "queries", ("2NH", "D"), c.qkv_bias),
            Deal(x="queries", num_groups=c.num_heads, parts=parts),
        ]

    def queries_keys_values(self, prefix: str, x: str, rope: RopeConfig | None) -> list[Step]:
        c = self.config
        steps: list[Step] = []
        if c.fused_qkv:
            steps += [
                self.project(f"{prefix}.qkv", x, "qkv", ("SH", "D"), c.qkv_bias),
                Split(x="qkv", q="q", k="k", v="v", **self.heads),
            ]
        else:
            names = [("q", "NH"), ("k", "KH"), ("v", "KH")]
            if c.gated_attention:
                steps += self.gated_queries(prefix, x)
                del names[0]
            for name, rows in names:
                steps.append(self.project(f"{prefix}.{name}", x, name, (rows, "D"), c.qkv_bias))
        for name, count in (("q", c.num_heads), ("k", c.num_kv_heads)):
            turns = [] if rope is None else [Rotate(x=name, num_heads=count, rope=rope)]
            if c.qk_norm in ("none", "rotated"):
                steps += turns
                if c.qk_norm == "rotated" and turns:
                    steps.append(Level(x=name, num_heads=count, eps=c.norm_eps))
                continue
            norm = self.qk_norm(f"{prefix}.{name}_norm", name, count)
            steps += [*turns, norm] if c.qk_norm == "per_rotated_head" else [norm, *turns]
        return steps

    def latent_queries_keys(
        self, prefix: str, x: str, latent: Latent, rope: RopeConfig | None
    ) -> list[Step]:
        c = self.config
        assert rope is not None
        widths = {"latent_width": latent.rank, "turned_width": c.head_dim - latent.rank}
        steps: list[Step] = []
        source, dims = x, "D"
        if latent.query_rank is not None:
            name = f"{prefix}.q_down"
            steps.append(self.project(name, x, "narrow", ("Q", "D"), c.qkv_bias))
            steps.append(self.latent_norm(f"{name}_norm", "narrow", "Q"))
            source, dims = "narrow", "Q"
        steps += [
            self.project(f"{prefix}.q", source, "queries", ("NW", dims)),
            AbsorbKeys(x="queries", out="q", **self.of_heads(prefix, latent)),
            Rotate(x="q", num_heads=c.num_heads, rope=rope),
            self.project(f"{prefix}.kv_down", x, "kept", ("A", "D"), c.qkv_bias),
            SplitLatent(x="kept", latent="latent", turned="turned", **widths),
            self.latent_norm(f"{prefix}.kv_norm", "latent", "C"),
            Rotate(x="turned", num_heads=1, rope=rope),
            JoinLatent(x="latent", turned="turned", k="k", v="v", **widths),
        ]
        return steps

    def of_heads(self, prefix: str, latent: Latent) -> dict[str, Any]:
        """What makes keys and values of a latent."""
        return {
            "weight": self.matrix(f"{prefix}.kv_up", "NB", "C"),
            "num_heads": self.config.num_heads,
            "key_width": latent.key_width,
            "value_width": latent.value_width,
            "turned_width": self.config.head_dim - latent.rank,
        }

    def latent_norm(self, name: str, x: str, dim: str) -> Norm:
        weight = self.vector(name, dim)
        return Norm(x=x, out=x, kind="rms", weight=weight, bias=None, eps=_LATENT_EPS)

    def qk_norm(self, name: str, x: str, num_heads: int) -> Norm:
        heads = "N" if x == "q" else "K"
        kind = self.config.qk_norm
        return Norm(
            x=x,
            out=x,
            kind=self.config.norm,  # type: ignore[arg-type]
            weight=self.vector(name, "H" if kind.startswith("per_") else f"{heads}H"),
            bias=None,
            eps=self.config.norm_eps,
            num_heads=1 if kind == "whole" else num_heads,
        )

    def mlp_units(self, layer: int) -> list[Unit]:
        experts = self.config.experts
        if experts is None or not experts.layers[layer]:
            return [self.mlp(layer)]
        return [
            *([self.shared_expert(layer, experts)] if experts.shared_size else []),
            *([narrow(layer, self.matrix)] if experts.latent_size else []),
            self.router(layer, experts),
            *(self.expert(layer, experts, number) for number in range(experts.num_experts)),
            *([widen(layer, self.matrix)] if experts.latent_size else []),
        ]

    def mlp(self, layer: int) -> Unit:
        prefix = f"layers.{layer}.mlp"
        steps, x = self.entered(prefix)
        *inner, last = self.feed_forward(prefix, x, "F")
        assert isinstance(last, Project)
        steps += [*inner, *self.left(prefix, last)]
        steps += [Add(x="x", y="aside")] if self.config.parallel else []
        return Unit(name=prefix, kind="mlp", layer=layer, steps=tuple(steps))

    def feed_forward(self, prefix: str, x: str, width: str, dim: str = "D") -> list[Step]:
        c = self.config
        inner = "gate" if c.gated_mlp else "up"
        steps: list[Step] = [self.project(f"{prefix}.{inner}", x, inner, (width, dim), c.mlp_bias)]
        if c.gated_mlp:
            steps.append(self.project(f"{prefix}.up", x, "up", (width, dim), c.mlp_bias))
        if c.gated_mlp and c.gate_limit is not None:
            steps.append(Gate(x="gate", y="up", limit=c.gate_limit, slope=c.gate_slope))
        else:
            steps.append(Activate(x=inner, function=c.activation))
            steps += [Multiply(x="gate", y="up")] if c.gated_mlp else []
        steps.append(self.project(f"{prefix}.down", inner, "update", (dim, width), c.mlp_bias))
        return steps

    def router(self, layer: int, experts: Experts) -> Unit:
        prefix = f"layers.{layer}"
        name = f"{prefix}.router"
        corrections = None
        if experts.has_corrections:
            corrections = replace(self.vector(f"{name}.corrections", "X"), is_wide=True)
        bias = self.vector(f"{name}.bias", "X") if experts.has_bias else None
        scores = self.project(f"{name}.weight", "aside", "scores", ("X", "D"))
        # What the experts work on is kept aside: the first of them changes x.
        norms = [] if experts.shared_size else [self.norm(f"{prefix}.mlp.norm", "x", "aside")]
        steps: tuple[Step, ...] = (
            *norms,
            replace(scores, bias=bias),
            Route(
                x="scores",
                num_chosen=experts.per_token,
                normalised=experts.normalised,
                scores=experts.scores,
                scale=experts.scale,
                corrections=corrections,
                num_groups=experts.num_groups,
                best_of_group=experts.best_of_group,
                groups_chosen=experts.groups_per_token,
            ),
        )
        return Unit(name=name, kind="router", layer=layer, steps=steps)

    def shared_expert(self, layer: int, experts: Experts) -> Unit:
        """The MLP beside the experts, before them: it has the norm of all."""
        prefix = f"layers.{layer}.shared"
        *inner, last = self.feed_forward(prefix, "aside", "Z")
        assert isinstance(last, Project)
        steps: list[Step] = [self.norm(f"layers.{layer}.mlp.norm", "x", "aside"), *inner]
        if experts.shared_gate:
            gate = self.project(f"{prefix}.share", "aside", "share", ("1", "D"))
            steps += [last, gate, Weigh(x="update", y="share"), Add(x="x", y="update")]
        else:
            steps += self.left(prefix, last)
        return Unit(name=prefix, kind="mlp", layer=layer, steps=tuple(steps))

    def expert(self, layer: int, experts: Experts, number: int) -> Unit:
        prefix, comes_first = f"layers.{layer}.experts.{number}", experts.weighs_input
        x, out, dim = ("narrow", "made", "L") if experts.latent_size else ("aside", "x", "D")
        steps = (
            Dispatch(x=x, out="chosen", weighs=comes_first),
            *self.feed_forward(prefix, "chosen", "Y", dim),
            Combine(x=out, y="update", weighs=not comes_first),
        )
        return Unit(name=prefix, kind="expert", layer=layer, steps=steps, expert=number)

    def head(self, first_row: int, num_rows: int) -> Unit:
        c, x = self.config, "x"
        steps: list[Step] = []
        if c.final_norm:
            steps.append(self.norm("head.norm", "x", "normed"))
            x = "normed"
        if c.embedding_size != c.hidden_size:
            steps.append(self.project("head.project", x, "narrowed", ("E", "D")))
            x = "narrowed"
        table = self.matrix("head.weight", "V", "E")
        rows = replace(table, num_rows=num_rows, first_row=first_row)
        steps.append(Project(x=x, out="logits", weight=rows))
        if c.logits_scale is not None:
            steps.append(Scale(x="logits", factor=c.logits_scale))
        if c.logits_softcap is not None:
            steps.append(Cap(x="logits", limit=c.logits_softcap))
        return Unit(name=f"head.{first_row}", kind="head", layer=None, steps=tuple(steps))

"""The steps of a layer whose keys are kept as a state: what it works on in, its update out."""

from __future__ import annotations

from dataclasses import replace

from freight.model.decoder_parts import Parts
from freight.model.kept_steps import (
    AttendChosen,
    AttendKept,
    ChooseKept,
    ChooseKeys,
    Compress,
    ProjectGroups,
)
from freight.model.layer_kinds import CHOSEN, CompressedKeys, Index, KeptLatents
from freight.model.programme import Level, Norm, Project, Rotate, Step
from freight.model.projections import Projections
from freight.model.rope_config import RopeConfig
from freight.model.weight import Weight

__all__ = ["chosen_latents", "kept_steps"]


def kept_steps(
    parts: Parts, own: CompressedKeys, layer: int, prefix: str, x: str
) -> tuple[list[Step], Project]:
    """All but the last product, and that one."""
    c = parts.config
    rope, num_heads = c.ropes[layer], c.num_heads
    assert rope is not None
    first = own.width - rope.rotary_dim

    def rotate(name: str, count: int, *, backwards: bool = False) -> Rotate:
        return Rotate(x=name, num_heads=count, rope=rope, first=first, backwards=backwards)

    def norm(name: str, value: str, dim: str) -> Norm:
        return replace(
            parts.norm(f"{prefix}.{name}", value, value),
            weight=parts.vector(f"{prefix}.{name}", dim),
        )

    steps: list[Step] = [
        parts.project(f"{prefix}.q_down", x, "narrow", ("Q", "D")),
        parts.project(f"{prefix}.kv", x, "kv", ("H", "D")),
    ]
    compress = choose = None

    def compressed(kind: str, width: str) -> Compress:
        doubled = own.doubled[layer]
        rows, places = f"2{width}" if doubled else width, "b" if doubled else "a"
        steps.extend(
            parts.project(f"{prefix}.{kind}{name}", x, f"{kind}{name}", (rows, "D"))
            for name in ("sources", "source_gates")
        )
        return Compress(
            x=f"{kind}sources",
            gates=f"{kind}source_gates",
            bias=_wide(parts, f"{prefix}.{kind}source_bias", places + rows),
            weight=parts.vector(f"{prefix}.{kind}source_norm", width),
            rate=own.rates[layer],
            doubled=doubled,
            eps=c.norm_eps,
            rope=rope,
            max_positions=c.max_positions,
            most_keys=own.most_keys(layer),
        )

    if own.rates[layer]:
        compress = compressed("", "H")
    if own.index is not None and own.chooses(layer):
        choose = ChooseKept(
            q="index_q",
            weights="index_weights",
            num_heads=own.index.num_heads,
            width=own.index.width,
            num_chosen=own.index.num_chosen,
            compress=compressed("index_", "t"),
        )
        steps.append(parts.project(f"{prefix}.index_weights", x, "index_weights", ("l", "D")))
    steps += [
        norm("q_down_norm", "narrow", "Q"),
        parts.project(f"{prefix}.q", "narrow", "q", ("NH", "Q")),
        *_index_queries(parts, choose, prefix, rope),
        Level(x="q", num_heads=num_heads, eps=c.norm_eps),
        rotate("q", num_heads),
        norm("kv_norm", "kv", "H"),
        rotate("kv", 1),
        AttendKept(
            q="q",
            kv="kv",
            out="attended",
            num_heads=num_heads,
            width=own.width,
            window=own.window,
            scale=c.attention_scale,
            sinks=_wide(parts, f"{prefix}.sinks", "N"),
            compress=compress,
            choose=choose,
        ),
        # What is attended has turned with the keys; so it is as seen from the query.
        rotate("attended", num_heads, backwards=True),
        ProjectGroups(
            x="attended",
            out="grouped",
            weight=parts.matrix(f"{prefix}.groups", "go", "j"),
            num_groups=own.groups,
        ),
    ]
    return steps, parts.project(f"{prefix}.out", "grouped", "update", ("D", "go"))


def _index_queries(
    parts: Parts, choose: ChooseKept | None, prefix: str, rope: RopeConfig
) -> list[Step]:
    if choose is None:
        return []
    first = choose.width - rope.rotary_dim
    return [
        parts.project(f"{prefix}.index_q", "narrow", "index_q", ("lt", "Q")),
        Rotate(x="index_q", num_heads=choose.num_heads, rope=rope, first=first),
    ]


def chosen_latents(
    parts: Projections, own: KeptLatents, layer: int, prefix: str, x: str, sinks: Weight | None
) -> list[Step]:
    """Attention of queries ``q`` over keys ``k``, which an indexer chooses, or has for a layer
    before."""
    is_shared = own.index.is_shared(layer)
    steps, choose = ([], None) if is_shared else _choice(parts, own.index, layer, prefix, x)
    attended = AttendChosen(
        q="q",
        k="k",
        out="attended",
        num_heads=parts.config.num_heads,
        width=own.width,
        scale=parts.config.attention_scale,
        sinks=sinks,
        num_chosen=own.index.num_chosen,
        most_keys=own.longest,
        index=choose,
        chosen=CHOSEN if own.chosen_columns else None,
    )
    return [*steps, attended]


def _choice(
    parts: Projections, index: Index, layer: int, prefix: str, x: str
) -> tuple[list[Step], ChooseKeys]:
    """It takes queries of the narrow ones, or of what the layer works on as it takes keys."""

    def norm(name: str, source: str, out: str, dim: str) -> Norm:
        own = (parts.vector(f"{prefix}.{name}_{part}", dim) for part in ("norm", "norm_bias"))
        weight, bias = own
        return Norm(x=source, out=out, kind="layer", weight=weight, bias=bias, eps=index.eps)

    source, dim = ("levelled", "D") if index.of_stream else ("narrow", "Q")
    steps: list[Step] = [
        *([norm("index_q", x, source, dim)] * index.of_stream),
        parts.project(f"{prefix}.index_q", source, "index_q", ("lt", dim)),
        *parts.grown(prefix, "index_q", index.num_heads),
        parts.project(f"{prefix}.index_k", x, "index_k", ("t", "D")),
        parts.project(f"{prefix}.index_weights", x, "index_weights", ("l", "D")),
        norm("index_k", "index_k", "index_k", "t"),
    ]
    if (rope := parts.config.ropes[layer]) is not None:
        first = index.width - rope.rotary_dim if index.turns_last else 0
        turned = (("index_q", index.num_heads), ("index_k", 1))
        steps += [
            Rotate(x=name, num_heads=count, rope=rope, first=first, pairs=index.pairs)
            for name, count in turned
        ]
    choose = ChooseKeys(
        q="index_q",
        k="index_k",
        weights="index_weights",
        num_heads=index.num_heads,
        width=index.width,
    )
    return steps, choose


def _wide(parts: Parts, name: str, dims: str) -> Weight:
    return replace(parts.vector(name, dims), is_wide=True)

"""The steps of a layer whose keys are kept as a state: what it works on in, its update out."""

from __future__ import annotations

from dataclasses import replace

from freight.model.decoder_parts import Parts
from freight.model.kept_steps import AttendKept, Compress, ProjectGroups
from freight.model.layer_kinds import Compression
from freight.model.programme import Level, Norm, Project, Rotate, Step
from freight.model.weight import Weight

__all__ = ["kept_steps"]


def kept_steps(
    parts: Parts, own: Compression, layer: int, prefix: str, x: str
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
    rate, compress = own.rates[layer], None
    if rate:
        doubled = own.doubled[layer]
        rows, places = "2H" if doubled else "H", "b" if doubled else "a"
        steps += [
            parts.project(f"{prefix}.{name}", x, name, (rows, "D"))
            for name in ("sources", "source_gates")
        ]
        compress = Compress(
            x="sources",
            gates="source_gates",
            bias=_wide(parts, f"{prefix}.source_bias", places + rows),
            weight=parts.vector(f"{prefix}.source_norm", "H"),
            rate=rate,
            doubled=doubled,
            eps=c.norm_eps,
            rope=rope,
            max_positions=c.max_positions,
        )
    steps += [
        norm("q_down_norm", "narrow", "Q"),
        parts.project(f"{prefix}.q", "narrow", "q", ("NH", "Q")),
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


def _wide(parts: Parts, name: str, dims: str) -> Weight:
    return replace(parts.vector(name, dims), is_wide=True)

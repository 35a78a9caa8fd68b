"""The steps of a layer that keeps a state instead of keys: what it works on in, its update out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from freight.model.layer_kinds import Recurrence
from freight.model.programme import Activate, Multiply, Norm, Project, Step, Weigh
from freight.model.recurrent_steps import Convolve, Deal, Dealt, DeltaRule, Scan
from freight.model.weight import Weight

__all__ = ["recurrent_sizes", "recurrent_steps"]

Matrix = Callable[[str, str, str], Weight]
Vector = Callable[[str, str], Weight]


def recurrent_sizes(own: Recurrence) -> Mapping[str, int]:
    """Dims: G heads of queries and keys, R of values, J and I columns of each, M of all that is
    convolved over T tokens; O of it with the gates; r numbers that rates and gates are made of."""
    gates = own.num_heads * own.value_width
    return {
        "G": own.num_key_heads,
        "R": own.num_heads,
        "J": own.key_width,
        "I": own.value_width,
        "M": own.mixed_columns,
        "O": own.mixed_columns + gates,
        "T": own.taps,
        "r": own.rate_rank or 0,
    }


def recurrent_steps(
    prefix: str, x: str, own: Recurrence, eps: float, *, matrix: Matrix, vector: Vector
) -> tuple[list[Step], Project]:
    """All but the last product, and that one."""

    def project(name: str, rows: str) -> Project:
        return Project(x=x, out=name, weight=matrix(f"{prefix}.{name}", rows, "D"))

    def widen(name: str, rows: str) -> Project:
        return Project(x=f"{name}_down", out=name, weight=matrix(f"{prefix}.{name}", rows, "r"))

    def wide(name: str, dims: str = "R") -> Weight:
        return replace(vector(f"{prefix}.{name}", dims), is_wide=True)

    if own.rule == "gates":
        weight = vector(f"{prefix}.convolution", "MT")
        steps: list[Step] = [project(name, "M") for name in ("mixed", "gate", "outer")]
        steps += [
            Multiply(x="mixed", y="gate"),
            Convolve(x="mixed", weight=weight, width=own.taps),
            Multiply(x="mixed", y="outer"),
        ]
        return steps, Project(x="mixed", out="update", weight=matrix(f"{prefix}.out", "D", "M"))
    is_scan, is_narrow = own.rule == "scan", own.rate_rank is not None
    of_rates = "RJ" if own.by_row else "R"
    if own.is_dealt:
        steps = [project("all", "O"), project("ba", "2R"), *_deals(own)]
    else:
        mixed = [("q", "GJ"), ("k", "GJ"), ("v", "RI")] if own.is_apart else [("mixed", "M")]
        rates = [("gate", "RI"), ("a", of_rates)]
        if is_narrow:
            rates = [("gate_down", "r"), ("a_down", "r")]
        strengths = [] if is_scan else [("b", "R")]
        steps = [project(*name) for name in (*mixed, *rates, *strengths)]
        steps += [widen("gate", "RI"), widen("a", of_rates)] if is_narrow else []
        steps += _joins(own) if own.is_apart else []
    bias = vector(f"{prefix}.convolution_bias", "M") if own.has_bias else None
    names = [("convolution", "MT")]
    if own.is_apart:
        names = [("q_convolution", "GJT"), ("k_convolution", "GJT"), ("v_convolution", "RIT")]
    weight, *others = (vector(f"{prefix}.{name}", dims) for name, dims in names)
    steps.append(
        Convolve(x="mixed", weight=weight, others=tuple(others), width=own.taps, bias=bias)
    )
    steps.append(Activate(x="mixed", function="silu"))
    rule: dict[str, Any] = {
        "x": "mixed",
        "a": "a",
        "out": "read",
        "decay": wide("decay"),
        "bias": wide("decay_bias", of_rates),
        "num_key_heads": own.num_key_heads,
        "num_heads": own.num_heads,
        "key_width": own.key_width,
        "value_width": own.value_width,
    }
    if is_scan:
        steps.append(Scan(**rule, skip=wide("skip")))
    else:
        rule |= {"strength": own.strength, "by_row": own.by_row, "bound": own.rate_bound}
        steps.append(DeltaRule(**rule, b="b"))
    name, dims, heads = (
        ("gate", "RI", own.num_key_heads) if is_scan else ("read", "I", own.num_heads)
    )
    norm = Norm(
        x=name,
        out=name,
        kind="rms",
        weight=vector(f"{prefix}.read_norm", dims),
        bias=None,
        eps=own.read_eps or eps,
        num_heads=heads,
    )
    out = matrix(f"{prefix}.out", "D", "RI")
    if own.by_row:
        return [*steps, norm, Weigh(x="read", y="gate")], Project(
            x="read", out="update", weight=out
        )
    gates: list[Step] = [Activate(x="gate", function="silu"), Multiply(x="gate", y="read")]
    norms = [norm] if own.is_normed else []
    steps += [*gates, *norms] if is_scan else [*norms, *gates]
    return steps, Project(x="gate", out="update", weight=out)


def _joins(own: Recurrence) -> list[Step]:
    """Queries, keys and values, side by side."""
    keys, values = own.num_key_heads * own.key_width, own.num_heads * own.value_width
    parts = (("q", keys, 0), ("k", keys, keys), ("v", values, 2 * keys))

    def part(width: int, first: int) -> Dealt:
        columns = own.mixed_columns
        return Dealt(out="mixed", begin=0, width=width, first=first, num_columns=columns)

    return [Deal(x=name, num_groups=1, parts=(part(width, first),)) for name, width, first in parts]


def _deals(own: Recurrence) -> list[Step]:
    """What is stacked by key head: its query and key, and the values and gates that share them;
    likewise their rates."""
    keys, share = own.key_width, own.num_heads // own.num_key_heads
    values, all_keys = share * own.value_width, own.num_key_heads * own.key_width
    gates = own.num_heads * own.value_width

    def mixed(begin: int, width: int, first: int) -> Dealt:
        return Dealt(
            out="mixed", begin=begin, width=width, first=first, num_columns=own.mixed_columns
        )

    parts = (
        mixed(0, keys, 0),
        mixed(keys, keys, all_keys),
        mixed(2 * keys, values, 2 * all_keys),
        Dealt(out="gate", begin=2 * keys + values, width=values, first=0, num_columns=gates),
    )
    rates = (
        Dealt(out="b", begin=0, width=share, first=0, num_columns=own.num_heads),
        Dealt(out="a", begin=share, width=share, first=0, num_columns=own.num_heads),
    )
    return [
        Deal(x="all", num_groups=own.num_key_heads, parts=parts),
        Deal(x="ba", num_groups=own.num_key_heads, parts=rates),
    ]

"""The steps of a layer that keeps a state instead of keys: what it works on in, its update out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from freight.model.programme import Activate, Multiply, Norm, Project, Step
from freight.model.recurrent_steps import Convolve, Deal, Dealt, DeltaRule, Scan
from freight.model.switches import Recurrence
from freight.model.weight import Weight

__all__ = ["recurrent_sizes", "recurrent_steps"]

Matrix = Callable[[str, str, str], Weight]
Vector = Callable[[str, str], Weight]


def recurrent_sizes(own: Recurrence) -> Mapping[str, int]:
    """Dims: G heads of queries and keys, R of values, W and U columns of each, M of all that is
    convolved over T tokens; O of it with the gates."""
    gates = own.num_heads * own.value_width
    return {
        "G": own.num_key_heads,
        "R": own.num_heads,
        "W": own.key_width,
        "U": own.value_width,
        "M": own.mixed_columns,
        "O": own.mixed_columns + gates,
        "T": own.taps,
    }


def recurrent_steps(
    prefix: str, x: str, own: Recurrence, eps: float, *, matrix: Matrix, vector: Vector
) -> tuple[list[Step], Project]:
    """All but the last product, and that one."""

    def project(name: str, rows: str) -> Project:
        return Project(x=x, out=name, weight=matrix(f"{prefix}.{name}", rows, "D"))

    def wide(name: str) -> Weight:
        return replace(vector(f"{prefix}.{name}", "R"), is_wide=True)

    if own.rule == "gates":
        weight = vector(f"{prefix}.convolution", "MT")
        steps: list[Step] = [project(name, "M") for name in ("mixed", "gate", "outer")]
        steps += [
            Multiply(x="mixed", y="gate"),
            Convolve(x="mixed", weight=weight, width=own.taps),
            Multiply(x="mixed", y="outer"),
        ]
        return steps, Project(x="mixed", out="update", weight=matrix(f"{prefix}.out", "D", "M"))
    is_scan = own.rule == "scan"
    if own.is_dealt:
        steps = [project("all", "O"), project("ba", "2R"), *_deals(own)]
    else:
        names = [("gate", "RU"), ("mixed", "M"), ("a", "R")]
        steps = [project(*name) for name in (*names, *([] if is_scan else [("b", "R")]))]
    bias = vector(f"{prefix}.convolution_bias", "M") if own.has_bias else None
    weight = vector(f"{prefix}.convolution", "MT")
    steps.append(Convolve(x="mixed", weight=weight, width=own.taps, bias=bias))
    steps.append(Activate(x="mixed", function="silu"))
    rule: dict[str, Any] = {
        "x": "mixed",
        "a": "a",
        "out": "read",
        "decay": wide("decay"),
        "bias": wide("decay_bias"),
        "num_key_heads": own.num_key_heads,
        "num_heads": own.num_heads,
        "key_width": own.key_width,
        "value_width": own.value_width,
    }
    steps.append(Scan(**rule, skip=wide("skip")) if is_scan else DeltaRule(**rule, b="b"))
    gates: list[Step] = [Activate(x="gate", function="silu"), Multiply(x="gate", y="read")]
    name, dims, heads = (
        ("gate", "RU", own.num_key_heads) if is_scan else ("read", "U", own.num_heads)
    )
    norm = Norm(
        x=name,
        out=name,
        kind="rms",
        weight=vector(f"{prefix}.read_norm", dims),
        bias=None,
        eps=eps,
        num_heads=heads,
    )
    norms = [norm] if own.is_normed else []
    steps += [*gates, *norms] if is_scan else [*norms, *gates]
    return steps, Project(x="gate", out="update", weight=matrix(f"{prefix}.out", "D", "RU"))


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

"""The steps of a layer that keeps a state instead of keys: what it works on in, its update out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from freight.model.programme import Activate, Multiply, Norm, Project, Step
from freight.model.recurrent_steps import Convolve, Deal, Dealt, DeltaRule
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

    if own.is_dealt:
        steps: list[Step] = [project("all", "O"), project("ba", "2R"), *_deals(own)]
    else:
        steps = [project("mixed", "M"), project("gate", "RU"), project("b", "R"), project("a", "R")]
    decay, bias = (vector(f"{prefix}.{name}", "R") for name in ("decay", "decay_bias"))
    steps += [
        Convolve(x="mixed", weight=vector(f"{prefix}.convolution", "MT"), width=own.taps),
        Activate(x="mixed", function="silu"),
        DeltaRule(
            x="mixed",
            a="a",
            b="b",
            out="read",
            decay=replace(decay, is_wide=True),
            bias=replace(bias, is_wide=True),
            num_key_heads=own.num_key_heads,
            num_heads=own.num_heads,
            key_width=own.key_width,
            value_width=own.value_width,
        ),
        Norm(
            x="read",
            out="read",
            kind="rms",
            weight=vector(f"{prefix}.read_norm", "U"),
            bias=None,
            eps=eps,
            num_heads=own.num_heads,
        ),
        Activate(x="gate", function="silu"),
        Multiply(x="gate", y="read"),
    ]
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

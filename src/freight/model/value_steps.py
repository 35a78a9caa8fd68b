"""Steps that change a value number by number, or head by head, in place, as data."""

from __future__ import annotations

from dataclasses import dataclass

from freight.model.weight import Weight

__all__ = [
    "Activate",
    "Add",
    "AddPositions",
    "Cap",
    "Clip",
    "Gate",
    "Grow",
    "GrowHeads",
    "Level",
    "Multiply",
    "MultiplyColumns",
    "Scale",
    "ScaleBy",
    "ValueStep",
    "Xielu",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """x = x * factor, in place, the factor rounded to x's type first; or so many of its columns"""

    x: str
    factor: float
    first: int = 0
    num_columns: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleBy:
    """x = x * weight, in place, a single number"""

    x: str
    weight: Weight


@dataclass(frozen=True, kw_only=True, slots=True)
class Grow:
    """x = x (1 + rate log(1 + floor(p / span))) by each token's position p, in place (Llama 4)"""

    x: str
    rate: float
    span: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowHeads:
    """x = of each head h of a token at position p its numbers times rate[h] log(1 + p) + bias[h],
    in place (scalable softmax, 2501.19399)"""

    x: str
    num_heads: int
    rate: Weight
    bias: Weight


@dataclass(frozen=True, kw_only=True, slots=True)
class AddPositions:
    """x[t] += weight[position of token t + offset], in place"""

    x: str
    weight: Weight
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Activate:
    """x = function(x), in place"""

    x: str
    function: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Xielu:
    """x = p x^2 + x / 2 above 0, else n (e^x - 1 - x) + x / 2, in place; p = softplus(positive)
    and n = 1/2 + softplus(negative), one number each (xIELU, https://arxiv.org/abs/2411.13010)"""

    x: str
    positive: Weight
    negative: Weight


@dataclass(frozen=True, kw_only=True, slots=True)
class Multiply:
    """x = x * y, in place; y is not wanted again"""

    x: str
    y: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiplyColumns:
    """x = x * y's columns from ``first`` on, as many as x has, in place"""

    x: str
    y: str
    first: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """x = min(x, limit) sigmoid(slope min(x, limit)) (y + 1), y between -limit and limit, in place;
    y is not wanted again"""

    x: str
    y: str
    limit: float
    slope: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Add:
    """x = x + y, in place"""

    x: str
    y: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """x = each of its heads over the root of its mean square, in place"""

    x: str
    num_heads: int
    eps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """x = x, between -limit and limit, in place; no more than limit where it ``is_top`` alone"""

    x: str
    limit: float
    is_top: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Cap:
    """x = limit tanh(x / limit), in place"""

    x: str
    limit: float


ValueStep = (
    Scale
    | ScaleBy
    | Grow
    | GrowHeads
    | AddPositions
    | Activate
    | Xielu
    | Multiply
    | MultiplyColumns
    | Gate
    | Add
    | Level
    | Clip
    | Cap
)

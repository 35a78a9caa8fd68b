"""Steps of layers that keep a state of one size for each row instead of its keys, as data.

A convolution keeps the columns of a row's last tokens; the gated delta rule (Yang et al.,
2412.06464) keeps a matrix for each head, which every token decays and corrects, and a state space
scan (Mamba-2: Dao and Gu, 2405.21060) one that every token decays and adds to.
"""

from __future__ import annotations

from dataclasses import dataclass

from freight.model.weight import Weight

__all__ = [
    "Convolve",
    "Deal",
    "Dealt",
    "DeltaRule",
    "RecurrentStep",
    "Scan",
    "deal_blocks",
    "state_numbers",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dealt:
    """``width`` columns of each group, from its column ``begin`` on, go side by side into columns
    ``first`` and on of ``out``, which has ``num_columns``."""

    out: str
    begin: int
    width: int
    first: int
    num_columns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Deal:
    """The columns of x [T, G, W] are dealt out: of each group the same ones to each of ``parts``"""

    x: str
    num_groups: int
    parts: tuple[Dealt, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Convolve:
    """x[t, c] = bias[c] + sum over j of weight[c, j] x[t - width + 1 + j, c], within the row, in
    place; zeros are before its first token. ``weight`` is [C, width], a vector; or the first
    columns have that one, and those behind them ``others``."""

    x: str
    weight: Weight
    width: int
    bias: Weight | None = None
    others: tuple[Weight, ...] = ()

    @property
    def weights(self) -> tuple[Weight, ...]:
        return self.weight, *self.others

    @property
    def num_columns(self) -> int:
        return sum(own.num_columns for own in self.weights) // self.width


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaRule:
    """What each head of ``out`` [T, N U] reads from its matrix S [W, U], a token of the row at a
    time:

        S *= exp(-exp(decay) log(1 + exp(a + bias)));  S += k (v - k S) c sigmoid(b);  out = q S

    x [T, K W + K W + N U] has queries and keys of K heads, each made one long, queries over the
    root of W, and values of N heads, which share them in equal parts; ``a`` and ``b`` are [T, N]
    and c is the ``strength``. Where the decay is ``by_row`` (Kimi Linear: 2510.26692, section 3)
    each row of S has its own: ``a`` is [T, N W] then, and ``bias`` [N W]. With a ``bound`` S is
    multiplied by exp(-bound sigmoid(exp(decay) (a + bias))) instead.
    """

    x: str
    a: str
    b: str
    out: str
    decay: Weight
    bias: Weight
    num_key_heads: int
    num_heads: int
    key_width: int
    value_width: int
    strength: float = 1.0
    by_row: bool = False
    bound: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """What each head of ``out`` [T, N U] reads from its matrix S [W, U], a token of the row at a
    time, r being log(1 + exp(a + bias)):

        S *= exp(-exp(decay) r);  S += k (v r);  out = q S + skip v

    x [T, N U + K W + K W] has values of N heads, and keys and queries of K, which they share in
    equal parts; ``a`` is [T, N].
    """

    x: str
    a: str
    out: str
    decay: Weight
    bias: Weight
    skip: Weight
    num_key_heads: int
    num_heads: int
    key_width: int
    value_width: int


RecurrentStep = Deal | Convolve | DeltaRule | Scan


def state_numbers(step: object) -> tuple[int, int]:
    """What a step keeps of a row and changes by each token: numbers of the type that is computed
    with, and of float32."""
    if isinstance(step, Convolve):
        return step.num_columns * (step.width - 1), 0
    if isinstance(step, DeltaRule | Scan):
        return 0, step.num_heads * step.key_width * step.value_width
    return 0, 0


def deal_blocks(x: str, outs: str, num_blocks: int, columns: int) -> Deal:
    """Of x the values of one letter each in ``outs``, of so many columns: of each block as many."""
    width = columns // num_blocks
    parts = (
        Dealt(out=out, begin=place * width, width=width, first=0, num_columns=columns)
        for place, out in enumerate(outs)
    )
    return Deal(x=x, num_groups=num_blocks, parts=tuple(parts))

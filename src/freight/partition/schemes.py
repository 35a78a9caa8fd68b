"""A way of cutting a layer over one axis of chips, and what it costs as polynomials in s tokens.

Values only: ``scheme_search`` finds schemes, ``switching`` says which is best at which length.
Letters of terms: s tokens, h model width, q width of all queries, k of all keys, f of the MLP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Final

import numpy as np
from numpy.typing import NDArray

from freight.partition.layout import Layout
from freight.partition.moves import Move

__all__ = ["LITERAL", "PAPER", "Choice", "Polynomial", "Rules", "Scheme", "beaten"]

_Terms = Mapping[str, float]
_TOLERANCE: Final = 1e-9
_WHOLE: Final = Layout.parse("S W")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What is allowed beside the paper's eight rules, and what is not.

    ``core_by_heads``: attention's core is cut by heads only. ``only_projection_whole``: of all
    weights only the output projection may be stored whole by all. ``gathered_for_rows``: a gathered
    weight is used with rows of activations only, not by chips that all do the same. With these the
    paper's three schemes come out. ``all_to_all``: a tensor cut by columns may be exchanged into
    one cut by rows, and back. ``gathered_keys``: attention's core may be cut by rows of queries,
    whose keys and values are gathered.
    """

    core_by_heads: bool = True
    only_projection_whole: bool = True
    gathered_for_rows: bool = True
    all_to_all: bool = False
    gathered_keys: bool = False


LITERAL: Final = Rules(core_by_heads=False, only_projection_whole=False, gathered_for_rows=False)
PAPER: Final = Rules()


@dataclass(frozen=True, slots=True)
class Polynomial:
    """In s, the number of tokens."""

    constant: float = 0.0
    linear: float = 0.0
    quadratic: float = 0.0

    def at(self, s: float) -> float:
        return self.constant + self.linear * s + self.quadratic * s * s

    def __add__(self, other: Polynomial) -> Polynomial:
        pairs = zip(self.coefficients, other.coefficients, strict=True)
        return Polynomial(*(a + b for a, b in pairs))

    def __sub__(self, other: Polynomial) -> Polynomial:
        pairs = zip(self.coefficients, other.coefficients, strict=True)
        return Polynomial(*(a - b for a, b in pairs))

    @property
    def coefficients(self) -> tuple[float, float, float]:
        return self.constant, self.linear, self.quadratic


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One step of a scheme: a move of a value, or a weight and how it is stored and used. Terms are
    per chip; those ``moved`` and ``gathered`` without the (p - 1) / p that all moves have.

    ``value`` names what is moved or multiplied, by ``moves`` of a tensor S W, tokens by columns, or
    with a weight W U, rows by columns, that is ``stored`` and ``used`` so."""

    text: str
    flops: _Terms = field(default_factory=dict)
    moved: _Terms = field(default_factory=dict)
    gathered: _Terms = field(default_factory=dict)
    kept: _Terms = field(default_factory=dict)
    num_collectives: int = 0
    value: str = ""
    moves: tuple[Move, ...] = ()
    stored: Layout | None = None
    used: Layout | None = None


@dataclass(frozen=True)
class Scheme:
    """A way of cutting a layer over p chips; ``widths`` are the numbers behind the letters.
    ``stream`` is how the residual stream S W comes in, and goes on."""

    choices: tuple[Choice, ...]
    num_chips: int
    widths: Mapping[str, int]
    stream: Layout = _WHOLE

    @cached_property
    def flops(self) -> Polynomial:
        """Per chip, of products and of attention's core, in which a token sees half of all."""
        return self._polynomial(self.terms("flops"))

    @cached_property
    def moved(self) -> Polynomial:
        """Elements of activations that each chip sends."""
        return self._polynomial(self.terms("moved"))

    @cached_property
    def gathered(self) -> Polynomial:
        """Elements of weights that each chip sends."""
        return self._polynomial(self.terms("gathered"))

    @cached_property
    def weights(self) -> float:
        """Elements that each chip keeps."""
        return self._polynomial(self.terms("kept")).constant

    @cached_property
    def num_collectives(self) -> int:
        return sum(choice.num_collectives for choice in self.choices)

    @cached_property
    def moves(self) -> tuple[str, ...]:
        """What is moved or gathered, in order."""
        return tuple(choice.text for choice in self.choices if choice.num_collectives)

    @cached_property
    def costs(self) -> tuple[float, ...]:
        """All coefficients that count in a comparison."""
        both = self.moved + self.gathered
        return (*self.flops.coefficients, *both.coefficients, self.weights)

    def terms(self, what: str) -> dict[str, float]:
        """The sum of the terms of ``flops``, ``moved``, ``gathered`` or ``kept``, with widths that
        are equal under one letter; the (p - 1) / p of moves is in it."""
        factor = 1 - 1 / self.num_chips if what in ("moved", "gathered") else 1.0
        summed: dict[str, float] = {}
        for choice in self.choices:
            for letters, count in getattr(choice, what).items():
                key = self._plain(letters)
                summed[key] = summed.get(key, 0.0) + count * factor
        return {key: count for key, count in summed.items() if count}

    def _plain(self, letters: str) -> str:
        """In one order, and with h for what is as wide."""
        alike = [letter for letter in "qk" if self.widths[letter] == self.widths["h"]]
        return "".join(sorted(("h" if own in alike else own for own in letters), key="shqkf".index))

    def _polynomial(self, terms: _Terms) -> Polynomial:
        powers = [0.0, 0.0, 0.0]
        for letters, count in terms.items():
            widths = prod(self.widths[letter] for letter in letters if letter != "s")
            powers[letters.count("s")] += count * widths
        return Polynomial(*powers)

    def followed_by(self, path: Scheme) -> Scheme:
        """This, then what ``path`` does. Costs are sums over choices, so those of both are added
        here, where they would otherwise be reckoned again for all that both have done."""
        made = replace(self, choices=(*self.choices, *path.choices))
        pairs = zip(self.costs, path.costs, strict=True)
        made.__dict__["costs"] = tuple(own + more for own, more in pairs)
        made.__dict__["num_collectives"] = self.num_collectives + path.num_collectives
        return made

    def beats(self, other: Scheme) -> bool:
        """No worse in any coefficient and better in one, or with fewer collectives."""
        return bool(beaten([self, other])[0, 1])


def beaten(schemes: Sequence[Scheme]) -> NDArray[np.bool_]:
    """[i, j]: whether scheme i beats scheme j."""
    collectives = np.array([own.num_collectives for own in schemes])
    better = collectives[:, None] < collectives
    worse = np.zeros_like(better)
    for costs in np.array([own.costs for own in schemes]).T:
        worse |= costs[:, None] > costs * (1 + _TOLERANCE)
        better |= costs[:, None] < costs * (1 - _TOLERANCE)
    return np.asarray(better & ~worse)

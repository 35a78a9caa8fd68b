"""Which scheme is fastest at which length, on given chips.

A step takes the longer of its arithmetic and of reading its weights; moves come on top. With
overlap, weights are gathered while something else is computed, for that depends on no activation;
moves of activations are waited for. Knows no model beyond its schemes' polynomials.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from freight.partition.schemes import Choice, Scheme

__all__ = ["Rates", "Span", "fastest", "layer_seconds"]

_Times = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Of one chip: what it computes, reads and sends in a second, and the bytes of an activation
    and of a weight. ``collective_s`` is the fixed time of a collective."""

    flops: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    activation_bytes: float = 2.0
    weight_bytes: float = 2.0
    collective_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """From ``first`` to ``last`` tokens a scheme is the fastest."""

    first: int
    last: int
    scheme: Scheme


def layer_seconds(scheme: Scheme, lengths: _Times, rates: Rates, *, overlap: bool) -> _Times:
    """Of one layer, for each number of tokens."""
    computed = sum((_computed(scheme, own, lengths, rates) for own in scheme.choices), 0 * lengths)
    moved = _at(scheme.moved.coefficients, lengths) * rates.activation_bytes
    gathered = scheme.gathered.constant * rates.weight_bytes / rates.link_bytes_per_s
    waited = moved / rates.link_bytes_per_s + scheme.num_collectives * rates.collective_s
    both = np.maximum(computed, gathered) if overlap else computed + gathered
    return np.asarray(both + waited)


def fastest(
    schemes: Sequence[Scheme], rates: Rates, most_tokens: int, *, overlap: bool
) -> list[Span]:
    """The fastest of the schemes for every length from one token on, neighbours together; of
    schemes that are equally fast the first."""
    lengths = np.arange(1.0, most_tokens + 1)
    times = np.stack([layer_seconds(own, lengths, rates, overlap=overlap) for own in schemes])
    best = np.argmin(times, axis=0)
    starts = [0, *(np.flatnonzero(np.diff(best)) + 1)]
    ends = [*starts[1:], most_tokens]
    return [
        Span(int(start) + 1, int(end), schemes[int(best[start])])
        for start, end in zip(starts, ends, strict=True)
    ]


def _computed(scheme: Scheme, choice: Choice, lengths: _Times, rates: Rates) -> _Times:
    """A product, or attention's core."""
    powers = [0.0, 0.0, 0.0]
    for letters, count in choice.flops.items():
        widths = prod(scheme.widths[letter] for letter in letters if letter != "s")
        powers[letters.count("s")] += count * widths
    used = choice.gathered or choice.kept
    weights = sum(
        count * prod(scheme.widths[letter] for letter in letters) for letters, count in used.items()
    )
    read = weights * rates.weight_bytes / rates.memory_bytes_per_s
    return np.maximum(_at(tuple(powers), lengths) / rates.flops, read)


def _at(coefficients: tuple[float, ...], lengths: _Times) -> _Times:
    return np.asarray(sum(c * lengths**power for power, c in enumerate(coefficients)))

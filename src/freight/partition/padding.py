"""A model made to divide by a mesh: heads, widths and vocabulary rounded up, and what that costs.

Padded heads and columns are zeros that are computed with; the answers are those of the model. The
model's own width cannot be padded: norms would see it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm
from typing import Final

from freight.errors import InputError
from freight.model.decoder import count_parameters
from freight.model.switches import ModelConfig
from freight.partition.layers import Cut
from freight.partition.layout import Mesh
from freight.quantities import align_up

__all__ = ["Padding", "next_divisor", "pad"]

_MOST_GROWTH: Final = 1.5
_MOST_GROWTH_FOR_GROUPS: Final = 1.25
"""Of an MLP, so that no group of integers is cut apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Padding:
    """``config`` has the padded heads, MLP and vocabulary; ``notes`` say what was padded."""

    config: ModelConfig
    notes: tuple[str, ...]

    def added_parameters(self, original: ModelConfig) -> int:
        return count_parameters(self.config) - count_parameters(original)


def pad(config: ModelConfig, mesh: Mesh, cut: Cut, *, group: int = 1) -> Padding:
    """The MLP rounded up to a multiple of all axes that cut it as weights are stored, heads to one
    of the first of them as long as they do not grow by more than half: where there are more chips
    than that, the width of heads is cut. With a ``group`` of more than one column each chip has
    whole groups of the MLP's, where that adds a quarter at most.

    The same for all cuts of stored weights, whatever is gathered of them: phases share them.
    InputError where the model's width does not divide.
    """
    parts = mesh.size(cut.width + cut.inner)
    if config.hidden_size % parts:
        raise InputError(
            f"A model of width {config.hidden_size} was to be cut over {parts} chips ({mesh}).",
            f"{config.hidden_size} does not divide by {parts}, and a width cannot be padded.",
            f"Choose another number of chips, as {_nearest(config.hidden_size, parts)}.",
        )
    multi = config.num_kv_heads == config.num_heads
    heads = _padded_heads(config, mesh, cut)
    whole = lcm(parts, mesh.size(cut.inner) * group)

    def padded_width(columns: int) -> int:
        found = align_up(columns, whole)
        return found if found <= _MOST_GROWTH_FOR_GROUPS * columns else align_up(columns, parts)

    width = padded_width(config.intermediate_size)
    vocab_size = align_up(config.vocab_size, parts)
    padded = replace(
        config,
        vocab_size=vocab_size,
        num_heads=heads,
        num_kv_heads=heads if multi else config.num_kv_heads,
        intermediate_size=width,
    )
    experts = config.experts
    if experts is not None:
        # An MLP without experts beside them has its own width.
        narrow = padded_width(experts.intermediate_size)
        beside = padded_width(experts.shared_size)
        own = replace(experts, intermediate_size=narrow, shared_size=beside)
        padded = replace(padded, experts=own)
    pairs = {
        "heads": (config.num_heads, heads),
        "columns of the MLP": (config.intermediate_size, width),
        "tokens of the vocabulary": (config.vocab_size, vocab_size),
    }
    notes = [f"{own} {name} padded to {to}" for name, (own, to) in pairs.items() if own != to]
    return Padding(config=padded, notes=tuple(notes))


def next_divisor(number: int, least: int) -> int | None:
    """The first number from ``least`` on that divides another; None where there is none."""
    return next((own for own in range(least, number + 1) if number % own == 0), None)


def _nearest(number: int, parts: int) -> str:
    """Divisors on both sides."""
    below = next(own for own in range(min(parts, number), 0, -1) if number % own == 0)
    above = next_divisor(number, parts)
    return f"{below}" if above is None else f"{below} or {above}"


def _padded_heads(config: ModelConfig, mesh: Mesh, cut: Cut) -> int:
    """Rounded up for as many of the first axes as may be, whole groups of grouped heads."""
    found = config.num_heads
    group = 1 if config.num_kv_heads == config.num_heads else config.num_kv_heads
    axes = cut.inner + cut.width
    for last in range(1, len(axes) + 1):
        heads = align_up(config.num_heads, lcm(mesh.size(axes[:last]), group))
        if heads > _MOST_GROWTH * config.num_heads:
            break
        found = heads
    return found

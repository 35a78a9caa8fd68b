"""Parts of a model and of its work, each as a model and as work: ranks, ranges of layers, rows.

Knows no machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from freight.errors import InputError
from freight.model.config import ModelConfig
from freight.model.sources import TensorSource
from freight.plan.beginnings import Beginnings, Shared
from freight.plan.workload import Workload
from freight.quantities import align_up

__all__ = [
    "Shares",
    "cut_over",
    "divisors",
    "layer_ranges",
    "part_of",
    "ranges_of",
    "sources_of",
    "with_layers",
]


@dataclass(frozen=True, slots=True)
class Shares:
    """How many replicas there are, stages of each, and ranks of each stage."""

    data: int
    stages: int
    ranks: int

    def __str__(self) -> str:
        parts = {"data": self.data, "pipeline": self.stages, "tensor": self.ranks}
        return " x ".join(f"{name} {n}" for name, n in parts.items() if n > 1) or "one chip"


def cut_over(config: ModelConfig, ranks: int) -> ModelConfig:
    """The part of each matrix that one of so many ranks has, as a model. InputError where heads or
    widths do not divide."""
    if ranks == 1:
        return config
    inner = config.intermediate_size if config.experts is None else _width(config)
    sizes = {
        "key heads": config.num_kv_heads,
        "query heads": config.num_heads,
        "columns of the MLP": inner,
        "columns of the stream": config.hidden_size,
    }
    others = config.other_heads
    if others is not None:
        sizes["key heads of other layers"] = others.num_kv_heads
        sizes["query heads of other layers"] = others.num_heads
    for name, size in sizes.items():
        if size % ranks:
            most = max(own for own in divisors(size) if own < ranks)
            raise InputError(
                f"A layer was to be cut over {ranks} chips.",
                f"{size} {name} do not divide by {ranks}.",
                f"Cut it over {most} at most, or by rows or layers.",
            )
    experts, sharing = config.experts, config.sharing
    return replace(
        config,
        num_heads=config.num_heads // ranks,
        num_kv_heads=config.num_kv_heads // ranks,
        intermediate_size=max(1, config.intermediate_size // ranks),
        vocab_size=align_up(config.vocab_size, ranks) // ranks,
        experts=experts and replace(experts, intermediate_size=inner // ranks),
        other_heads=others
        and replace(
            others, num_heads=others.num_heads // ranks, num_kv_heads=others.num_kv_heads // ranks
        ),
        sharing=sharing and replace(sharing, mlp_size=max(1, sharing.mlp_size // ranks)),
    )


def with_layers(config: ModelConfig, layers: range, *, with_ends: bool) -> ModelConfig:
    """A model of these layers; without ends its vocabulary has one token."""
    own = config.of_layers(layers)
    return own if with_ends else replace(own, vocab_size=1)


def sources_of(
    sources: Mapping[str, TensorSource], layers: range, *, with_ends: bool
) -> Mapping[str, TensorSource]:
    """Those of some layers, which are numbered from 0."""
    found = {}
    for name, source in sources.items():
        room, _, rest = name.partition(".")
        if room == "layers":
            number, _, rest = rest.partition(".")
            if int(number) in layers:
                found[f"layers.{int(number) - layers.start}.{rest}"] = source
        elif not with_ends and name in ("embedding", "head.weight", "head.bias"):
            found[name] = source.rows(0, 1)
        else:
            found[name] = source
    return found


def layer_ranges(num_layers: int, stages: int) -> list[range]:
    """Equal ones; where that cannot be, the first have one more, for the last has the head."""
    size, more = divmod(num_layers, stages)
    return ranges_of([size + (stage < more) for stage in range(stages)])


def ranges_of(counts: Sequence[int]) -> list[range]:
    """So many numbers each, one after the other."""
    starts = [0, *accumulate(counts)]
    return [range(first, last) for first, last in pairwise(starts)]


def part_of(workload: Workload, parts: int, *, is_apart: bool = False) -> Workload:
    """The rows of the one that has most of them, of lengths as all have: each group's in
    proportion. Parts take blocks of rows in turn, or where they are ``is_apart`` one request."""
    rows = -(-workload.num_rows // parts)
    if rows == workload.num_rows:
        return workload
    share = rows / workload.num_rows
    return replace(
        workload,
        num_rows=rows,
        total_prompt_tokens=math.ceil(rows * workload.mean_prompt_tokens),
        total_new_tokens=math.ceil(share * workload.total_new_tokens),
        total_scored_tokens=math.ceil(share * workload.total_scored_tokens),
        lengths=_part_of(workload.lengths, rows),
        brought=_part_of(workload.brought, rows),
        beginnings=_begin(workload, rows, is_apart=is_apart),
    )


def _begin(workload: Workload, rows: int, *, is_apart: bool) -> Beginnings | None:
    """What so many of the rows begin with."""
    own, groups = workload.beginnings, workload.lengths
    if own is None:
        return None
    shared = own.groups
    if len(shared) == len(groups):  # not one that is of them all
        parts = zip(shared, _counts(groups, rows), groups, strict=True)
        shared = tuple(
            Shared(one.tokens, min(count, math.ceil(one.begun * count / group[0])))
            for one, count, group in parts
            if count
        )
    return own.apart(shared, workload.min_samples) if is_apart else own.beside(shared)


def _part_of(
    groups: tuple[tuple[int, int, int], ...], rows: int
) -> tuple[tuple[int, int, int], ...]:
    """So many rows of these groups, from each as many as it has of all."""
    return tuple(
        (count, prompt, new)
        for count, (_, prompt, new) in zip(_counts(groups, rows), groups, strict=True)
        if count
    )


def _counts(groups: Sequence[tuple[int, int, int]], rows: int) -> list[int]:
    """How many of so many rows are of each group."""
    ends = [*accumulate(count for count, _, _ in groups)]
    reached = [0, *(round(end * rows / ends[-1]) for end in ends)]
    return [last - first for first, last in pairwise(reached)]


def divisors(number: int) -> list[int]:
    return [own for own in range(1, number + 1) if number % own == 0]


def _width(config: ModelConfig) -> int:
    assert config.experts is not None
    return config.experts.intermediate_size

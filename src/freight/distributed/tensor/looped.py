"""Collectives and products in one loop (Pope et al., section 3.5): moving hides behind arithmetic.

A product of a gathered value is computed piece by piece as the pieces come round the ring; a sum
that is scattered passes round the ring and grows by each rank's product when that is asked for.
Where more than two ranks take part, halves go round in both directions. The bytes are those of the
plain collective; sums are made in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch

from freight.distributed.tensor.ranks import Parts, Ranks
from freight.partition.sharded import Compute, Sharded, Transfer

__all__ = [
    "GatherProducts",
    "ProductScatter",
    "Stage",
    "arriving",
    "gather_products",
    "product_scatter",
    "scattered",
    "stages",
]

Multiply = Callable[[Compute, list[Parts]], Parts]


@dataclass(frozen=True, slots=True)
class GatherProducts:
    """Products of a value that is gathered for them alone, over the dim that they sum over."""

    transfer: Transfer
    products: tuple[Compute, ...]


@dataclass(frozen=True, slots=True)
class ProductScatter:
    """A product whose partial sums are scattered at once."""

    product: Compute
    transfer: Transfer


Stage = Transfer | Compute | GatherProducts | ProductScatter


def stages(own: Sharded, apart: Collection[str] = ()) -> list[Stage]:
    """The steps, with those joined that can be one loop; where a product could be in either kind of
    loop, in the one that moves more. Products with the weights ``apart`` are left alone."""
    found: list[Stage] = []
    left = list(own.steps)
    while left:
        joined = _gather_products(left, apart)
        if joined is not None:
            # Products that stand further behind come first: they need nothing that is between.
            left = [step for step in left[1:] if step not in joined.products]
            found.append(joined)
            continue
        scatter = _product_scatter(left, apart)
        found.append(left[0] if scatter is None else scatter)
        left = left[1 if scatter is None else 2 :]
    return found


def _gather_products(
    steps: Sequence[Transfer | Compute], apart: Collection[str]
) -> GatherProducts | None:
    """Of a value that is gathered along the dim that all products of it sum over, and used by
    nothing else."""
    step = steps[0]
    if not isinstance(step, Transfer) or step.move.kind != "all-gather" or step.is_weight:
        return None
    products, scattered = [], 0.0
    for place, other in enumerate(steps):
        if isinstance(other, Transfer) and place and other.value == step.value:
            return None
        if not isinstance(other, Compute) or step.value not in other.operands:
            continue
        if not _is_product(other, apart) or step.move.source in other.out_layout.dims:
            return None
        weight = other.operands[1]
        if any(isinstance(own, Transfer) and own.value == weight for own in steps[:place]):
            return None
        products.append(other)
        scatter = _product_scatter(steps[place:], apart)
        scattered += 0.0 if scatter is None else scatter.transfer.elements
    if not products or scattered > step.elements:
        return None
    return GatherProducts(step, tuple(products))


def _product_scatter(
    steps: Sequence[Transfer | Compute], apart: Collection[str]
) -> ProductScatter | None:
    """Of a product whose sums are scattered next."""
    product, after = steps[0], steps[1] if len(steps) > 1 else None
    if not _is_product(product, apart) or not isinstance(after, Transfer):
        return None
    if after.value != product.out or after.move.kind != "reduce-scatter":
        return None
    return ProductScatter(product, after)


def _is_product(step: Transfer | Compute, apart: Collection[str]) -> TypeGuard[Compute]:
    return isinstance(step, Compute) and step.kind == "product" and step.operands[1] not in apart


def gather_products(
    step: GatherProducts, values: Mapping[str, Parts], ranks: Ranks, multiply: Multiply
) -> dict[str, Parts]:
    """The results by name: each grows by what a piece adds to it."""
    transfer, dim = step.transfer, step.transfer.move.source
    place = transfer.before.dims.index(dim)
    made: dict[str, Parts] = {}
    for firsts, pieces in arriving(ranks, values[transfer.value], transfer.move.axes, place):
        width = pieces[0].shape[place]
        for product in step.products:
            weights = values[product.operands[1]]
            across = product.layouts[1].dims.index(dim)
            pairs = zip(weights, firsts, strict=True)
            own = multiply(
                product, [pieces, [w.narrow(across, first, width) for w, first in pairs]]
            )
            if product.out not in made:
                made[product.out] = own
                continue
            for total, part in zip(made[product.out], own, strict=True):
                total += part
    return made


def product_scatter(
    step: ProductScatter, values: Mapping[str, Parts], ranks: Ranks, multiply: Multiply
) -> Parts:
    """The sums, scattered: of the operand that has the dim a chunk is multiplied at a time."""
    product, dim = step.product, step.transfer.move.target
    side = 0 if dim in product.layouts[0].dims else 1
    across = product.layouts[side].dims.index(dim)
    operands = [values[name] for name in product.operands]
    axes = step.transfer.move.axes
    size = operands[side][0].shape[across] // ranks.mesh.size(axes)

    def make(firsts: list[int], width: int) -> Parts:
        pairs = zip(operands[side], firsts, strict=True)
        both = [*operands]
        both[side] = [own.narrow(across, first, width) for own, first in pairs]
        return multiply(product, both)

    return scattered(ranks, axes, size, make, product.out_layout.dims.index(dim))


def arriving(ranks: Ranks, parts: Parts, axes: str, dim: int) -> Iterator[tuple[list[int], Parts]]:
    """Pieces of what is gathered along ``dim``, for each own rank where its piece begins there. The
    next are under way while these are used."""
    count, places, size = ranks.mesh.size(axes), ranks.places(axes), parts[0].shape[dim]
    halves = _halves(parts, dim, count)
    for step in range(count):
        pending = []
        if step + 1 < count:
            pending = [ranks.shift(own, axes, way) for way, _, own in halves]
        for way, first, own in halves:
            yield [((place - way * step) % count) * size + first for place in places], own
        come = [one.wait() for one in pending]
        halves = [(way, first, own) for (way, first, _), own in zip(halves, come, strict=False)]


def scattered(
    ranks: Ranks,
    axes: str,
    size: int,
    make: Callable[[list[int], int], Parts],
    dim: int,
) -> Parts:
    """Sums scattered along ``dim``, on which each rank keeps ``size``. ``make`` computes a rank's
    own share from where it begins, so long; it is asked while what the others have is under way."""
    count, places = ranks.mesh.size(axes), ranks.places(axes)
    split = size // 2 if count > 2 and size % 2 == 0 else 0
    ways = [(1, 0, split), (-1, split, size - split)] if split else [(1, 0, size)]

    def made(step: int) -> list[Parts]:
        return [
            make([((place - way * (1 + step)) % count) * size + first for place in places], width)
            for way, first, width in ways
        ]

    sums = made(0)
    for step in range(1, count):
        pending = [ranks.shift(own, axes, way) for own, (way, _, _) in zip(sums, ways, strict=True)]
        more = made(step)
        sums = [
            [own.add_(come) for own, come in zip(mine, one.wait(), strict=True)]
            for mine, one in zip(more, pending, strict=True)
        ]
    return [torch.cat(pair, dim) if len(pair) > 1 else pair[0] for pair in zip(*sums, strict=True)]


def _halves(parts: Parts, dim: int, count: int) -> list[tuple[int, int, Parts]]:
    """(direction, first, pieces): both directions where it pays and goes."""
    size = parts[0].shape[dim]
    if count <= 2 or size % 2:
        return [(1, 0, parts)]
    pairs = [part.chunk(2, dim) for part in parts]
    return [(1, 0, [own for own, _ in pairs]), (-1, size // 2, [own for _, own in pairs])]

"""Moves and products in one loop: the same values and the same bytes as one after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from freight.distributed.tensor.looped import (
    GatherProducts,
    ProductScatter,
    arriving,
    scattered,
    stages,
)
from freight.distributed.tensor.virtual import VirtualRanks
from freight.partition.layers import Cut, block, layer_sizes
from freight.partition.layout import Mesh
from freight.partition.sharded import Sharded

from .bed import Case, cases, check, config, schemes

EIGHT = Mesh.of(x=2, y=2, z=2)
CASES = [*cases(EIGHT, some=False), *schemes(8)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layouts_are_those_without_a_loop(case: Case) -> None:
    differences = check(VirtualRanks(case.own.mesh), case, looped=True)
    assert not any(differences.values()), differences


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("size", [3, 4])
def test_rings(count: int, size: int) -> None:
    """Every piece comes once to every rank; sums are those of all ranks. Halves go both ways where
    they can."""
    ranks = VirtualRanks(Mesh.of(x=count))
    whole = torch.randn(5, count * size, dtype=torch.float64)
    gathered = [torch.full_like(whole, torch.nan) for _ in range(count)]
    for firsts, pieces in arriving(ranks, [*whole.chunk(count, 1)], "x", 1):
        for own, first, piece in zip(gathered, firsts, pieces, strict=True):
            target = own[:, first : first + piece.shape[1]]
            assert target.isnan().all()
            target.copy_(piece)
    assert all(own.equal(whole) for own in gathered)
    assert ranks.sent_bytes == count * (count - 1) * 5 * size * 8
    terms = torch.randn(count, 5, count * size, dtype=torch.float64)

    def make(firsts: list[int], width: int) -> list[torch.Tensor]:
        return [
            own[:, first : first + width].clone() for own, first in zip(terms, firsts, strict=True)
        ]

    sums = torch.cat(scattered(ranks, "x", size, make, 1), 1)
    torch.testing.assert_close(sums, terms.sum(0), rtol=0, atol=1e-12)
    assert ranks.sent_bytes == 2 * count * (count - 1) * 5 * size * 8


def test_what_is_joined() -> None:
    """In a parallel block the stream is gathered for all of its products; of a loop of either kind
    that which moves more is made. Weights that have scales stay apart."""
    own = config(64, 1, parallel=True)
    sizes = layer_sizes(own, rows=64, new_tokens=2)
    part = block(Mesh.of(x=1, y=2, z=4), sizes, Cut(), own)
    gathers = [("gated", ("mlp",)), ("attended", ("attention",))]
    assert joined(part) == [("normed", ("hidden", "queries", "keys")), *gathers]
    assert joined(part, "mlp in", "queries in") == gathers
    # Where the model's width is cut too, more of a serial MLP is scattered than gathered.
    serial = block(EIGHT, sizes, Cut(), replace(own, parallel=False))
    normed = ("attention normed", ("queries", "keys"))
    assert joined(serial) == [normed, ("attended", ("attention",)), "hidden", "mlp"]


def joined(own: Sharded, *apart: str) -> list[str | tuple[str, tuple[str, ...]]]:
    found: list = []
    for step in stages(own, apart):
        if isinstance(step, GatherProducts):
            found.append((step.transfer.value, tuple(one.out for one in step.products)))
        elif isinstance(step, ProductScatter):
            found.append(step.product.out)
    return found

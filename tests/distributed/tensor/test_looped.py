"""Moves and products in one loop: the same values and the same bytes as one after the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from freight.distributed.tensor.ahead import without_gathers
from freight.distributed.tensor.looped import (
    GatherProducts,
    ProductScatter,
    arriving,
    scattered,
    stages,
)
from freight.distributed.tensor.model import load_model
from freight.distributed.tensor.virtual import VirtualRanks
from freight.partition.layers import Cut, block, layer_sizes
from freight.partition.layout import Mesh
from freight.partition.sharded import Sharded

from ...runtime import tiny
from ...runtime.test_engine_parity import CONFIGS
from .bed import CUTS, Case, cases, check, config, greedy, schemes

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


def test_a_model_in_loops(tmp_path: Path) -> None:
    """The tokens of transformers; bytes as without loops."""
    reference = tiny.make_model(tmp_path, config=CONFIGS["qwen3"])
    prompts = tiny.prompts(4, 11)
    moved = []
    for looped in (False, True):
        ranks = VirtualRanks(EIGHT)
        model = load_model(tmp_path, ranks, CUTS, dtype=torch.float32, looped=looped)
        found = [*zip(*greedy(model, prompts, 4, CUTS), strict=True)]
        assert [list(own) for own in found] == tiny.tokens(tiny.reference(reference, prompts, 4))
        moved.append(model.executor.moved)
    assert moved[0] == moved[1]


@pytest.mark.parametrize("case", CASES[::7], ids=lambda case: case.name)
def test_weights_gathered_ahead(case: Case) -> None:
    """What is left gathers no weight, and is given each as it was used."""
    early, left = without_gathers(case.own)
    assert not any(step.is_weight for step in left.transfers)
    assert left.weights == left.used == case.own.used
    assert sum(own.elements for own in early) == case.own.moved(weights=True)
    assert left.moved(weights=False) == case.own.moved(weights=False)

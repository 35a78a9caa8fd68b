"""Every layout of the planner on virtual ranks: the plain computation, and the algebra's bytes."""

from __future__ import annotations

import pytest

from freight.distributed.tensor.virtual import VirtualRanks
from freight.partition.layout import Mesh

from .bed import Case, cases, check, schemes, searched


def of(mesh: Mesh, *, some: bool) -> list[Case]:
    return [*cases(mesh, some=some), *schemes(mesh.num_chips), *searched(mesh, literal=not some)]


@pytest.mark.parametrize("case", of(Mesh.of(x=2, y=2, z=2), some=False), ids=lambda c: c.name)
def test_on_eight_ranks(case: Case) -> None:
    differences = check(VirtualRanks(case.own.mesh), case)
    assert not any(differences.values()), differences


@pytest.mark.parametrize("case", of(Mesh.of(x=4, y=4, z=4), some=True), ids=lambda c: c.name)
def test_on_64_ranks(case: Case) -> None:
    differences = check(VirtualRanks(case.own.mesh), case)
    assert not any(differences.values()), differences

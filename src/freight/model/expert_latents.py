"""What is around experts that work on fewer numbers than the residual stream has: a unit before the
router makes these, ``narrow``, and one behind the experts puts what they ``made`` together into the
stream."""

from __future__ import annotations

from collections.abc import Callable

from freight.model.expert_steps import Clear
from freight.model.programme import Project, Unit
from freight.model.weight import Weight

__all__ = ["narrow", "widen"]

Matrix = Callable[[str, str, str], Weight]


def narrow(layer: int, matrix: Matrix) -> Unit:
    """Of what the MLP beside the experts works on; nothing is made yet."""
    prefix = f"layers.{layer}.narrow"
    steps = Project(x="aside", out="narrow", weight=matrix(prefix, "L", "D")), Clear(x="made")
    return Unit(name=prefix, kind="mlp", layer=layer, steps=steps)


def widen(layer: int, matrix: Matrix) -> Unit:
    prefix = f"layers.{layer}.widen"
    last = Project(x="made", out="x", weight=matrix(prefix, "D", "L"), adds=True)
    return Unit(name=prefix, kind="mlp", layer=layer, steps=(last,))
